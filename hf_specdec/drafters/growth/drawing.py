"""Draws from a draft's distribution."""

from __future__ import annotations

import torch

from ...random_generators import generator_held


def draw_without_replacement(
    scores: torch.Tensor, count: int, noise: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Draws `count` different tokens from softmax(scores), in descending order of scores + Gumbel noise (Gumbel-top-k,
    arXiv 1903.06059).

    Args:
        scores (`torch.Tensor` of shape `[…, vocab]`, float32): -inf outside the support.
        noise (`torch.Tensor`, *optional*): minus the Gumbel noise, which broadcasts to `scores`; drawn by default.

    Returns:
        `tuple`: tokens `[…, count]` int64, and whether each is in the support, `[…, count]` bool: all False where the
        scores have no softmax (NaN or +inf among them).
    """
    # Relative to the best: beside scores of 1e5, as at a temperature near zero, float32 would round the noise away.
    relative = scores - scores.amax(dim=-1, keepdim=True)  # all NaN where there is no softmax, or one of +inf
    if noise is None:
        with generator_held(scores.device):
            noise = torch.empty_like(scores).exponential_().log_()
    perturbed = (relative - noise).topk(count, dim=-1)
    drawable = (perturbed.values > -torch.inf) & perturbed.values[..., :1].isfinite()
    return perturbed.indices, drawable
