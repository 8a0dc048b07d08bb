"""Which models have states that the kernels of `hf_specdec_kernels` compute, and what these leave pending."""

from __future__ import annotations

from collections import Counter
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from ..kernels import DEVICES, DTYPES, kernels_are_installed
from ..models.probe import layers_of
from ..models.probed_layers import CachedStates
from .hook import mixers_of_their_own, recurrences_of
from .kernel import MOST_NODES, MOST_TAPS
from .recurrence import Recurrence


_found: WeakKeyDictionary[PreTrainedModel, dict[torch.dtype, str | None]] = WeakKeyDictionary()


def obstacle_to_kernels(model: PreTrainedModel, dtype: torch.dtype | None = None) -> str | None:
    """
    The reason why the kernels do not compute the states of a model; None if they do. Found once per model and dtype.

    Args:
        model (`PreTrainedModel`): a model with states.
        dtype (`torch.dtype`, *optional*): the dtype that it is to have, if it is not its own.
    """
    model = getattr(model, "_orig_mod", model)
    if model.device.type not in DEVICES or not kernels_are_installed():
        return f"has states, for which there are no kernels on {model.device.type}"
    found, key = _found.setdefault(model, {}), dtype or model.dtype
    if key not in found:
        found[key] = _obstacle(model, key)
    return found[key]


def _obstacle(model: PreTrainedModel, dtype: torch.dtype) -> str | None:
    if dtype not in DTYPES:
        return f"has states, whose kernels do not take {dtype}"
    layers, recurrences = layers_of(model, dtype), recurrences_of(model)
    if layers is None or not layers.states or len({type(one) for one in recurrences.values()}) > 1:
        return "has states of an unknown kind"
    if own := mixers_of_their_own(model):
        names = sorted({type(module).__name__ for module in own})
        return f"has states that {', '.join(names)} changes by code of its own, level by level"
    for index, states in layers.states.items():
        if not _serves(states, dtype, recurrences.get(index)):
            return f"has states at layer {index} that the kernels do not compute: {list(states.tensors)}"
    return None


def _serves(states: CachedStates, dtype: torch.dtype, recurrence: Recurrence | None) -> bool:
    """Whether the kernels compute a layer's states: the window of a convolution, and what its recurrence keeps."""
    (window, window_dtype), *others = states.tensors
    if len(window) != 2 or window[1] > MOST_TAPS or window_dtype != dtype or len(others) > 1:
        return False
    if not others:
        return True
    (state, state_dtype), kernel = others[0], recurrence.kernel if recurrence is not None else None
    return kernel is not None and state_dtype == torch.float32 and kernel.serves(state)


def bytes_of_pending(model: PreTrainedModel, dtype: torch.dtype | None = None) -> Counter[torch.device]:
    """Bytes that the pending nodes of one text take, on each device where layers with states run."""
    total: Counter[torch.device] = Counter()
    layers, recurrences = layers_of(model, dtype), recurrences_of(model)
    for index, states in () if layers is None else layers.states.items():
        (window, window_dtype), *others = states.tensors
        per_node = window[0] * window_dtype.itemsize
        for state, _ in others:
            kernel = recurrences[index].kernel
            assert kernel is not None
            per_node += kernel.pending_bytes(window[0], state, window_dtype.itemsize)
        total[states.device] += MOST_NODES * per_node
    return total
