"""Keys and values of a block's context, which all layers compute from the same states."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from support.heads import BLOCK_KINDS, tiny_block_head
from support.models import tiny_model

from hf_specdec import kernels
from hf_specdec.cache import TreeCache
from hf_specdec.fusing import fused_layers
from hf_specdec.head_layers import keys_and_values, rotations_of


def a_head(dtype: torch.dtype) -> Any:
    return tiny_block_head(tiny_model("llama", dtype=torch.float32), **BLOCK_KINDS["dflash"]).to(dtype)


def found_by(head: Any, states: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    positions = torch.arange(states.shape[1])[None] + 30
    rotations = rotations_of(head.rotary_emb, head.config.text_config, states, positions)
    return keys_and_values([layer.self_attn for layer in head.layers], states, rotations)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_layers_turn_keys_by_the_kernel(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same numbers, bit for bit."""
    pytest.importorskip("triton", reason="the kernels need triton")
    rotary = import_module("hf_specdec_kernels.rotary")
    head, calls, unchecked = a_head(dtype), [], rotary.unchecked
    states = torch.randn(2, 5, head.config.hidden_size, dtype=dtype)
    plain = found_by(head, states)
    monkeypatch.setitem(kernels.DEVICES, "cpu", (dtype,))
    monkeypatch.setattr(rotary, "unchecked", lambda *given: calls.append(1) or unchecked(*given))
    found_by(head, states)
    assert not calls  # whose layers are not fused
    with fused_layers(head):
        fused = found_by(head, states)
    assert len(calls) == len(head.layers) == 2
    for own, expected in zip(fused, plain, strict=True):
        assert all(one.equal(other) for one, other in zip(own, expected, strict=True))


@torch.no_grad()
def test_projections_of_all_layers_come_before_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may then multiply the states with several weights at once."""
    head, order = a_head(torch.float32), list[str]()
    for layer in head.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.register_forward_hook(lambda *_: order.append("product"))
    cache = TreeCache(2, 1, torch.device("cpu"), 64)
    cache.write_nodes(0, 3)
    monkeypatch.setattr(cache, "update", lambda *_: order.append("write"))
    head(features=torch.randn(1, 3, head.config.feature_size), past_key_values=cache)
    assert order == ["product"] * 4 + ["write"] * 2
