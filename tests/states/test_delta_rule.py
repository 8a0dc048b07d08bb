"""The delta rule over a text: all blocks together, and block by block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_specdec.states import texts
from hf_specdec.states.delta_rule import DeltaRule, KimiDeltaAttention


def text_of(length: int, rows: int = 3) -> tuple[torch.Tensor, dict[str, Any]]:
    """A state and what the tokens of rows have, with two value heads for each key head."""
    torch.manual_seed(length)
    query, key = torch.randn(2, rows, length, 2, 8)
    value, beta = torch.randn(rows, length, 4, 6), torch.rand(rows, length, 4)
    decay = -torch.rand(rows, length, 4)
    rule = DeltaRule()
    inputs = rule.inputs(query, key, value, decay, beta, use_qk_l2norm_in_kernel=True)
    return torch.randn(rows, 4, 8, 6), inputs


@pytest.mark.parametrize("length", [1, 5, 64, 130])
def test_a_text_at_once(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other lengths may have NaN behind their ends, and one has no token."""
    state, inputs = text_of(length)
    counts = [length, max(length - 3, 1), 0]
    expected, last = texts.read_text(DeltaRule(), state, inputs, counts)  # block by block on a CPU
    for values in inputs.values():
        for row, count in enumerate(counts):
            values[row, count:] = torch.nan
    is_on = torch.arange(length) < torch.tensor(counts)[:, None]
    monkeypatch.setattr(texts, "MOST_BYTES", 1)  # a block at a time
    found, moved = texts.read_at_once(DeltaRule(), state, inputs, is_on)
    at_once = DeltaRule().read(state, inputs, is_on)
    torch.testing.assert_close(moved, at_once[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(moved, last, atol=1e-5, rtol=1e-5)
    assert torch.equal(moved[2], state[2]) and found.dtype == expected.dtype
    for row, count in enumerate(counts):
        torch.testing.assert_close(found[row, :count], expected[row, :count], atol=1e-5, rtol=1e-5)


def test_decays_by_channel_go_block_by_block() -> None:
    _, inputs = text_of(5)
    assert DeltaRule().reads_at_once(inputs)
    inputs["g"] = inputs["g"].expand(-1, -1, -1, 8)
    assert not KimiDeltaAttention().reads_at_once(inputs)
