"""The choice under `tree="auto"`: trials of small trees, then what pays by the times and by the text so far."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from .auto import AutoTree, Plan
from .auto_learning import Acceptances, Losses, Remembered, rounded
from .auto_tables import AcceptanceTable, likeliest_paths
from .auto_ways import Way
from .choice import Evidence, TreeChoice
from .draft_tree import DraftTree
from .dynamic import DynamicTree
from .step_times import StepTimes
from .token_tree import TokenTree


class AutoChoice(TreeChoice):
    """
    Chooses the tree of every step of one call. It depends on nothing but the text so far and `times`, which stay as
    they are once they are known well, unless the machine becomes faster or slower. Acceptance is learnt anew in every
    `generate` call, because it depends on the text; it begins with what earlier calls of the process accepted.

    Args:
        times (`StepTimes`): measured step times of this machine, which steps of new sizes complete.
        limits (`AutoTree`): the trees to choose from.
        asked (`int`, *optional*): most tokens that the texts get; None: any number.
        remembered (`Remembered`, *optional*): acceptance in earlier calls, with which this one begins.
    """

    reads_evidence = reads_confidence = True
    EARLY, REPLAN = 12, 2
    """First steps, each with a plan of its own; later steps from one plan to the next."""
    GAIN, REFINED = 1.03, 1.01
    """Factors by which another tree must promise to be better than the planned one, and one for the step at hand."""
    PATIENCE = 1.0
    """Further gain that no tree must promise after the first drafts, which say little: this over their number + 1."""
    PROBE = 16
    """Fewest steps without a tree after which one carries a draft token, to see whether the text has changed."""
    CHECK = 40
    """Steps with trees after which one goes without, so that a change of the machine's speed is seen."""
    CATCHES_UP = 2
    """Most steps without a tree after which the time of drafting counts: the draft reads their tokens first."""
    SHARE, SHARE_OF_TRIALS, SHARE_OF_PLANS = 0.015, 0.03, 0.02
    """
    Largest share of the text that may be lost where drafting begins again, tries a tree, and goes on, besides what it
    is expected to gain; see `Losses.allow`.
    """

    SURE, MOST_REFUSALS = 0.75, 3
    """
    Trust above which a draft's own estimates may leave a step without a tree, and most such steps in a row: nothing is
    learnt of them.
    """

    LEAST_DRAFTS, OFTEN, SELDOM, NEAR = 2, 0.15, 0.05, 0.85
    """
    Where trees are filled with drawn tokens or with the best ones: steps that each way has at least, and those of the
    worse way by those of the better one, often if it promises nearly as much, by this factor.
    """

    def __init__(
        self, times: StepTimes, limits: AutoTree, asked: int | None = None, remembered: Remembered | None = None
    ):
        super().__init__(None)
        self.times, self.limits, self.losses = times, limits, Losses(asked)
        self._ways = [Way(False, limits, times, acceptance := Acceptances(limits, remembered))]
        if limits.takes_either:
            self._ways.append(Way(True, limits, times, acceptance))
        self._way = self._ways[0]
        one, three = (TokenTree.chain(min(length, limits.max_depth, limits.max_nodes)) for length in (1, 3))
        # Every kind of step is tried twice, because the first one includes warming up.
        self._trials = [None, one, None, one, three, self._large()]
        self._one = one
        self._evidence: Evidence | None = None
        self._plans: dict[Hashable, tuple[Plan[TokenTree | DynamicTree], int]] = {}
        """By the rows' mean evidence the plan, and the step from which on it is renewed."""
        self._step = self._with = self._without = self._drafts = 0
        self._waited: int | None = None
        """Steps since the drafter was asked last; None if it never was."""
        self._confidences: Mapping[int, Sequence[float]] = {}
        """By row what the draft expects of the present step, once it has run."""
        self._is_trial, self._refusals = False, 0

    @property
    def acceptance(self) -> Acceptances:
        """What was learnt of acceptance; calls and batch sizes may share it."""
        return self._way.acceptance

    @acceptance.setter
    def acceptance(self, acceptance: Acceptances) -> None:
        for way in self._ways:
            way.acceptance = acceptance

    def _large(self) -> TokenTree | DynamicTree:
        """The drafter's own tree, or one of medium size, to see what more nodes cost."""
        if self.limits.first is not None:
            return self.limits.first
        chances = AcceptanceTable(self.limits.max_depth, self.limits.max_children, self.limits.prior).chances()
        depth, nodes = min(4, self.limits.max_depth), min(8, self.limits.max_nodes)
        return TokenTree([path for _, path in likeliest_paths(chances, nodes, depth)])

    # --------------------------------------------------------------------------------------------------------- steps

    def begin_step(self, length: int, evidence: Evidence | None = None) -> TokenTree | DynamicTree | None:
        self._evidence, self.tree, self._confidences, self._way = evidence, None, {}, self._ways[0]
        if evidence is None or any(chance is not None for chance in evidence.values()):
            if self._with >= self.CHECK:  # which is no sign that drafts do not pay
                self._with = 0
                return None
            self.tree = self._chosen()
            self._without = 0 if self.tree is not None else self._without + 1
            self._with = 0 if self.tree is None else self._with + 1
        return self.tree

    def _chosen(self) -> TokenTree | DynamicTree | None:
        trial = self._trial()
        self._is_trial = trial is not None
        if trial is not None:
            return trial[0]
        self._step += 1
        plan = self._planned()
        if plan.tree is None:
            return self._one if self._without >= self.PROBE and self.losses.allow(self.SHARE) else None
        if not self._may_draft(plan):
            return None
        self._way = self._ways[plan.takes_best != self._takes_other(plan)]
        return plan.tree

    def _may_draft(self, plan: Plan[TokenTree | DynamicTree]) -> bool:
        """Whether drafting has lost little enough for what the plan is expected to gain by usual times."""
        way, share = self._ways[plan.takes_best], self.SHARE if self._without else self.SHARE_OF_PLANS
        seconds = self.times.of(plan.tree)
        tokens = way.tokens(plan.tree, way.chances(self._evidence))
        return self.losses.allow(share, speed=tokens * self.times.of(None) / seconds if seconds > 0 else 1.0)

    def _trial(self) -> tuple[TokenTree | DynamicTree | None] | None:
        """The kind of step to try next (None among them: no tree), or None if there is none to try, or to afford."""
        while self._trials:
            tree = self._trials[0]
            nodes = 0 if tree is None else tree.num_nodes
            is_known = self.times.rest.is_sure(nodes) or (nodes > 1 and self.times.rest.has(nodes))
            if is_known or (nodes > 1 and self._evidence is not None):  # what has evidence may have fewer to propose
                self._trials.pop(0)
                continue
            if tree is not None and not self._can_afford(tree):
                return None
            self._trials.pop(0)
            return (tree,)
        return None

    def _can_afford(self, tree: TokenTree | DynamicTree) -> bool:
        """Whether a trial of `tree` loses little enough, even if nothing of it is accepted."""
        if not self.times.are_known:
            return self.losses.allow(self.SHARE_OF_TRIALS)
        cost = self.times.of(tree) / self.times.of(None) - 1.0
        return self.losses.allow(self.SHARE_OF_TRIALS, cost)

    def refine(
        self, confidences: Mapping[int, Sequence[float]], most_nodes: int | None = None
    ) -> TokenTree | DynamicTree | None:
        self._confidences = confidences
        if self.tree is None or self._is_trial or not confidences:
            return self.tree
        way, most_nodes = self._way, self.limits.max_nodes if most_nodes is None else most_nodes
        chances, depth = way.chances_by_confidence(confidences, self._evidence), max(map(len, confidences.values()))
        limits = replace(self.limits, max_nodes=most_nodes, max_depth=min(self.limits.max_depth, depth))
        plan = way.plan_of_step(chances, limits)
        if plan.tokens_per_second > self.REFINED * way.rate(self.tree, chances):
            self._refusals = self._refusals + 1 if plan.tree is None else 0
            may_refuse = way.trust.share > self.SURE and self._refusals <= self.MOST_REFUSALS
            self.tree = self._one if plan.tree is None and not may_refuse else plan.tree
            self._refusals = 0 if self.tree is not None else self._refusals
        return self.tree

    def end_step(self, draft: DraftTree, paths: list[list[int] | None], propose: float, rest: float) -> None:
        # The drafted tree counts: at the end of a text, or for want of proposals, it is smaller than the chosen one.
        is_refused = bool(self._confidences) and self.tree is None
        caught_up = self._waited is not None and self._waited <= self.CATCHES_UP
        is_usual = caught_up if self.tree is not None else not is_refused
        times = self.times
        times.add(self.tree, draft.topology.depth, draft.num_nodes, propose if is_usual else None, rest)
        if self.tree is not None or is_refused:
            self._waited = 0
        elif self._waited is not None:
            self._waited += 1
        taken = [len(path) + 1 for path in paths if path is not None]
        tokens = statistics.mean(taken) if taken else 1.0
        without = self.times.of(None)
        if self.tree is None or without <= 0:
            spent = times.drafting(self._one) / without if is_refused and without > 0 else 0.0
            self.losses.add(1.0 + spent, 1.0)
            self.acceptance.grow_older()
            return
        cost = times.drafting(self.tree) + times.rest.up_to(draft.num_nodes)[-1]
        self.losses.add(cost / without, tokens)
        self._drafts += 1
        self._way.learn(self.tree, draft, paths, self._evidence, self._confidences)

    # ---------------------------------------------------------------------------------------------------- the plan

    def _planned(self) -> Plan[TokenTree | DynamicTree]:
        """The plan for the present evidence, renewed every `REPLAN` steps."""
        chances = [chance or 0.0 for chance in (self._evidence or {}).values()]
        key = rounded(statistics.mean(chances)) if chances else None
        known, due = self._plans.get(key, (Plan(None, 0.0), 0))
        if self._step >= due:
            plan = self.plan()
            gain = self.GAIN if plan.tree is not None else self.GAIN + self.PATIENCE / (1.0 + self._drafts)
            if plan.tokens_per_second > gain * self.rate(known.tree, known.takes_best):
                known = plan
            self._plans[key] = known, self._step + (1 if self._step < self.EARLY else self.REPLAN)
        return known

    def plan(self) -> Plan[TokenTree | DynamicTree]:
        """The best plan now of all ways of filling trees."""
        plans = [way.plan(self._evidence) for way in self._ways]
        return max(plans, key=lambda plan: plan.tokens_per_second)

    def rate(self, tree: TokenTree | DynamicTree | None, takes_best: bool = False) -> float:
        """Expected tokens per second of steps with `tree` (None: without a tree), with times at their best."""
        way = self._ways[takes_best]
        return way.rate(tree, way.chances(self._evidence))

    def _takes_other(self, plan: Plan[TokenTree | DynamicTree]) -> bool:
        """Whether a step of the plan is filled the other way, to see which of both accepts more."""
        if len(self._ways) == 1:
            return False
        way, other = self._ways[plan.takes_best], self._ways[not plan.takes_best]
        is_near = self.rate(plan.tree, other.takes_best) > self.NEAR * self.rate(plan.tree, plan.takes_best)
        share = self.OFTEN if is_near else self.SELDOM
        return other.drafts < self.LEAST_DRAFTS + share * way.drafts

    @property
    def takes_best(self) -> bool:  # type: ignore[override]
        """Whether the present step's children are the draft's best tokens, in a call that draws them otherwise."""
        return self._way.takes_best
