"""Draft tokens in plain PyTorch."""

from __future__ import annotations

import torch

from .noise import exponential_noise_naive, noise_of_tokens


def draft_tokens_naive(
    logits: torch.Tensor, count: int, temperature: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_specdec_kernels.draft_tokens`."""
    log_q = _log_q(logits, temperature)
    return _first(log_q, log_q, count)


def draw_children_naive(
    logits: torch.Tensor,
    count: int,
    seeds: torch.Tensor,
    first_query: int = 0,
    temperature: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `hf_specdec_kernels.draw_children`: tokens, their log-probabilities, and those of the best tokens."""
    log_q = _log_q(logits, temperature)
    numbers = first_query + torch.arange(logits.shape[1], device=logits.device)[None]
    if positions is not None:
        numbers = positions.expand(len(logits), logits.shape[1])
    if token_ids is None:
        noise = exponential_noise_naive(seeds, numbers, logits.shape[2])
    else:
        noise = noise_of_tokens(seeds, numbers, token_ids)
    tokens, log_probabilities = _first(log_q - noise.log(), log_q, count)
    return tokens.clamp(min=0), log_probabilities, _first(log_q, log_q, count)[1]


def _log_q(logits: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """log q, float32; -inf for all tokens where there is no softmax."""
    highest = logits.float().amax(dim=-1, keepdim=True)
    # Relative to the best: beside scores of 1e5, as at a temperature near zero, float32 would round noise away.
    scores = logits.float() - highest
    if temperature is not None:
        scores = scores / temperature[:, None, None]
    return scores.log_softmax(dim=-1).where(highest.isfinite(), -torch.inf)


def _first(keys: torch.Tensor, log_q: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens with the largest keys and their log q, `[batch, queries, count]`; -1 and -inf beyond the support."""
    order = keys.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    possible = keys.gather(-1, order) > -torch.inf
    return order.where(possible, -1), log_q.gather(-1, order).where(possible, -torch.inf)
