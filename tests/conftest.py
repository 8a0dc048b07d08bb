import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402
from support.models import noisy_copy, tiny_model  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

import hf_specdec  # noqa: E402, F401  (installs the hook)


torch.set_num_threads(1)  # the models are so tiny that a second thread only costs, and costs much on a busy machine

settings.register_profile("the same examples every time", derandomize=True)
settings.load_profile("the same examples every time")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """A tiny Llama in float64, for modules that have no target of their own."""
    return tiny_model()


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    """A draft that agrees with it often."""
    return noisy_copy(target, noise=0.05)
