"""
Filters that are not in the walks' kernels, in plain PyTorch: the tokens that transformers' warpers of the same options
remove, with a value for every row. A value of `OFF` removes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


TOP_H_CANDIDATES = 100
"""Best tokens among which `top_h` chooses, as in `TopHLogitsWarper`."""


def top_h(scores: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """All but the best tokens whose entropies add up to this share of the whole, among the `TOP_H_CANDIDATES` best."""
    best = scores.topk(min(TOP_H_CANDIDATES, scores.shape[-1]), dim=-1)
    p = best.values.softmax(dim=-1)
    allowed = _entropy(best.values) * value[..., None]
    kept = -(p * p.log()).cumsum(dim=-1) <= allowed
    kept[..., 0] = True
    removed = torch.ones_like(scores, dtype=torch.bool).scatter(-1, best.indices, ~kept)
    return removed & (value > 0)[..., None]


def min_p(scores: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Tokens less likely than this share of the best one's probability."""
    p = scores.softmax(dim=-1)
    return p < value[..., None] * p.amax(dim=-1, keepdim=True)


def typical_p(scores: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """All but the tokens whose information is nearest to the entropy, as many as have this probability together."""
    information = -scores.log_softmax(dim=-1)
    expected = (information * (-information).exp()).nansum(dim=-1, keepdim=True)
    nearest = (information - expected).abs().sort(dim=-1)
    reached = scores.gather(-1, nearest.indices).softmax(dim=-1).cumsum(dim=-1)
    last = (reached < value[..., None]).sum(dim=-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    removed = (nearest.values > nearest.values.gather(-1, last)) & (value < 1)[..., None]
    removed[..., 0] = False
    return removed.scatter(-1, nearest.indices, removed)


def epsilon_cutoff(scores: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Tokens less likely than this, but the best."""
    return _below(scores, value)


def eta_cutoff(scores: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Tokens less likely than this, or than a bound that falls with the entropy, but the best."""
    return _below(scores, torch.minimum(value, value.sqrt() * (-_entropy(scores)[..., 0]).exp()))


def _below(scores: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    return (scores.softmax(dim=-1) < least[..., None]) & (scores < scores.amax(dim=-1, keepdim=True))


def _entropy(scores: torch.Tensor) -> torch.Tensor:
    """Entropy of softmax(scores), `[…, 1]`."""
    logs = scores - scores.logsumexp(dim=-1, keepdim=True)
    return -(logs.clamp(min=torch.finfo(logs.dtype).min) * logs.softmax(dim=-1)).sum(dim=-1, keepdim=True)


Filter = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
BEFORE: dict[str, Filter] = {"top_h": top_h}
"""Filters between temperature and top-k, by option; they take scores `[…, vocab]` and values `[…]`."""
AFTER: dict[str, Filter] = {
    "min_p": min_p,
    "typical_p": typical_p,
    "epsilon_cutoff": epsilon_cutoff,
    "eta_cutoff": eta_cutoff,
}
"""Filters after top-p, in order."""
OFF = {"top_h": 0.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
