"""Texts that are read at once: all blocks together, and block by block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_specdec.states import Recurrence, texts
from hf_specdec.states.delta_rule import DeltaRule, KimiDeltaAttention
from hf_specdec.states.mamba2 import Mamba2


def text_of(kind: str, length: int, rows: int = 3) -> tuple[Recurrence, torch.Tensor, dict[str, Any]]:
    """A kind of recurrence, a state, and what the tokens of rows have, with two heads for each key head."""
    torch.manual_seed(length)
    query, key = torch.randn(2, rows, length, 2, 8)
    value, beta = torch.randn(rows, length, 4, 6), torch.rand(rows, length, 4)
    decay, state = -torch.rand(rows, length, 4), torch.randn(rows, 4, 8, 6)
    if kind == "mamba2":
        skip, limits = torch.randn(4), (0.2, 0.8)
        inputs = Mamba2().inputs(value, -decay, -torch.rand(4), key, query, D=skip, dt_limit=limits)
        return Mamba2(), state.transpose(2, 3).contiguous(), inputs
    if kind == "delta rule":
        inputs = DeltaRule().inputs(query, key, value, decay, beta, use_qk_l2norm_in_kernel=True)
        return DeltaRule(), state, inputs
    query, key = (one.repeat_interleave(2, dim=2) for one in (query, key))
    decay = -6 * torch.rand(rows, length, 4, 8) ** 3  # some channels forget within a few tokens
    inputs = KimiDeltaAttention().inputs(query, key, value, decay, beta, use_qk_l2norm_in_kernel=True)
    return KimiDeltaAttention(), state, inputs


@pytest.mark.parametrize("length", [1, 5, 64, 130])
@pytest.mark.parametrize("kind", ["delta rule", "KDA", "mamba2"])
def test_a_text_at_once(kind: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other lengths may have NaN behind their ends, and one has no token."""
    rule, state, inputs = text_of(kind, length)
    counts = [length, max(length - 3, 1), 0]
    expected, last = texts.read_text(rule, state, inputs, counts)  # block by block on a CPU
    is_on = torch.arange(length) < torch.tensor(counts)[:, None]
    inputs = rule.of_prompt(inputs, is_on)
    for name, values in inputs.items():
        for row, count in enumerate(counts if name not in rule.constants else []):
            values[row, count:] = torch.nan
    monkeypatch.setattr(texts, "MOST_BYTES", 1)  # a block at a time
    found, moved = texts.read_at_once(rule, state, inputs, is_on)
    at_once = rule.read(state, inputs, is_on)
    torch.testing.assert_close(moved, at_once[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(moved, last, atol=1e-5, rtol=1e-5)
    assert torch.equal(moved[2], state[2]) and found.dtype == expected.dtype
    for row, count in enumerate(counts):
        torch.testing.assert_close(found[row, :count], expected[row, :count], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[row, :count], at_once[0][row, :count], atol=1e-5, rtol=1e-5)
