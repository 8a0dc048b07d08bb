"""Temperature, top-k and top-p in plain PyTorch."""

from __future__ import annotations

import torch


def target_probabilities(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
) -> torch.Tensor:
    """
    The probabilities p of the target after temperature, top-k and top-p, `[batch, vocab]` float64.

    The kept tokens are those of transformers' `TemperatureLogitsWarper`, `TopKLogitsWarper` and `TopPLogitsWarper`, in
    this order: top-k keeps all tokens at least as likely as the k-th, top-p the fewest best tokens whose probability
    reaches `top_p`, with higher ids preferred among equally likely tokens. (Which of equally likely tokens
    transformers keeps depends on its sort.)

    Args:
        logits (`torch.Tensor` of shape `[batch, vocab]`): the target's logits at one node per row.
        temperature, top_k, top_p (`torch.Tensor` of shape `[batch]`, *optional*): see `target_walk`.
    """
    return _warped(logits, temperature, top_k, top_p).softmax(dim=-1)


def filter_logits_naive(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `hf_specdec_kernels.filter_logits`."""
    values = (None if of is None else of.repeat_interleave(logits.shape[1]) for of in (temperature, top_k, top_p))
    hidden = _warped(logits.flatten(0, 1), *values) == -torch.inf
    return logits.masked_fill(hidden.view_as(logits), -torch.inf)


def _warped(
    logits: torch.Tensor, temperature: torch.Tensor | None, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Scores `[rows, vocab]`, float64, -inf for tokens that the filters hide."""
    scores = logits.float()
    if temperature is not None:
        scores = scores / temperature[:, None].float()
    scores = scores.double()
    if top_k is not None:
        scores = _top_k(scores, top_k.long())
    return scores if top_p is None else _top_p(scores, top_p.double())


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
