"""The next token of a distribution: its argmax, or drawn."""

from __future__ import annotations

import torch

from ..random_generators import generator_held
from .argmax import argmax


NOTHING_TO_DRAW_FROM = "probability tensor contains either `inf`, `nan` or element < 0"
"""What plain `generate` says, by `torch.multinomial`, where there is nothing to draw from."""


def choose(scores: torch.Tensor, do_sample: bool) -> torch.Tensor:
    """The next tokens `[…]` for processed scores `[…, vocab]`: the argmax, or drawn from their softmax."""
    if not do_sample:
        # In plain `generate` tokens that float32 cannot tell apart are a tie.
        return argmax(scores.float() if scores.dtype == torch.float64 else scores)
    probabilities = scores.float().softmax(dim=-1).flatten(0, -2)
    with generator_held(scores.device):
        return torch.multinomial(probabilities, num_samples=1).view(scores.shape[:-1])
