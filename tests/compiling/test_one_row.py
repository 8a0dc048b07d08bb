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
    layer, attended = noted(seen), list[tuple[int, ...]]()

    def attends(*args: Any, **options: Any) -> Any:
        attended.append(tuple(one_row.joined(torch.zeros(3, 4, 5, 7)).shape))
        return layer(*args, **options)

    with torch.no_grad():
        found, other = one_row.call(attends, (states,), {"positions": (cosines, cosines), "attention_mask": mask})
    assert torch.equal(found, states) and other is None
    assert seen == [[(1, 12, 2), (1, 12, 2), (1, 12, 2), (1, 1, 1, 1)]] and attended == [(1, 12, 5, 7)]


def test_heads_are_parted_without_a_copy() -> None:
    one_row = OneRow(joins=True, has_mask=False)
    of_tokens = torch.arange(3 * 4 * 5 * 2.0).view(1, 12, 5, 2)
    heads = list[torch.Tensor]()

    def layer(states: torch.Tensor) -> torch.Tensor:
        heads.append(one_row.by_rows(of_tokens.transpose(1, 2)))
        return states

    one_row.call(layer, (torch.zeros(3, 4, 2),), {})
    assert torch.equal(heads[0], of_tokens.view(3, 4, 5, 2).transpose(1, 2))
    assert heads[0].data_ptr() == of_tokens.data_ptr()
    assert one_row.by_rows(of_tokens) is of_tokens  # attention elsewhere is left alone


def test_inputs_in_other_places() -> None:
    """Tensors in a list would stay as they are beside joined ones, and those of four dimensions may be by anything."""
    one_row, states = OneRow(joins=True, has_mask=False), torch.zeros(3, 4, 2)
    for other in ([torch.zeros(3, 4, 2)], torch.zeros(3, 4, 2, 2), torch.Size([3]), torch.zeros(2, 2).max(dim=0)):
        seen: list[Any] = []
        one_row.call(lambda states, other, seen=seen: seen.append(states.shape), (states, other), {})
        assert (seen[0] == states.shape) == (not isinstance(other, torch.Size))


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
