"""What a model's layers hand to a cache and to attention, found by one forward of its shadow."""

from __future__ import annotations

import math
import threading
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer
from transformers.integrations.moe import ExpertsInterface
from transformers.utils import logging

from ..compat import CACHE, cache_argument
from .layer_kinds import LayerKind, is_attention_free, layer_kinds_of
from .shadow import Shadow
from .structure import execution_device, forward_parameters, num_decoder_layers


logger = logging.get_logger(__name__)

_NAME = "hf_specdec_probe"


@dataclass(frozen=True)
class CachedLayer:
    """
    Keys and values that one layer writes to a cache.

    Args:
        key, value (`tuple[int, int]`): heads, and elements of a head, of one token.
        key_dtype, value_dtype (`torch.dtype`): their dtypes.
        device (`torch.device`): where they are computed.
        index (`tuple[int, int]`, *optional*): heads, and elements of a head, of the keys of the layer's indexer.
        index_dtype (`torch.dtype`, *optional*): their dtype.
    """

    key: tuple[int, int]
    value: tuple[int, int]
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    device: torch.device
    index: tuple[int, int] | None = None
    index_dtype: torch.dtype | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of one token."""
        key, value = (heads * size for heads, size in (self.key, self.value))
        num_bytes = key * self.key_dtype.itemsize + value * self.value_dtype.itemsize
        if self.index is not None and self.index_dtype is not None:
            num_bytes += self.index[0] * self.index[1] * self.index_dtype.itemsize
        return num_bytes


@dataclass(frozen=True)
class CachedStates:
    """
    The recurrent and convolutional states that one layer keeps of a text.

    Args:
        tensors (`tuple`): shape without the batch, and dtype, of each.
        device (`torch.device`): where they are computed.
    """

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes of one text, of any length."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """
    One layer's call of the attention function.

    Args:
        module (`nn.Module`): the shadow of the layer.
        query, key, value (`tuple[int, int]`): heads, and elements of a head.
        reads_cache (`bool`): whether keys and values are those that the cache gave, as they are.
        makes_mask (`bool`): whether the mask is not the one that the model was given.
        options (`dict`): the keyword arguments that are not None.
    """

    module: nn.Module
    query: tuple[int, int]
    key: tuple[int, int]
    value: tuple[int, int]
    reads_cache: bool
    makes_mask: bool
    options: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Layers:
    """
    What the layers of a model were seen to do.

    Args:
        cached (`dict[int, CachedLayer]`): what is cached, by index of the cache's layer.
        calls (`list[AttentionCall]`): the calls of the attention function, in order.
        states (`dict[int, CachedStates]`): the states that are kept, by index of the cache's layer.
        hands_on_context (`bool`): for a model with states: whether all attention layers got the `tree_context` that
            its forward was given.
    """

    cached: dict[int, CachedLayer]
    calls: list[AttentionCall]
    states: dict[int, CachedStates] = field(default_factory=dict)
    hands_on_context: bool = False


_found: weakref.WeakKeyDictionary[nn.Module, dict[Any, Layers | None]] = weakref.WeakKeyDictionary()
_read_alone: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
_running = threading.local()


def layers_of(model: PreTrainedModel, dtype: torch.dtype | None = None) -> Layers | None:
    """
    What the layers of a model do, found once per model and dtype by `probe`; None for a model that cannot be probed.

    Args:
        model (`PreTrainedModel`): the model.
        dtype (`torch.dtype`, *optional*): the dtype that it is to have, if it is not its own.
    """
    model = getattr(model, "_orig_mod", model)
    found, key = _found.setdefault(model, {}), dtype or model.dtype
    if key not in found:
        found[key] = probe(model, key)
    return found[key]


def reads_tokens_alone(model: PreTrainedModel) -> bool:
    """Whether a model's forward takes tokens without an image or the like; some refuse that with a ValueError."""
    if model not in _read_alone:
        try:
            _probe(model, Shadow(model, model.dtype), model.dtype, is_whole=True, with_context=False)
        except ValueError:
            _read_alone[model] = False
        except Exception:  # noqa: BLE001  (what depends on data fails in any way)
            _read_alone[model] = True
        else:
            _read_alone[model] = True
    return _read_alone[model]


