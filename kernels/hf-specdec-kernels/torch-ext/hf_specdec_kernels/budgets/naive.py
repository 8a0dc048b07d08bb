"""Budgets in plain PyTorch."""

from __future__ import annotations

import torch


def share_out_naive(
    numbers: torch.Tensor,
    path_log_q: torch.Tensor,
    valid: torch.Tensor,
    best: torch.Tensor,
    drawn: torch.Tensor,
    drawn_log_q: torch.Tensor,
    budget: int,
    num_chosen: int,
    first_node: int,
) -> tuple[torch.Tensor, ...]:
    """See `hf_specdec_kernels.share_out`; returns the fields of `BudgetedLevel`."""
    ranks = best.shape[2]
    gains = (path_log_q[:, :, None] + best).flatten(1)
    pairs = gains.sort(dim=1, descending=True, stable=True).indices[:, :budget]
    counts = (pairs[:, None] // ranks == torch.arange(best.shape[1], device=best.device)[:, None]).sum(dim=2)
    wanted = torch.arange(ranks, device=best.device) < counts[:, :, None]
    places = (~wanted).flatten(1).sort(dim=1, stable=True).indices[:, :budget]
    above, tokens = places // ranks, drawn.flatten(1).gather(1, places)
    log_q = drawn_log_q.flatten(1).gather(1, places)
    counts_too = (log_q > -torch.inf) & valid.gather(1, above)
    paths = path_log_q.gather(1, above) + log_q
    order = paths.masked_fill(~counts_too, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    chosen = order[:, :num_chosen].sort(dim=1).values
    of_chosen = (values.gather(1, chosen) for values in (paths, tokens, counts_too, above))
    return tokens, counts_too, numbers.gather(1, above), first_node + chosen, *of_chosen
