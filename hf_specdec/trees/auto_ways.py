"""A way of filling trees, with the draft's best tokens or with drawn ones, and what a call knows of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from .auto import AutoTree, Plan, best_plan
from .auto_learning import Acceptances, Trust, rounded
from .auto_tables import drafted_children, expected_of
from .choice import Evidence
from .draft_tree import DraftTree
from .dynamic import DynamicTree
from .step_times import StepTimes
from .token_tree import TokenTree


Paths = list[list[int] | None]


class Way:
    """
    One way of filling trees under `tree="auto"`.

    Args:
        takes_best (`bool`): whether children are the draft's best tokens in a call that draws them otherwise.
        limits (`AutoTree`): the trees to choose from.
        times (`StepTimes`): step times, of both ways: a draw takes about as long as a search for the best tokens.
        acceptance (`Acceptances`): acceptance of both ways.
    """

    FAVOUR = 1.05
    """Factor by which another tree must promise more than the drafter's own, where that is better than none."""

    def __init__(self, takes_best: bool, limits: AutoTree, times: StepTimes, acceptance: Acceptances):
        self.takes_best, self.limits, self.times, self.acceptance = takes_best, limits, times, acceptance
        self.drafts = 0
        """Steps that were drafted in this way."""
        self.trust = Trust()

    # ------------------------------------------------------------------------------------------------------- expected

    def chances(self, evidence: Evidence | None) -> list[list[float]]:
        """Acceptance probabilities `[depth][rank]` by what was learnt, the mean of the rows."""
        if evidence is None:
            return self.acceptance.of(None, self.takes_best).chances()
        rows = [chance for chance in evidence.values() if chance is not None]
        tables = [self.acceptance.of(chance, self.takes_best).chances() for chance in rows]
        return [
            [sum(ranks) / len(evidence) for ranks in zip(*levels, strict=True)] for levels in zip(*tables, strict=True)
        ]

    def chances_by_confidence(
        self, confidences: Mapping[int, Sequence[float]], evidence: Evidence | None
    ) -> list[list[float]]:
        """`chances` with the draft's confidence in the step at hand; see `TreeChoice.refine`."""
        learnt = self.chances(evidence)
        rows = [self.trust.chances(its, learnt) for its in confidences.values()]
        return [[statistics.fmean(ranks) for ranks in zip(*levels, strict=True)] for levels in zip(*rows, strict=True)]

    def tokens(self, tree: TokenTree | DynamicTree | None, chances: list[list[float]], by_ratio: bool = True) -> float:
        """Expected tokens per row of a step with `tree`."""
        expected = expected_of(tree, chances)
        if not (by_ratio and isinstance(tree, DynamicTree)):
            return expected
        return 1.0 + (expected - 1.0) * self.acceptance.ratio(self.takes_best, tree).value

    def rate(self, tree: TokenTree | DynamicTree | None, chances: list[list[float]]) -> float:
        """Expected tokens per second of steps with `tree` (None: without a tree), with times at their best."""
        return self.tokens(tree, chances) / self.times.of(tree, at_best=True)

    # ----------------------------------------------------------------------------------------------------------- plans

    @property
    def reach(self) -> int:
        """Largest number of nodes for which times are trusted."""
        return max(2 * self.times.rest.largest, 4)

    def plan(self, evidence: Evidence | None) -> Plan[TokenTree | DynamicTree]:
        """
        The best plan now, among trees of at most twice as many nodes as the largest that was timed (or 4, if that is
        more), and the drafter's own tree.
        """
        chances, first = self.chances(evidence), self.limits.first
        plan: Plan[TokenTree | DynamicTree] = best_plan(chances, self.times, self.limits, self.reach, at_best=True)
        if first is not None and first.num_nodes <= self.reach:
            rate = self.rate(first, chances)
            plan = Plan(first, rate) if self.FAVOUR * rate > plan.tokens_per_second else plan
        return plan._replace(takes_best=self.takes_best)

    def plan_of_step(self, chances: list[list[float]], limits: AutoTree) -> Plan[TokenTree]:
        """The best plan for the step at hand, in which the draft has run."""
        return best_plan(chances, self.times, limits, self.reach, at_best=True, is_drafting=True)

    # ----------------------------------------------------------------------------------------------------------- learn

    def learn(
        self,
        tree: TokenTree | DynamicTree,
        draft: DraftTree,
        paths: Paths,
        evidence: Evidence | None,
        confidences: Mapping[int, Sequence[float]],
    ) -> None:
        """Takes the result of a step that was drafted in this way; see `TreeChoice.end_step`."""
        self.drafts += 1
        taken = [len(path) for path in paths if path is not None]
        if isinstance(tree, DynamicTree):
            expected = self.tokens(tree, self.chances(evidence), by_ratio=False) - 1.0
            self.acceptance.add_ratio(self.takes_best, tree, expected, statistics.mean(taken) if taken else 0.0)
        if confidences:
            self._learn_trust(draft, paths, confidences, self.chances(evidence))
        if evidence is None:
            self.acceptance.add(None, self.takes_best, draft, paths)
            return
        for chance in {rounded(chance) for chance in evidence.values() if chance is not None}:
            rows = {row for row, its in evidence.items() if its is not None and rounded(its) == chance}
            own = [path if row in rows else None for row, path in enumerate(paths)]
            self.acceptance.add(chance, self.takes_best, draft, own)

    def _learn_trust(
        self, draft: DraftTree, paths: Paths, confidences: Mapping[int, Sequence[float]], learnt: list[list[float]]
    ) -> None:
        """Compares the draft's confidence with what is known of earlier steps, along the best nodes."""
        for row, chances in confidences.items():
            node = 0
            for depth, chance in enumerate(chances[: len(learnt)]):
                children, path = drafted_children(draft, row, node), paths[row]
                if path is None or not children:
                    break
                is_hit = depth < len(path) and path[depth] == children[0]
                self.trust.learn(chance, learnt[depth][0], is_hit)
                if not is_hit:
                    break
                node = children[0]