def probe(model: PreTrainedModel, dtype: torch.dtype) -> Layers | None:
    """
    Runs a model's shadow over one token: without data, or with the model's weights if its shapes depend on data. Where
    the whole model wants more than tokens, its decoder runs.
    """
    has_states = isinstance(model, PreTrainedModel) and layer_kinds_of(model) is not None
    for has_data in (False, True):
        for is_whole, with_context in dict.fromkeys(
            (is_whole, with_context) for with_context in (has_states, False) for is_whole in (True, False)
        ):
            try:
                found = _probe(model, Shadow(model, dtype, has_data), dtype, is_whole, with_context)
            except Exception as error:  # noqa: BLE001  (the forwards of others fail in any way)
                logger.debug(f"{type(model).__name__} was not probed: {error}")
                continue
            if found.cached or found.states:
                return found
    return None


def _probe(model: PreTrainedModel, shadow: Shadow, dtype: torch.dtype, is_whole: bool, with_context: bool) -> Layers:
    for config in shadow.configs:
        config._attn_implementation_internal = config._experts_implementation_internal = _NAME
    cache = _ProbedCache(model, shadow)
    before, _running.cache = getattr(_running, "cache", None), cache
    forwarded = shadow.model if is_whole else shadow.model.get_decoder()
    device = execution_device(model) if shadow.has_data else torch.device("meta")
    try:
        with torch.no_grad():
            context = {"tree_context": cache} if with_context else {}
            inputs = _inputs_of(forwarded, cache, dtype, device)
            cache.mask = inputs.get("attention_mask")
            forwarded(**inputs, **context)
    finally:
        _running.cache = before
    return Layers(cache.cached, cache.calls, cache.states, with_context and not cache.lacks_context)


