"""Layers that see the tokens of all rows as those of one row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_specdec.compiling.one_row import OneRow


def noted(seen: list[Any]) -> Any:
    """A layer that notes the shapes of its inputs and returns its first one, in a tuple with something else."""

    def layer(states: torch.Tensor, positions: tuple[torch.Tensor, ...] = (), **options: Any) -> Any:
        tensors = [one for one in options.values() if isinstance(one, torch.Tensor)]
        seen.append([tuple(one.shape) for one in (states, *positions, *tensors)])
        return states, None

    return layer


def test_rows_are_joined_and_parted() -> None:
    seen: list[Any] = []
    states, one_row = torch.arange(24.0).view(3, 4, 2), OneRow(joins=True, has_mask=False)
    cosines = torch.arange(8.0).view(1, 4, 2)  # the same for all rows
    mask = torch.zeros(3, 1, 4, 64)
    with torch.no_grad():
        found, other = one_row.call(noted(seen), (states,), {"positions": (cosines, cosines), "attention_mask": mask})
        attended = one_row.joined(torch.zeros(3, 4, 5, 7))
    assert torch.equal(found, states) and other is None
    assert seen == [[(1, 12, 2), (1, 12, 2), (1, 12, 2), (1, 1, 1, 1)]] and attended.shape == (1, 12, 5, 7)


def test_heads_are_parted_without_a_copy() -> None:
    one_row = OneRow(joins=True, has_mask=False)
    one_row.call(lambda states: states, (torch.zeros(3, 4, 2),), {})
    of_tokens = torch.arange(3 * 4 * 5 * 2.0).view(1, 12, 5, 2)
    heads = one_row.by_rows(of_tokens.transpose(1, 2))
    assert torch.equal(heads, of_tokens.view(3, 4, 5, 2).transpose(1, 2))
    assert heads.data_ptr() == of_tokens.data_ptr()


@pytest.mark.parametrize("joins", [False, True])
def test_rows_that_stay_apart(joins: bool) -> None:
    """Those of layers with other inputs than one for each token, and where it is not allowed."""
    seen: list[Any] = []
    states, context = torch.zeros(3, 4, 2), torch.zeros(3, 9 if joins else 4, 2)
    one_row = OneRow(joins, has_mask=True)
    mask = torch.zeros(3, 1, 4, 64)
    found, _ = one_row.call(noted(seen), (states,), {"context": context, "attention_mask": mask})
    assert seen == [[(3, 4, 2), tuple(context.shape), (3, 1, 4, 64)]] and found is states
    heads = torch.zeros(3, 5, 4, 2)
    assert one_row.by_rows(heads) is heads
