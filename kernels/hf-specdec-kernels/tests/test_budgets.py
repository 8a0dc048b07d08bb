"""Budgets in Triton against plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_specdec_kernels import BudgetedLevel, share_out
from hf_specdec_kernels.budgets.triton import launch_share_out


def arguments(batch: int, above: int, ranks: int, device: torch.device) -> dict[str, torch.Tensor]:
    found = {
        "numbers": torch.randint(0, 90, (batch, above)),
        "path_log_q": -3 * torch.rand(batch, above),
        "valid": torch.rand(batch, above) < 0.8,
        "best": -(4 * torch.rand(batch, above, ranks)).cumsum(dim=-1),
        "drawn": torch.randint(0, 30, (batch, above, ranks)),
        "drawn_log_q": -9 * torch.rand(batch, above, ranks),
    }
    found["drawn_log_q"][torch.rand(found["best"].shape) < 0.2] = -torch.inf
    return {name: tensor.to(device) for name, tensor in found.items()}


def compare(inputs: dict[str, Any], budget: int, num_chosen: int) -> BudgetedLevel:
    on_cpu = {name: tensor.cpu() for name, tensor in inputs.items()}
    expected = share_out(**on_cpu, budget=budget, num_chosen=num_chosen, first_node=5)
    found = BudgetedLevel(*(torch.full_like(tensor, 77) for tensor in expected))
    found = BudgetedLevel(*(tensor.to(inputs["best"].device) for tensor in found))
    launch_share_out(*inputs.values(), budget, num_chosen, 5, *found)
    for name, ours, theirs in zip(BudgetedLevel._fields, found, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs), name
    return found


@pytest.mark.parametrize(
    "sizes, budget, num_chosen", [((2, 1, 5), 3, 3), ((1, 4, 4), 16, 4), ((2, 2, 5), 7, 4), ((1, 1, 1), 1, 1)]
)
def test_against_naive(sizes: tuple[int, int, int], budget: int, num_chosen: int, device: torch.device) -> None:
    compare(arguments(*sizes, device), budget, num_chosen)


def test_equals_and_nothing_to_draw(device: torch.device) -> None:
    """Equal ones keep their order; a row without any token still has its nodes, none of which counts."""
    inputs = arguments(3, 3, 4, device)
    inputs["path_log_q"][:], inputs["best"][:], inputs["drawn_log_q"][0] = -1.0, -2.0, -2.0
    inputs["best"][1], inputs["drawn_log_q"][1] = -torch.inf, -torch.inf
    inputs["numbers"][:] = torch.arange(3)
    found = compare(inputs, 6, 4)
    assert found.parents[0].tolist() == [0, 0, 0, 0, 1, 1]
    assert not found.valid[1].any()


def test_the_children_that_a_node_counts_are_its_first_draws(device: torch.device) -> None:
    inputs = arguments(1, 2, 3, device)
    inputs["path_log_q"][0], inputs["numbers"][0] = torch.tensor([-0.5, -0.1]), torch.tensor([50, 60])
    inputs["best"][0] = torch.tensor([[-0.2, -3.0, -4.0], [-1.0, -1.1, -9.0]])
    inputs["drawn"][0], inputs["valid"][:] = torch.tensor([[8, 7, 6], [5, 4, 3]]), True
    inputs["drawn_log_q"][0] = torch.tensor([[-4.0, -3.0, -0.2], [-9.0, -1.0, -1.1]])
    found = compare(inputs, 3, 1)
    assert found.tokens.tolist() == [[8, 5, 4]] and found.parents.tolist() == [[50, 60, 60]]
    assert found.chosen.tolist() == [[7]] and found.chosen_above.tolist() == [[1]]
    assert found.chosen_tokens.tolist() == [[4]]
    torch.testing.assert_close(found.path_log_q.cpu(), torch.tensor([[-1.1]]))
