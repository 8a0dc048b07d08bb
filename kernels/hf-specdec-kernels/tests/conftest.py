"""
Fixtures of the kernel tests. Without a GPU, Triton's interpreter runs the kernels on the CPU; its environment variable
must be set before triton is imported. The tests import the package in `torch-ext/`, installed or not.
"""

import importlib.util
import os
import sys
from pathlib import Path

import torch


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "torch-ext")]

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

import pytest  # noqa: E402


torch.set_num_threads(1)


@pytest.fixture
def device() -> torch.device:
    """The device on which the kernels run."""
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch):
    """Fills new memory with NaN (integers with some number), so that an unwritten result shows."""
    new_empty, empty = torch.Tensor.new_empty, torch.empty

    @torch.no_grad()  # torch's compiler makes parameters, too
    def poison(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return tensor.fill_(torch.nan)
        return tensor.fill_(-(2**30) if tensor.dtype.itemsize > 1 else 77)

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: poison(new_empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: poison(empty(*args, **kwargs)))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: shapes that only a GPU computes in reasonable time")
    config.addinivalue_line("markers", "slow: more of the same, which takes minutes without a GPU")
    if not ON_GPU and importlib.util.find_spec("triton") is not None:
        from interpreter import let_integers_overflow, patch_the_language_once, round_to_the_nearest

        patch_the_language_once()
        round_to_the_nearest()
        if config.option.markexpr == "not slow":  # all cases together look for overflows
            let_integers_overflow()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not ON_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
