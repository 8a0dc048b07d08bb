"""Penalties of tokens that a text has already."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor


class OccurrencePenalty(LogitsProcessor):
    """
    Lowers the scores of tokens that have been generated: https://platform.openai.com/docs/api-reference/completions.
    Those of the prompt do not count.

    Args:
        prompt_length (`int`): tokens of the prompt.
        presence (`float`): is subtracted from the score of a token that the text has.
        frequency (`float`): is subtracted as often as the text has the token.
    """

    def __init__(self, prompt_length: int, presence: float, frequency: float):
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores `[rows, vocab]` after the tokens `input_ids`, `[rows, length]`."""
        new = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return lowered(scores, counts, self.presence, self.frequency)  # type: ignore[return-value]


def lowered(
    scores: torch.Tensor, counts: torch.Tensor, presence: float | torch.Tensor, frequency: float | torch.Tensor
) -> torch.Tensor:
    """Scores after the penalties of tokens that a text has so often; see `OccurrencePenalty`."""
    return scores - frequency * counts - presence * (counts > 0)


def repeated(scores: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Scores of tokens that a text has after transformers' repetition penalty."""
    return torch.where(scores < 0, scores * penalty, scores / penalty)
