"""Forwards of a head that are there for nothing but what they leave in its cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.heads import tiny_head
from support.models import tiny_model
from transformers import DynamicCache


CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"layers": {"model_type": "qwen2"}},
    "qwen3, which has a norm of k": {"layers": {"model_type": "qwen3"}},
    "EAGLE-1": {"eagle_version": 1},
    "two layers": {"layers": {"num_hidden_layers": 2}},
    "a qwen3's two layers": {"layers": {"model_type": "qwen3", "num_hidden_layers": 2}},
    "norms": {"norm_hidden_twice": True, "norm_before_fc": True, "norm_before_residual": True},
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_only_cache_leaves_the_keys_and_values_of_full_forwards(name: str) -> None:
    """In two forwards, the second behind the first."""
    target = tiny_model("llama")
    head = tiny_head(target, **CASES[name])
    for parameter in head.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))  # norms that do something
    size = head.config.feature_size
    features, embeddings = torch.randn(2, 7, size).double(), torch.randn(2, 7, 32).double()
    caches = {only_cache: DynamicCache() for only_cache in (False, True)}
    for rows in (slice(0, 4), slice(4, 7)):
        for only_cache, cache in caches.items():
            inputs = {"features": features[:, rows], "inputs_embeds": embeddings[:, rows]}
            out = head(**inputs, past_key_values=cache, only_cache=only_cache)
            assert not only_cache or (out.hidden_states is None and out.logits is None)
    expected, found = caches[False], caches[True]
    assert found.get_seq_length() == 7
    for layer, same in zip(expected.layers, found.layers, strict=True):
        torch.testing.assert_close(same.keys, layer.keys)
        torch.testing.assert_close(same.values, layer.values)


def test_without_a_cache_it_is_refused() -> None:
    head = tiny_head(tiny_model("llama"))
    with pytest.raises(ValueError, match="`only_cache=True` without `past_key_values`.*Give a cache"):
        head(features=torch.zeros(1, 2, 96), inputs_embeds=torch.zeros(1, 2, 32), only_cache=True)
