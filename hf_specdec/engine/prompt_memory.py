"""Memory beside the K/V blocks, in which prompts with images or sound are read, one after the other."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..cache.sizes import bytes_per_token
from ..models.prompt_memory import bytes_of_largest, bytes_of_prompt
from ..models.structure import execution_device


GIB = 1 << 30

_measured: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()
"""Measured bytes for each estimated byte, the most of all prompts of a model that were read on a GPU."""


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, that of a device or the host's."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


_WORDS = ("DefaultCPUAllocator: ", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""What errors say that torch raises as a bare `RuntimeError` when memory has run out."""


class PromptMemory:
    """
    What prompts with inputs beside their tokens need while they are read, and what there is.

    Args:
        model (`PreTrainedModel`): the target.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = model
        self.room: int | None = None
        """Bytes that the K/V blocks leave; None if not known."""

    @property
    def _per_token(self) -> int:
        return sum(bytes_per_token(self._model).values())

    @property
    def _factor(self) -> float:
        return _measured.get(self._model, 1.0)

    def needed(self, num_tokens: int, values: dict[str, Any]) -> int:
        """Estimated bytes that the device needs for such a prompt; see `bytes_of_prompt`. 0 without `values`."""
        if not values:
            return 0
        return int(self._factor * bytes_of_prompt(self._model, num_tokens, values, self._per_token))

    def needed_for_pixels(self, image_pixels: int) -> int:
        """Estimated bytes that the device needs for an image of so many pixels; see `bytes_of_largest`."""
        return int(self._factor * bytes_of_largest(self._model, image_pixels, self._per_token))

    def check(self, num_tokens: int, values: dict[str, Any]) -> None:
        """
        Checks that there is room for a prompt.

        Raises:
            ValueError: if there can never be.
        """
        needed = 0 if self.room is None else self.needed(num_tokens, values)
        if self.room is not None and needed > self.room:
            raise ValueError(
                f"`{_name_of(values)}`: to read this prompt the model needs about {needed / GIB:.3g} GiB, but beside "
                f"the keys and values there are {self.room / GIB:.3g} GiB. {REMEDY}"
            )

    def error_of(self, error: BaseException, num_tokens: int, values: dict[str, Any]) -> str:
        """What a request is told whose prompt was not read because memory ran out."""
        return (
            f"{type(error).__name__}: memory ran out while this prompt was read, which takes about "
            f"{self.needed(num_tokens, values) / GIB:.3g} GiB beside its keys and values. {REMEDY} ({error})"
        )

    @contextmanager
    def measuring(self, num_tokens: int, values: dict[str, Any]) -> Iterator[None]:
        """
        A context in which one prompt is read as a whole. On a GPU the estimates of the model are corrected by what it
        took, where that is known: where it is the most that torch has ever had allocated there.
        """
        device = execution_device(self._model)
        if device.type != "cuda" or not values:
            yield
            return
        _make_workspaces(device, self._model.dtype)
        before, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        yield
        now = torch.cuda.max_memory_allocated(device)
        if now > most:
            estimate = bytes_of_prompt(self._model, num_tokens, values, self._per_token)
            self.note((now - before) / estimate)

    def note(self, factor: float) -> None:
        """Takes note of the bytes that a prompt took for each byte of its estimate."""
        _measured[self._model] = max(factor, _measured.get(self._model, 0.0))


def _make_workspaces(device: torch.device, dtype: torch.dtype) -> None:
    """
    Lets the libraries for matrix products allocate what they keep for a stream, which is no prompt's: on Hopper cuBLAS
    takes 32 MiB at the first product, and cuBLASLt, for those with a bias, as much again.
    """
    known = dtype if dtype in (torch.float32, torch.float16) else torch.bfloat16
    rows = torch.zeros(16, 16, dtype=known, device=device)
    torch.addmm(rows[0], rows, rows)
    torch.mm(rows, rows)


REMEDY = (
    "Send smaller or fewer images, or leave more memory: lower `num_blocks` or `max_memory_percent` "
    "(of `hf-specdec serve`: `--max-image-pixels`, `--num-blocks`)."
)


def _name_of(values: dict[str, Any]) -> str:
    """The largest of a prompt's inputs."""
    sizes = {name: value.nbytes for name, value in values.items() if isinstance(value, torch.Tensor)}
    return max(sizes, key=lambda name: sizes[name], default="model_inputs")
