"""Choosing the temperature of the distribution that draft tokens are drawn from."""

from __future__ import annotations

import torch


class DraftTemperature:
    """
    The temperature of the draft's distribution q, on top of the call's own warpers.

    A draft that was trained on little data is flatter than its target, and tokens drawn from a flat q are seldom right
    where the target is sure. The output is exact at any temperature, as long as the temperature is chosen before the
    draw, and the p/q tests use the q that was drawn from. A token drawn from q is accepted with probability
    Σ min(p, q) (arXiv 2211.17192), so the temperature is chosen that would have maximized this sum at the nodes
    observed so far. Low temperatures come close to proposing the best tokens and drawing from p, which is better for
    a bad draft.

    Args:
        value (`float`, *optional*): the temperature to start with, and to keep if `adapts` is False.
        adapts (`bool`, *optional*, defaults to `True`): whether the temperature is adapted during generation.
    """

    GRID = (1.4, 1.0, 0.7, 0.5, 0.35, 0.25)
    """Temperatures to choose from."""
    OFTEN, EARLY, SELDOM = 2, 16, 16
    """Every second step is observed among the first 16; later every 16th."""
    DECAY = 0.9
    """Factor on earlier observations at every new one."""

    def __init__(self, value: float = 1.0, adapts: bool = True):
        self.value, self.adapts = value, adapts
        self._step = 0
        self._overlaps = [0.0] * len(self.GRID)

    def begin_step(self) -> bool:
        """Counts a step, and says whether to observe it, which costs a softmax for each temperature."""
        self._step += 1
        return self.adapts and self._step % (self.OFTEN if self._step <= self.EARLY else self.SELDOM) == 1

    def apply(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores of q (log q up to a constant), `[…, vocab]`: the draft's scores at this temperature."""
        return scores if self.value == 1.0 else scores / self.value

    def observe(self, p: torch.Tensor, scores: torch.Tensor) -> None:
        """
        Updates the temperature from p and q at one node of every row.

        Args:
            p (`torch.Tensor` of shape `[rows, vocab]`): the target's probabilities.
            scores (`torch.Tensor` of shape `[rows, vocab]`): log q at the present temperature, up to a constant per
                row.
        """
        self.learn(overlaps(p, scores.float() * self.value).mean(dim=0).tolist())

    def learn(self, found: list[float]) -> None:
        """Updates the temperature from the mean overlap of p and q at each temperature; see `overlaps`."""
        self._overlaps = [self.DECAY * old + new for old, new in zip(self._overlaps, found, strict=True)]
        self.value = self.GRID[max(range(len(self.GRID)), key=self._overlaps.__getitem__)]


def overlaps(p: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """
    The overlap of p and q, Σ min(p, q), for q at each temperature of the grid.

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
