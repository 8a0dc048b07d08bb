"""Which token a block head was trained with in place of unknown tokens, told from how the head answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from ..block import BlockHead
from .along_text import Rows, block_logits
from .measuring import ReadText, log_probs_of


STEPS = 16
_RATE = 0.3
_NEAREST = 2
_ROOTS = 24
_CHUNK = 16_384


@torch.no_grad()
def likely_mask_token(head: BlockHead, target: PreTrainedModel, read: ReadText, depth: int) -> int:
    """
    The token whose embedding serves the head best for a mask, by the log-probability of a text's tokens. Few are
    tried: an embedding ascends this log-probability from the mean of all, and the tokens nearest to it and farthest
    along its gradient count, at every step.

    Args:
        head (`BlockHead`): the head.
        target (`PreTrainedModel`): its target.
        read (`ReadText`): a text with more than `depth` new tokens, read for this head.
        depth (`int`): how many tokens after each root are looked at.
    """
    rows, size = read.rows(head, target, depth), head.config.vocab_size
    rows = replace(rows, first=max(rows.first, len(rows.ids) - depth - _ROOTS))
    mean = torch.stack([known.sum(dim=0) for known in _embeddings(head, rows)]).sum(dim=0) / size
    spread = sum(float((known - mean).square().mean(dim=-1).sum()) for known in _embeddings(head, rows)) / size
    embedding, average, square = mean, torch.zeros_like(mean), torch.zeros_like(mean)
    tokens = {head.config.mask_token}
    for step in range(1, STEPS + 1):
        gradient = _gradient(head, rows, embedding)
        tokens |= set(_nearest(head, rows, embedding, gradient))
        average, square = 0.9 * average + 0.1 * gradient, 0.999 * square + 0.001 * gradient.square()  # Adam
        ascent = average / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        embedding = embedding + _RATE * spread**0.5 * ascent
    scores = {token: float(_log_prob(head, rows, _embedding_of(head, rows, token))) for token in sorted(tokens)}
    return max(scores, key=scores.__getitem__)


def _log_prob(head: BlockHead, rows: Rows, mask: torch.Tensor) -> torch.Tensor:
    """Mean log-probability of the text's tokens where the masks have this embedding `[H]`."""
    steps = enumerate(block_logits(head, rows, mask.to(head.dtype)))
    return torch.stack([log_probs_of(head, logits, rows.tokens(step)) for step, (_, logits) in steps]).nanmean()


def _gradient(head: BlockHead, rows: Rows, embedding: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        mask = embedding.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(_log_prob(head, rows, mask), mask)
    return gradient


def _nearest(head: BlockHead, rows: Rows, embedding: torch.Tensor, gradient: torch.Tensor) -> list[int]:
    """The tokens nearest to an embedding, and those farthest along a gradient from it."""
    near, along = [], []
    for known in _embeddings(head, rows):
        near.append(-(known - embedding).norm(dim=-1))
        along.append((known - embedding) @ gradient)
    return [token for scores in (near, along) for token in torch.cat(scores).topk(_NEAREST).indices.tolist()]


def _embeddings(head: BlockHead, rows: Rows) -> Iterator[torch.Tensor]:
    """The embeddings of all tokens, `[tokens, H]` float32 at a time."""
    for start in range(0, head.config.vocab_size, _CHUNK):
        tokens = torch.arange(start, min(start + _CHUNK, head.config.vocab_size), device=head.device)
        yield rows.embed(tokens).float()


def _embedding_of(head: BlockHead, rows: Rows, token: int) -> torch.Tensor:
    return rows.embed(torch.tensor([token], device=head.device))[0]
