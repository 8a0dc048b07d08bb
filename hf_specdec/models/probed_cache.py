"""`ProbedCache`: keeps nothing, and takes note of what a model's layers hand to it and to attention."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from .layer_kinds import LayerKind, layer_kinds_of
from .probed_layers import AttentionCall, CachedLayer, CachedStates
from .shadow import Shadow
from .structure import execution_device, num_decoder_layers


class ProbedCache(Cache):
    """
    The cache of a probe.

    Args:
        model (`PreTrainedModel`): the model.
        shadow (`Shadow`): its shadow, whose forward writes to the cache.
    """

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

    def __init__(self, cache: ProbedCache, index: int):
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
    def __init__(self, cache: ProbedCache, index: int, number_of_states: int):
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
    def __init__(self, cache: ProbedCache, index: int, number_of_states: int):
        _ProbedLayer.__init__(self, cache, index)
        _ProbedStates.__init__(self, cache, index, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        _ProbedStates.lazy_initialization(self, **kwargs)
