"""Attention of heads that share keys, beside the same with a copy of the keys for every head."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hf_specdec.attention.functions import grouped_attention


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("rows_of_mask", [1, 2])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (4, 1), (3, 3)])
def test_is_that_of_repeated_keys(
    heads: int, kv_heads: int, queries: int, rows_of_mask: int, scale: float | None
) -> None:
    query = torch.randn(2, heads, queries, 8, dtype=torch.float64)
    # Keys are a view of more, and values are of another size.
    key, value = torch.randn(2, kv_heads, 12, 8).double()[:, :, :9], torch.randn(2, kv_heads, 9, 4).double()
    hidden = torch.rand(rows_of_mask, 1, queries, 9) < 0.4
    mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, torch.finfo(torch.float64).min)
    repeated = (states.repeat_interleave(heads // kv_heads, dim=1) for states in (key, value))
    expected = F.scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=scale).transpose(1, 2)
    output = grouped_attention(query, key, value, mask, scale)
    torch.testing.assert_close(output, expected)
    assert output.is_contiguous(), "models such as AFMoE take a view of it"
