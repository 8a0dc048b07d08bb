"""Processors that look at the text, at the nodes of a captured step: penalties, and repeated n-grams."""

from __future__ import annotations

import torch

from ...verification.biases import MOST_BEFORE
from ...verification.penalties import lowered, repeated
from .nodes import Places, by_nodes


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


def without_repeated(
    logits: torch.Tensor, sizes: torch.Tensor, texts: torch.Tensor, lengths: torch.Tensor, places: Places
) -> torch.Tensor:
    """
    The logits `[batch, nodes, vocab]` with -inf for tokens with which the text that ends with a node would have an
    n-gram for a second time, as by `NoRepeatNGramLogitsProcessor`.

    Args:
        sizes (`torch.Tensor` of shape `[batch]`, int64): n of every row, at most `MOST_BEFORE + 1`; 0 for none.
        texts (`torch.Tensor` of shape `[batch, most]`, int64): the rows' tokens, of which the first `lengths` count.
        places (`Places`): the nodes.
    """
    vocab, depth = logits.shape[2], places.paths.shape[2]
    tokens = places.last_tokens(texts, lengths, depth + MOST_BEFORE)
    is_whole = torch.arange(MOST_BEFORE, device=texts.device) >= sizes[:, None] - 1  # more than n - 1 tokens match
    numbers = torch.arange(texts.shape[1], device=texts.device)
    counts = (numbers < lengths[:, None]) & (sizes > 0)[:, None] & (texts < vocab)

    def banned(part: torch.Tensor, tokens: torch.Tensor, paths: torch.Tensor) -> torch.Tensor:
        of_text = counts[:, None].expand(-1, part.shape[1], -1)
        for place in range(MOST_BEFORE):
            before = torch.nn.functional.pad(texts, (place + 1, 0), value=-2)[:, None, : texts.shape[1]]
            of_text = of_text & ((before == tokens[:, :, place, None]) | is_whole[:, None, place, None])
        # Tokens of the path are banned, too, by the tokens before each of them.
        of_path = (paths >= 0) & (paths < vocab) & (sizes > 0)[:, None, None]
        before = tokens.unfold(2, MOST_BEFORE, 1)[:, :, 1:]
        same = (before == tokens[:, :, None, :MOST_BEFORE]) & (before >= 0)
        of_path = of_path & (same | is_whole[:, None, None]).all(dim=3)
        hidden = torch.zeros(*part.shape[:2], vocab + 1, dtype=torch.bool, device=part.device)
        hidden.scatter_(2, torch.where(of_text, texts[:, None], vocab), True)
        hidden.scatter_(2, torch.where(of_path, paths, vocab), True)
        return part.masked_fill(hidden[..., :-1], -torch.inf)

    return by_nodes(banned, logits, tokens, places.paths, width=texts.shape[1])
