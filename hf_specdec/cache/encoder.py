"""The cache of a target that attends to `encoder_hidden_states`, too."""

from __future__ import annotations

from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache


def beside_encoder(cache: Cache, encoder_cache: DynamicCache | None) -> Cache:
    """
    The cache that a model is handed: the one of the text, beside that of `encoder_hidden_states`, where there are any.
    The latter is filled by the first forward, and only read by later ones.
    """
    return cache if encoder_cache is None else EncoderDecoderCache(cache, encoder_cache)
