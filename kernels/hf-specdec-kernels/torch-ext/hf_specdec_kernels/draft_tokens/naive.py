"""Draft tokens in plain PyTorch."""

from __future__ import annotations

import torch


def draft_tokens_naive(
    logits: torch.Tensor,
    count: int,
    temperature: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_specdec_kernels.draft_tokens`."""
    scores = logits.float()
    if temperature is not None:
        scores = scores / temperature[:, None, None]
    keys = scores if noise is None else scores - noise.log()
    order = keys.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    possible = keys.gather(-1, order) > -torch.inf
    log_probabilities = scores.log_softmax(dim=-1).gather(-1, order)
    return order.where(possible, -1), log_probabilities.where(possible, -torch.inf)
