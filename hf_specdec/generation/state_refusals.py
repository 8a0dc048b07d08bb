"""Calls that states of layers cannot follow are refused by name: a state cannot be cropped, and skips no padding."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..compat import cache_name_of
from ..models.probe import layers_of
from ..states import LayerKind, layer_kinds_of
from .arguments import CallArguments


def check_states(call: CallArguments) -> None:
    """
    Checks a call whose target has recurrent or convolutional layers.

    Raises:
        ValueError: for a cache of another kind of model, padding behind a cache, and for criteria that may end a row
            before its states, of which the caller gets the cache.
    """
    if layer_kinds_of(call.model) is None:
        return
    if getattr(call.cache, "_is_user_defined", False):
        _check_cache(call.model, call.cache)
        _check_padding(call)
    others = [one for one in call.stopping_criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)]
    if others and call.returns_cache and len(call.input_ids) > 1:
        raise ValueError(
            f"`stopping_criteria`: {type(others[0]).__name__} may end a row after another has gone further, and the "
            f"states of {type(call.model).__name__} in the cache that is returned cannot be taken back. Generate for "
            f"one row at a time, or leave out `return_dict_in_generate` and `{cache_name_of(call.model)}`."
        )


def _check_cache(model: PreTrainedModel, cache: Any) -> None:
    """The layers must have what the target's layers keep, in the dtypes in which it keeps it."""
    kinds, probed = layer_kinds_of(model), layers_of(model)
    assert kinds is not None
    name = cache_name_of(model)
    for index, layer in enumerate(cache.layers):
        kind = kinds[index][0] if index < len(kinds) else LayerKind.NOTHING
        has_states = isinstance(layer, LinearAttentionCacheLayerMixin)
        has_kv = isinstance(layer, CacheLayerMixin)
        if (has_states, has_kv) != (
            kind in (LayerKind.STATES, LayerKind.BOTH),
            kind in (LayerKind.ATTENTION, LayerKind.BOTH),
        ):
            raise ValueError(
                f"`{name}` has a {type(layer).__name__} at layer {index}, where {type(model).__name__} keeps "
                f"{kind.value}. Pass `DynamicCache(config=model.config)`, or none."
            )
        if has_states and probed is not None and index in probed.states:
            held = [one for states in (layer.conv_states, layer.recurrent_states) for one in states.values()]
            found = [(tuple(one.shape[1:]), one.dtype) for one in held if one is not None]
            wanted = list(probed.states[index].tensors)
            if found and sorted(map(str, found)) != sorted(map(str, wanted)):
                raise ValueError(
                    f"`{name}` has states {found} at layer {index}, but {type(model).__name__} keeps {wanted}. Pass "
                    "a cache that this model has filled, or none."
                )
    if len(cache.layers) < len(kinds):
        raise ValueError(
            f"`{name}` has {len(cache.layers)} layers, and {type(model).__name__} has {len(kinds)}, some of which "
            "keep states. Pass `DynamicCache(config=model.config)`, or none."
        )


def _check_padding(call: CallArguments) -> None:
    """Padding between the cached and the new tokens would enter the states, as it does in plain `generate`."""
    cache: Any = call.cache
    mask = call.model_kwargs.get("attention_mask")
    if mask is None or not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        return
    past = cache.get_seq_length()
    if past and not bool(torch.all(mask[:, past:] == 1)):
        raise ValueError(
            f"`attention_mask` with a filled `{cache_name_of(call.model)}`: padding behind its {past} tokens enters "
            f"the states of {type(call.model).__name__}, in plain `generate`, too. Pass new tokens of equal length, "
            "or no cache."
        )
