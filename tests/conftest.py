import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

import hf_specdec  # noqa: E402, F401  (installs the hook)


torch.set_num_threads(1)  # the models are so tiny that a second thread only costs, and costs much on a busy machine

settings.register_profile("the same examples every time", derandomize=True)
settings.load_profile("the same examples every time")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
