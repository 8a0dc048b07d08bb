"""Noticing that the weights of models have changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from ..graphs import fingerprint_of
from ..models.modules import modules_of, parameters_of


NUM_SAMPLES = 16
"""Values of each weight that are compared."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as a value."""


class WeightsVersion:
    """
    Notices that weights have changed since they were last looked at: moved, replaced, written to in place, or used
    with other adapters. torch counts writes to a tensor, but not those to its `.data` or in inference mode; of these
    a few values of each weight tell, unless a write changes none of them.
    """

    def __init__(self) -> None:
        self._last: Any = None

    def has_changed(self, models: Iterable[PreTrainedModel]) -> bool:
        """Looks at the weights. Returns whether they have changed; the first time they have not."""
        before, self._last = self._last, [_version_of(model) for model in models]
        return before is not None and before != self._last


def _version_of(model: PreTrainedModel) -> Any:
    weights = [weight for weight in _weights_of(model) if weight.device.type != "meta"]
    counts = [None if weight.is_inference() else weight._version for weight in weights]
    return fingerprint_of(model), counts, _samples_of(weights)


def _weights_of(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    modules = modules_of(model)
    yield from parameters_of(modules)
    for module in modules:  # as of quantised layers; buffers that no checkpoint has are computed
        temporary = module._non_persistent_buffers_set
        yield from (its for name, its in module._buffers.items() if its is not None and name not in temporary)


def _samples_of(weights: Iterable[torch.Tensor]) -> list[bytes]:
    """A few values of all weights, as bytes; all of a device come from it in one copy for each size of values."""
    parts: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for weight in weights:
        bits, is_plain = _BITS.get(weight.dtype.itemsize), type(weight) in (torch.Tensor, torch.nn.Parameter)
        if bits is not None and is_plain and weight.numel() and weight.is_contiguous():
            values = weight.detach().view(-1).view(bits)
            step = -(-len(values) // NUM_SAMPLES)
            parts.setdefault((weight.device, bits), []).append(values[::step])
    return [torch.cat(values).cpu().numpy().tobytes() for values in parts.values()]