def _inputs_of(forwarded: Any, cache: Cache, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a forward over one token."""
    if hasattr(forwarded, "inputs_of_one_row"):  # a head
        return forwarded.inputs_of_one_row(dtype, device) | {"past_key_values": cache}
    parameters = forward_parameters(forwarded)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    mask = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
    inputs = {"position_ids": token, "attention_mask": mask, "use_cache": True, "output_router_logits": False}
    if isinstance(forwarded, PreTrainedModel) and is_attention_free(forwarded):
        del inputs["attention_mask"]
    inputs = {name: value for name, value in inputs.items() if name in parameters}
    return {"input_ids": token, cache_argument(parameters) or CACHE: cache, "return_dict": True} | inputs


class _ProbedCache(Cache):
    def __init__(self, model: PreTrainedModel, shadow: Shadow):
        kinds = layer_kinds_of(model) if isinstance(model, PreTrainedModel) else None
        if kinds is None:
            number = num_decoder_layers(model)
            super().__init__(layers=[_ProbedLayer(self, index) for index in range(number)])
        else:
            of_states = {LayerKind.STATES: _ProbedStates, LayerKind.BOTH: _ProbedBoth}
            super().__init__(
                layers=[
                    of_states[kind](self, index, number) if kind in of_states else _ProbedLayer(self, index)
                    for index, (kind, number) in enumerate(kinds)
                ]
            )
        self._model, self._shadow = model, shadow
        self.states: dict[int, CachedStates] = {}
        self.cached: dict[int, CachedLayer] = {}
        self.calls: list[AttentionCall] = []
        self._given: list[torch.Tensor] = []
        self._indexed: dict[int, tuple[tuple[int, int], torch.dtype]] = {}
        self.mask: torch.Tensor | None = None
        """The mask that the model is given."""
        self.lacks_context = False
        """Whether an attention layer got no `tree_context`."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index, index_dtype = self._indexed.get(layer_idx, (None, None))
        dtypes = key_states.dtype, value_states.dtype
        self.cached[layer_idx] = CachedLayer(
            _heads_of(key_states), _heads_of(value_states), *dtypes, self._device(), index, index_dtype
        )
        self._given += [key_states, value_states]
        self.layers[layer_idx].keys = key_states  # GLM-5-Next's indexer counts them
        return key_states, value_states

    def keeps(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Takes note of a state of a layer, of this shape without the batch."""
        before = self.states[index].tensors if index in self.states else ()
        self.states[index] = CachedStates((*before, (shape, dtype)), self._device())

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        self.indexed(indexer_key_states[:, None], layer_idx)
        return indexer_key_states

    def indexed(self, index_keys: torch.Tensor, layer_idx: int) -> None:
        """Takes note of the keys of an indexer, `[batch, heads, tokens, elements]`."""
        self._indexed[layer_idx] = index, dtype = _heads_of(index_keys), index_keys.dtype
        if layer_idx in self.cached:
            self.cached[layer_idx] = replace(self.cached[layer_idx], index=index, index_dtype=dtype)

    def _device(self) -> torch.device:
        """Where the layer that is running has its weights, or where accelerate lets it run."""
        for shadow in reversed(self._shadow.running):
            module = self._shadow.original_of(shadow)
            device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
            if device is None:
                device = next((parameter.device for parameter in module.parameters()), None)
            if device is not None and torch.device(device).type != "meta":
                return torch.device(device)
        return execution_device(self._model)

    def attended(self, module: nn.Module, states: list[torch.Tensor], mask: Any, options: dict[str, Any]) -> None:
        """Takes note of a call of the attention function."""
        query, key, value = map(_heads_of, states)
        reads_cache = all(any(one is given for given in self._given) for one in states[1:])
        self.lacks_context |= options.get("tree_context") is not self
        options = {name: value for name, value in options.items() if not (value is None or value is self)}
        if self._shadow.has_data:  # what was found must not keep weights
            module = Shadow(module).model
            options = {
                name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in options.items()
            }
        makes_mask = mask is not None and mask is not self.mask
        self.calls.append(AttentionCall(module, query, key, value, reads_cache, makes_mask, options))


def _heads_of(states: torch.Tensor) -> tuple[int, int]:
    """Heads, and elements of a head, of `[batch, heads, tokens, elements]`."""
    return states.shape[1], states.shape[3]


class _ProbedLayer(CacheLayerMixin):
    is_compileable = is_croppable = is_sliding = False
    indexer_position_ids: torch.Tensor | None = None

    def __init__(self, cache: _ProbedCache, index: int):
        super().__init__()
        self._cache, self._index = weakref.ref(cache), index

    def update_index(self, index_keys: torch.Tensor) -> torch.Tensor:
        cache = self._cache()
        assert cache is not None
        cache.indexed(index_keys, self._index)
        return index_keys

    def lazy_initialization(self, *args: Any) -> None: ...

    def update(self, *args: Any, **kwargs: Any) -> Any: ...

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return 1, 0


class _ProbedStates(LinearAttentionLayer):
    def __init__(self, cache: _ProbedCache, index: int, number_of_states: int):
        super().__init__(number_of_states=number_of_states)
        self._cache, self._index = weakref.ref(cache), index

    def _keep(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        cache = self._cache()
        assert cache is not None
        cache.keeps(self._index, shape, dtype)

    def update_conv_state(self, conv_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        taps = kwargs.get("conv_kernel_size") or conv_states.shape[-1]
        self._keep((*conv_states.shape[1:-1], taps), conv_states.dtype)
        return super().update_conv_state(conv_states, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._keep(tuple(recurrent_states.shape[1:]), recurrent_states.dtype)
        return super().update_recurrent_state(recurrent_states, *args, **kwargs)

    get_seq_length, get_mask_sizes = _ProbedLayer.get_seq_length, _ProbedLayer.get_mask_sizes


class _ProbedBoth(_ProbedStates, _ProbedLayer):
    def __init__(self, cache: _ProbedCache, index: int, number_of_states: int):
        _ProbedLayer.__init__(self, cache, index)
        _ProbedStates.__init__(self, cache, index, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        _ProbedStates.lazy_initialization(self, **kwargs)


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, **options: Any
) -> tuple[torch.Tensor, None]:
    _running.cache.attended(module, [query, key, value], mask, options)
    batch, heads, queries, _ = query.shape
    return query.new_zeros(batch, queries, heads, value.shape[3]), None


def _experts(module: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Which experts a token goes to is a matter of data, which a shadow has not."""
    return torch.zeros_like(hidden_states)


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
ExpertsInterface.register(_NAME, _experts)
