"""What steps teach of candidate trees: how many tokens each may be expected to give."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence

from .auto_learning import Ratio, Trust
from .auto_tables import AcceptanceTable, expected_length, expected_of
from .confidence import Calibration, RowOutcome
from .dynamic import DynamicTree
from .token_tree import TokenTree
from .whole_times import Tree


class CandidateLearning:
    """
    Acceptance of the texts, and what trees give beyond it: dynamic ones, and those shaped by their draft's confidence.

    Args:
        acceptance (`AcceptanceTable`): measured acceptance of the texts, updated by every step.
        advantages (`dict[DynamicTree, Ratio]`): what is known of dynamic trees, from all calls.
    """

    DOUBT = 1.0
    """Standard errors by which a tree may turn out to accept more than is expected of it."""
    ADVANTAGE, FADES = (1.12, 24.0, 0.995), 0.999
    """
    `Ratio` of a dynamic tree at first, of the order of what EAGLE-2 (arXiv 2406.16858, table 1) reports; and how it
    fades in steps with other trees, so that an unlucky start is not the last word.
    """

    def __init__(self, acceptance: AcceptanceTable, advantages: dict[DynamicTree, Ratio]):
        self.acceptance, self._advantages = acceptance, advantages
        self._trust, self._ratio = Trust(), Ratio()
        self._calibration: Calibration | None = None
        self._expected: tuple[list[list[float]], dict[Tree | None, float]] = [], {}
        """Chances, and the tokens that were expected of trees by them."""

    def calibration(self) -> Calibration:
        """How the next step reads its draft's confidence; the same until `renew`."""
        if self._calibration is None:
            self._calibration = Calibration(self.acceptance.chances(), self._trust.share, self._trust.factor)
        return self._calibration

    def renew(self) -> None:
        """Lets the next `calibration` be what was learnt until then."""
        self._calibration = None

    def add(self, tree: Tree | None, paths: list[list[int] | None], outcomes: Sequence[RowOutcome]) -> None:
        """Takes the result of a step that ran whole on the device; see `CandidateChoice.end_whole_step`."""
        for other, advantage in self._advantages.items():
            if other != tree:
                advantage.fade(self.FADES)
        if isinstance(tree, DynamicTree):
            self.add_dynamic(tree, [len(row.ranks) for row in outcomes])
            self.acceptance.add_offered([(row.ranks, row.offered) for row in outcomes], tree.top_k)
        elif tree is not None and outcomes:
            self._add_shaped(tree, outcomes)
        elif tree is not None:
            self.acceptance.add_whole(tree, paths)

    def add_dynamic(self, tree: DynamicTree, accepted: Sequence[int]) -> None:
        """Compares what rows of a step accepted of a dynamic tree with what a static one would have given."""
        if accepted:
            expected = expected_of(tree, self.acceptance.chances()) - 1.0
            self._advantages.setdefault(tree, Ratio(*self.ADVANTAGE)).add(expected, statistics.mean(accepted))

    def _add_shaped(self, tree: TokenTree, outcomes: Sequence[RowOutcome]) -> None:
        """Takes the result of a step whose tree was shaped by the draft's confidence."""
        learnt = self.calibration().learnt
        accepted = statistics.mean(len(row.ranks) for row in outcomes)
        self._ratio.add(expected_length(tree.paths, learnt) - 1.0, accepted)
        for row in outcomes:
            ranks = [*row.ranks, None]
            for chance, level, offered, rank in zip(row.chances, learnt, row.offered, ranks, strict=False):
                if not offered:
                    break
                self._trust.learn(chance, level[0], rank == 0)
                if rank != 0:
                    break
        self.acceptance.add_offered([(row.ranks, row.offered) for row in outcomes])

    def expected_tokens(self, trees: Collection[Tree | None]) -> dict[Tree | None, float]:
        """Expected tokens per row of a step with each of these trees."""
        chances = self.acceptance.chances()
        if self._expected[0] is not chances:
            self._expected = chances, {}
        known = self._expected[1]
        for tree in trees:
            if tree not in known:
                known[tree] = expected_of(tree, chances)
        return {tree: 1.0 + (known[tree] - 1.0) * self._factor(tree) for tree in trees}

    def doubt(self) -> float:
        """Tokens per row by which a step with a tree may well give more than is expected: `DOUBT` standard errors."""
        chances, number = self.acceptance.chances(), self.acceptance.num_drafts
        return self.DOUBT * math.sqrt((chances[0][0] + 0.25) / (number + 1.0))

    def _factor(self, tree: Tree | None) -> float:
        """What is accepted of a tree over what was expected of it."""
        if not isinstance(tree, DynamicTree):
            return self._ratio.value
        return self._advantages[tree].value if tree in self._advantages else self.ADVANTAGE[0]
