"""Which caches of a user can be continued."""

from __future__ import annotations

from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer


_REUSABLE = (DynamicLayer, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", DynamicLayer))
"""
Layers of a `DynamicCache` that can be continued. The `DummyLayer` of newer transformers stands for one without K/V.
"""


def check_reusable(cache: Cache) -> None:
    """
    Checks that a user's `past_key_values` can be continued by a `TreeCache`.

    Raises:
        ValueError: if it has layers that cannot be continued, or offloads them, or is no `Cache` of layers.
    """
    for index, layer in enumerate(getattr(cache, "layers", ())):
        if type(layer) not in _REUSABLE:
            raise ValueError(
                f"`past_key_values` of type {type(cache).__name__} has a {type(layer).__name__} at layer {index}, "
                "which cannot be used for speculation. Pass a `DynamicCache`, or none."
            )
    if not isinstance(cache, Cache) or not hasattr(cache, "layers") or getattr(cache, "offloading", False):
        raise ValueError(
            f"`past_key_values` of type {type(cache).__name__} cannot be used for speculation. Pass a `DynamicCache` "
            "without offloading, or none."
        )
