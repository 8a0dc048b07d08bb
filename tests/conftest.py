import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

import hf_specdec  # noqa: E402, F401  (installs the hook)


torch.set_num_threads(1)  # the models are so tiny that a second thread only costs, and costs much on a busy machine


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
