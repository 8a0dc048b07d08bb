"""Which caches of a user can be continued."""

from __future__ import annotations

from transformers.cache_utils import Cache

from ..compat import CACHE, REUSABLE_LAYERS


def check_reusable(cache: Cache) -> None:
    """
    Checks that a user's cache can be continued by a `TreeCache`.

    Raises:
        ValueError: if it has layers that cannot be continued, or offloads them, or is no `Cache` of layers.
    """
    for index, layer in enumerate(getattr(cache, "layers", ())):
        if type(layer) not in REUSABLE_LAYERS:
            raise ValueError(
                f"`{CACHE}` of type {type(cache).__name__} has a {type(layer).__name__} at layer {index}, "
                "which cannot be used for speculation. Pass a `DynamicCache`, or none."
            )
    if not isinstance(cache, Cache) or not hasattr(cache, "layers") or getattr(cache, "offloading", False):
        raise ValueError(
            f"`{CACHE}` of type {type(cache).__name__} cannot be used for speculation. Pass a `DynamicCache` "
            "without offloading, or none."
        )
