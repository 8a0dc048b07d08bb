"""Which layers of a model have states, as transformers' own cache for it says."""

from __future__ import annotations

from enum import Enum
from weakref import WeakKeyDictionary

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from ..compat import NoCacheLayer


class LayerKind(Enum):
    """What a layer caches."""

    ATTENTION = "attention"
    STATES = "states"
    BOTH = "both"
    NOTHING = "nothing"


LayerKinds = list[tuple[LayerKind, int]]
"""What every layer caches, and its number of states."""

_found: WeakKeyDictionary[PreTrainedModel, LayerKinds | None] = WeakKeyDictionary()


def layer_kinds_of(model: PreTrainedModel) -> LayerKinds | None:
    """
    What each layer of a model caches, and how many states it has; None for a model without states. Found once per
    model.
    """
    model = getattr(model, "_orig_mod", model)
    if model not in _found:
        _found[model] = _find(model)
    return _found[model]


def is_attention_free(model: PreTrainedModel) -> bool:
    """Whether a model has states alone: no attention layer, for which positions and a mask would count."""
    kinds = layer_kinds_of(model)
    return kinds is not None and all(kind in (LayerKind.STATES, LayerKind.NOTHING) for kind, _ in kinds)


def _find(model: PreTrainedModel) -> LayerKinds | None:
    try:
        layers = DynamicCache(config=model.config).layers
    except Exception:  # noqa: BLE001  (code of others has layers that transformers does not know)
        return None
    kinds = [_kind_of(layer) for layer in layers]
    if not any(kind in (LayerKind.STATES, LayerKind.BOTH) for kind, _ in kinds):
        return None
    return kinds


def _kind_of(layer: object) -> tuple[LayerKind, int]:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        kind = LayerKind.BOTH if isinstance(layer, CacheLayerMixin) else LayerKind.STATES
        return kind, layer.number_of_states
    return LayerKind.NOTHING if isinstance(layer, NoCacheLayer) else LayerKind.ATTENTION, 0
