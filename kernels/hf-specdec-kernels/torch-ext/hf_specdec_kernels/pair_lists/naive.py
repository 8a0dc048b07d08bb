"""Lists of the best tokens after each candidate, in plain PyTorch."""

from __future__ import annotations

import torch


def pair_lists_naive(
    tokens: torch.Tensor,
    log_q: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    ranks: int,
    counts_others: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `hf_specdec_kernels.pair_lists`; returns the fields of `PairLists`."""
    gained = queries.float() @ keys[tokens].float().transpose(2, 3)
    scores = log_q[:, :, None] + gained
    total = scores.logsumexp(dim=3, keepdim=True)
    if counts_others:
        others = (1 - log_q.exp().sum(dim=2)).clamp(min=0).log()
        total = total.logaddexp(others[:, :, None, None])
    is_nan = scores.isnan()
    places = scores.masked_fill_(is_nan, -torch.inf).topk(ranks, dim=3).indices
    named = tokens[:, :, None].expand(-1, -1, places.shape[2], -1).gather(3, places)
    return named, scores.gather(3, places) - total, places
