"""The target's distribution after temperature, top-k and top-p, in plain PyTorch."""

from __future__ import annotations

import torch


def target_probabilities(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
) -> torch.Tensor:
    """
    p for logits `[batch, vocab]`: `[batch, vocab]` float64.

    The same tokens as transformers' `TemperatureLogitsWarper`, `TopKLogitsWarper` and `TopPLogitsWarper` leave, in
    this order: top-k keeps all tokens as good as the k-th, top-p the fewest best ones whose probability reaches
    `top_p`, and of equally good ones those of a higher number. (Which of them transformers keeps depends on the sort.)

    Args:
        temperature, top_k, top_p (`torch.Tensor` of shape `[batch]`, *optional*): as in `target_walk`.
    """
    scores = logits.float()
    if temperature is not None:
        scores = scores / temperature[:, None].float()
    scores = scores.double()
    if top_k is not None:
        scores = _top_k(scores, top_k.long())
    if top_p is not None:
        scores = _top_p(scores, top_p.double())
    return scores.softmax(dim=-1)


def _top_k(scores: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    vocab = scores.shape[1]
    count = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    worst = scores.sort(dim=-1, descending=True).values.gather(1, count[:, None] - 1)
    return scores.masked_fill(scores < worst, -torch.inf)


def _top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    ascending = scores.sort(dim=-1, stable=True)
    probabilities = ascending.values.softmax(dim=-1)
    better = probabilities.sum(dim=-1, keepdim=True) - probabilities.cumsum(dim=-1)
    removed = (better >= top_p[:, None]) & (top_p < 1)[:, None]
    removed[:, -1] = False
    return scores.masked_fill(removed.scatter(1, ascending.indices, removed), -torch.inf)
