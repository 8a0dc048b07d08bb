"""Losses of a draft's predictions in plain PyTorch."""

from __future__ import annotations

import torch


def draft_loss_values_naive(
    draft_logits: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    wanted: torch.Tensor,
    vocabulary: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The losses and what their gradients need, `[n, 7]` float32: cross-entropy, divergence, distance, logarithms of the
    sums of exp(draft logit) and exp(logit), the sum of p over the draft vocabulary, Σ sign(q − p) q; and the best
    tokens, `[n]` int64. See `hf_specdec_kernels.draft_losses`.
    """
    scores = draft_logits.float()
    log_q, found = scores.log_softmax(dim=-1), logits.float()[rows]
    p = found.softmax(dim=-1)
    if vocabulary is not None:
        p = p[:, vocabulary.long()]
    q, mass = log_q.exp(), p.sum(dim=-1)
    cross_entropy = -log_q.gather(-1, wanted.clamp(min=0)[:, None])[:, 0]
    values = (
        torch.where(wanted >= 0, cross_entropy, 0.0),
        -(p * log_q).sum(dim=-1),
        (p - q).abs().sum(dim=-1) + (0.0 if vocabulary is None else 1 - mass),
        scores.logsumexp(dim=-1),
        found.logsumexp(dim=-1),
        mass,
        ((q - p).sign() * q).sum(dim=-1),
    )
    return torch.stack(values, dim=-1), scores.argmax(dim=-1)


def draft_loss_gradient_naive(
    draft_logits: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    wanted: torch.Tensor,
    vocabulary: torch.Tensor | None,
    values: torch.Tensor,
    gradients: torch.Tensor,
) -> torch.Tensor:
    """
    The gradient of the draft's logits, `[n, draft vocab]` in their dtype, from `values` of `draft_loss_values_naive`
    and the gradients of the three losses, `[n, 3]` float32.
    """
    _, _, _, sum_q, sum_p, mass, slope = values[..., None].unbind(1)
    of_token, of_divergence, of_distance = gradients[..., None].unbind(1)
    found = logits.float()[rows]
    if vocabulary is not None:
        found = found[:, vocabulary.long()]
    q, p = (draft_logits.float() - sum_q).exp(), (found - sum_p).exp()
    is_wanted = torch.arange(q.shape[1], device=q.device) == wanted[:, None]
    gradient = of_token * torch.where(wanted[:, None] >= 0, q - is_wanted.float(), 0.0)
    gradient = gradient + of_divergence * (mass * q - p) + of_distance * q * ((q - p).sign() - slope)
    return gradient.to(draft_logits.dtype)
