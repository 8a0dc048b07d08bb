"""Choosing the temperature of the distribution that draft tokens are drawn from."""

from __future__ import annotations

import torch


class DraftTemperature:
    """
    The temperature of q, beside whatever the call's own warpers do.

    A draft that was trained on little is flatter than its target, and tokens drawn from a flat q are seldom right
    where the target is sure. Any temperature is exact, as long as the same q is drawn from and tested with, and it is
    chosen before the draw. It is chosen by what the verifier has seen so far: a token drawn from q is accepted with
    probability Σ min(p, q) (arXiv 2211.17192), so that temperature is taken which would have made this sum the
    largest. At low temperatures this comes close to proposing the best tokens and drawing from p, which is the better
    way for a bad draft.

    Args:
        value (`float`, *optional*): the temperature to start with, and to keep if `adapts` is False.
        adapts (`bool`, *optional*, defaults to `True`): whether it is chosen anew on the way.
    """

    GRID = (1.4, 1.0, 0.7, 0.5, 0.35, 0.25)
    """What is chosen from."""
    OFTEN, EARLY, SELDOM = 2, 16, 16
    """Every second step is looked at among the first sixteen; later every sixteenth."""
    DECAY = 0.9
    """How much older steps count."""

    def __init__(self, value: float = 1.0, adapts: bool = True):
        self.value, self.adapts = value, adapts
        self._step = 0
        self._overlaps = [0.0] * len(self.GRID)

    def begin_step(self) -> bool:
        """Whether this step's distributions are worth a look: it costs a softmax for each temperature."""
        self._step += 1
        return self.adapts and self._step % (self.OFTEN if self._step <= self.EARLY else self.SELDOM) == 1

    def apply(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores of q, `[…, vocab]`."""
        return scores if self.value == 1.0 else scores / self.value

    def observe(self, p: torch.Tensor, scores: torch.Tensor) -> None:
        """
        Learns from one node of every row.

        Args:
            p (`torch.Tensor` of shape `[rows, vocab]`): the target's probabilities.
            scores (`torch.Tensor` of shape `[rows, vocab]`): log q, up to a constant per row, as it was drawn from.
        """
        self.learn(overlaps(p, scores.float() * self.value).mean(dim=0).tolist())

    def learn(self, found: list[float]) -> None:
        """The same from the mean of what `overlaps` found."""
        self._overlaps = [self.DECAY * old + new for old, new in zip(self._overlaps, found, strict=True)]
        self.value = self.GRID[max(range(len(self.GRID)), key=self._overlaps.__getitem__)]


def overlaps(p: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """
    How much p and q have in common, Σ min(p, q), for q at each temperature of the grid.

    Args:
        p (`torch.Tensor` of shape `[rows, vocab]`): probabilities.
        scores (`torch.Tensor` of shape `[rows, vocab]`, float32): log q at a temperature of 1, up to a constant.

    Returns:
        `torch.Tensor`: `[rows, temperatures]` float32.
    """
    found = [
        torch.minimum(p.float(), (scores / temperature).softmax(dim=-1)).sum(dim=-1)
        for temperature in DraftTemperature.GRID
    ]
    return torch.stack(found, dim=1)
