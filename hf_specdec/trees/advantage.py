"""How much more a dynamic tree accepts than the best static tree of its size."""

from __future__ import annotations


class Advantage:
    """
    Tokens that a dynamic tree accepts, over those that the likeliest static tree of its size would by what is known of
    acceptance: an average over the steps of many calls, as it depends on the draft more than on the text. It leans on
    `USUAL`, and goes back to it in steps with other trees, so that an unlucky start is not the last word.

    `USUAL` is of the order of what EAGLE-2 (arXiv 2406.16858, table 1) reports over EAGLE's static tree.
    """

    USUAL, WEIGHT = 1.12, 24.0
    """Value before anything is measured, and its weight in accepted tokens."""
    DECAY, FORGETS = 0.995, 0.999
    """Factors on what was measured, at every step with the tree and with another one."""

    def __init__(self) -> None:
        self._expected = self._accepted = 0.0

    @property
    def value(self) -> float:
        return (self._accepted + self.USUAL * self.WEIGHT) / (self._expected + self.WEIGHT)

    def add(self, expected: float, accepted: float) -> None:
        """Takes a step with the tree: mean accepted tokens of a row, expected of the static tree and seen."""
        self._expected = self.DECAY * self._expected + expected
        self._accepted = self.DECAY * self._accepted + accepted

    def grow_older(self) -> None:
        """Takes note of a step with another tree."""
        self._expected *= self.FORGETS
        self._accepted *= self.FORGETS
