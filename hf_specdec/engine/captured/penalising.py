"""Penalties of tokens that texts have already, at the nodes of a captured step."""

from __future__ import annotations

import torch

from ...verification.penalties import lowered, repeated
from .node_parts import by_nodes
from .places import Places


PENALTY_VALUES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "counts_from")


def penalised(
    logits: torch.Tensor,
    values: dict[str, torch.Tensor],
    texts: torch.Tensor,
    lengths: torch.Tensor,
    places: Places,
) -> torch.Tensor:
    """
    The logits `[batch, nodes, vocab]` after the penalties, float32.

    Args:
        values (`dict[str, torch.Tensor]`): the `PENALTY_VALUES` of the rows, `[batch]` each.
        texts (`torch.Tensor` of shape `[batch, most]`, int64): the rows' tokens, of which the first `lengths` count.
        places (`Places`): the nodes.
    """
    batch, _, vocab = logits.shape
    repetition, presence, frequency = (values[name][:, None, None] for name in PENALTY_VALUES[:3])
    numbers = torch.arange(texts.shape[1], device=texts.device)
    is_text = (numbers < lengths[:, None]) & (texts < vocab)
    counts = [
        torch.zeros(batch, vocab + 1, device=texts.device).scatter_add_(
            1, torch.where(counted, texts, vocab), torch.ones_like(texts, dtype=torch.float32)
        )[:, None, :vocab]
        for counted in (is_text, is_text & (numbers >= values["counts_from"][:, None]))
    ]

    def changed(scores: torch.Tensor, seen: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Scores of tokens that the text has so often, and after the prompt so often."""
        scores = torch.where(seen > 0, repeated(scores, repetition), scores)
        return lowered(scores, counts, presence, frequency)

    def of_nodes(part: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        part = part.float()
        # Those of the path count beside the text.
        is_token = (tokens >= 0) & (tokens < vocab)
        index = torch.where(is_token, tokens, 0)
        again = (tokens[..., None] == tokens[..., None, :]).sum(dim=-1)
        own = (count.expand(-1, index.shape[1], -1).gather(2, index) + again for count in counts)
        of_path = changed(part.gather(2, index), *own)
        padded = torch.nn.functional.pad(changed(part, *counts), (0, 1))
        padded.scatter_(2, torch.where(is_token, tokens, vocab), of_path)
        return padded[..., :vocab]

    return by_nodes(of_nodes, logits, places.paths, dtype=torch.float32)
