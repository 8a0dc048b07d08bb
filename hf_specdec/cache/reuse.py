"""Which caches of a user can be continued."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..compat import CACHE, INDEXED, holds_index_keys, is_reusable


def check_reusable(cache: Cache, model: PreTrainedModel) -> None:
    """
    Checks that a user's cache can be continued by a `TreeCache`.

    Args:
        cache (`Cache`): the cache.
        model (`PreTrainedModel`): the target.

    Raises:
        ValueError: if it has layers that cannot be continued, or offloads them, or is no `Cache` of layers, or has no
            place for the keys of the target's indexers.
    """
    for index, layer in enumerate(getattr(cache, "layers", ())):
        if not is_reusable(layer):
            raise ValueError(
                f"`{CACHE}` of type {type(cache).__name__} has a {type(layer).__name__} at layer {index}, "
                "which cannot be used for speculation. Pass a `DynamicCache`, or none."
            )
    if not isinstance(cache, Cache) or not hasattr(cache, "layers") or getattr(cache, "offloading", False):
        raise ValueError(
            f"`{CACHE}` of type {type(cache).__name__} cannot be used for speculation. Pass a `DynamicCache` "
            "without offloading, or none."
        )
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    if not INDEXED.isdisjoint(kinds) and not any(map(holds_index_keys, cache.layers)):
        raise ValueError(
            f"`{CACHE}` of type {type(cache).__name__} has no place for the keys of the indexers of "
            f"{type(model).__name__}. Pass `DynamicCache(config=model.config)`, or none."
        )
