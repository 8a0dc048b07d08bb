"""Overlaps of p and q in plain PyTorch."""

from __future__ import annotations

import torch


def draft_overlaps_naive(
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    grid: torch.Tensor,
    temperature: torch.Tensor | None = None,
    draft_temperature: torch.Tensor | None = None,
    vocabulary: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `hf_specdec_kernels.draft_overlaps`."""
    p = _tempered(logits, temperature).softmax(dim=-1)
    if vocabulary is not None:
        p = p[:, vocabulary.long()]
    scores = _tempered(draft_logits, draft_temperature)
    return torch.minimum(p[:, None], (scores[:, None] / grid[:, None]).softmax(dim=-1)).sum(dim=-1)


def _tempered(logits: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    # Relative to the best: the rounding of scores near 1e5 would show.
    scores = logits.float() - logits.float().amax(dim=-1, keepdim=True)
    return scores if temperature is None else scores / temperature[:, None]
