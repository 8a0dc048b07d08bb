"""
`tree="auto"`: chooses the tree with the most expected tokens per second, from measured acceptance and step times.

Two tables are kept. The acceptance table holds how often the target's token is the child of rank r at depth d, given
that its parent was accepted: the product along a path is the path's probability, and 1 + the sum over a tree's nodes
is the expected number of tokens per step (Sequoia, arXiv 2402.12374). The time table holds how long steps take, by the
depth of the tree (drafting) and by its number of nodes (the rest of the step). For every depth and number of nodes the
best tree has the likeliest paths; among all these trees, and no tree, the one with the most tokens per second is
taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from .auto_tables import AcceptanceTable, TimeTable, likeliest_paths
from .draft_tree import DraftTree
from .planned_choice import Plan, PlannedChoice
from .token_tree import TokenTree


@dataclass(frozen=True, kw_only=True)
class AutoTree:
    """
    Limits of the trees among which `tree="auto"` chooses.

    Args:
        max_nodes (`int`): most draft tokens of a tree.
        max_depth (`int`): most levels of draft tokens.
        max_children (`int`): most children of a node.
    """

    max_nodes: int = 64
    max_depth: int = 8
    max_children: int = 8

    @property
    def num_nodes(self) -> int:
        """Most draft nodes of a step."""
        return self.max_nodes

    @property
    def depth(self) -> int:
        """Most levels of draft tokens."""
        return self.max_depth

    def within(self, max_depth: int | None, max_children: int) -> AutoTree:
        """The limits lowered to a drafter's depth (None: any) and number of children per node."""
        depth = self.max_depth if max_depth is None else min(self.max_depth, max_depth)
        return replace(self, max_depth=depth, max_children=min(self.max_children, max_children))

    def to_dict(self) -> str:
        """The string "auto", which `tree=` accepts again."""
        return "auto"


# ------------------------------------------------------------------------------------------------------------ the plan


def best_plan(chances: list[list[float]], times: StepTimes, limits: AutoTree, reach: int) -> Plan:
    """
    The tree, or no tree, with the most expected tokens per second.

    Args:
        chances (`list[list[float]]`): acceptance probabilities `[depth][rank]`, given an accepted parent.
        times (`StepTimes`): seconds that steps take.
        limits (`AutoTree`): largest size of the tree.
        reach (`int`): largest number of nodes for which `times` is trusted.
    """
    num_nodes = min(limits.max_nodes, reach)
    drafting, checking = times.propose.up_to(limits.max_depth), times.rest.up_to(num_nodes)
    best_rate = 1.0 / (drafting[0] + checking[0])
    paths: list[tuple[int, ...]] | None = None
    # Shallower trees use the same list without its deeper paths: it is twice as long, so that enough are left.
    likeliest = likeliest_paths(chances, 2 * num_nodes, limits.max_depth)
    for depth in range(1, limits.max_depth + 1):
        expected, shallow = 1.0, [item for item in likeliest if len(item[1]) <= depth][:num_nodes]
        for count, (chance, _) in enumerate(shallow, start=1):
            expected += chance
            rate = expected / (drafting[depth] + checking[count])
            if rate > best_rate:
                best_rate, paths = rate, [path for _, path in shallow[:count]]
    return Plan(None if paths is None else TokenTree(paths), best_rate)


@dataclass
class StepTimes:
    """
    Seconds that steps take on this machine, as measured by all calls of one target with one draft and batch size.

    Args:
        propose (`TimeTable`): seconds of drafting, by the tree's depth.
        rest (`TimeTable`): seconds of the rest of the step, by the number of draft nodes.
    """

    propose: TimeTable = field(default_factory=TimeTable)
    rest: TimeTable = field(default_factory=TimeTable)

    @property
    def are_known(self) -> bool:
        """
        Whether steps both with and without a tree were measured; with one kind alone, the other's time would be
        extrapolated from it.
        """
        return self.rest.has(0) and self.rest.largest > 0 and self.propose.largest > 0

    def has(self, tree: TokenTree | None) -> bool:
        """Whether any step with as many draft nodes as `tree` (None: without a tree) was timed."""
        return self.rest.has(0 if tree is None else tree.num_nodes)

    def of(self, tree: TokenTree | None) -> float:
        """Expected seconds of a step with `tree` (None: without a tree)."""
        depth, nodes = (0, 0) if tree is None else (tree.depth, tree.num_nodes)
        return self.propose.up_to(depth)[-1] + self.rest.up_to(nodes)[-1]


class AutoChoice(PlannedChoice):
    """
    Chooses the tree of every step of one call. Acceptance is learnt anew in every `generate` call, because it depends
    on the text.

    Args:
        times (`StepTimes`): measured step times of this machine, updated by every step.
        limits (`AutoTree`): largest size of a tree.
    """

    def __init__(self, times: StepTimes, limits: AutoTree):
        self.limits, acceptance = limits, AcceptanceTable(limits.max_depth, limits.max_children)
        paths = likeliest_paths(acceptance.chances(), min(limits.max_nodes, 8), min(4, limits.max_depth))
        super().__init__(times, acceptance, limits.max_depth, TokenTree([path for _, path in paths]))

    def begin_step(self, length: int) -> TokenTree | None:
        if self._to_try:
            self.tree = self._to_try.pop(0)
            return self.tree
        self._go_by_plan()
        self.tree = self._planned
        # Probes take about 1 % of the time at most: where speculation does not pay, it costs next to nothing.
        if self._without >= self.PROBE and self._without >= 100 * self._cost_of_probe():
            self.tree = self._probe()
        return self.tree

    def end_step(self, draft: DraftTree, paths: list[list[int] | None], propose: float, rest: float) -> None:
        # The drafted tree counts: at the end of a text, or for want of proposals, it is smaller than the chosen one.
        self.times.propose.add(draft.topology.depth, propose)
        self.times.rest.add(draft.num_nodes, rest)
        if self.tree is not None:
            self.acceptance.add(draft, paths)

    def plan(self) -> Plan:
        """
        The best plan now, among trees of at most twice as many nodes as the largest that was timed (or 4, if that is
        more).
        """
        reach = max(2 * self.times.rest.largest, 4)
        return best_plan(self.acceptance.chances(), self.times, self.limits, reach)

    def _cost_of_probe(self) -> float:
        """Time that a probe wastes if nothing is accepted, in units of a step without a tree."""
        without = self.times.of(None)
        return self.times.of(self._small) / without - 1.0 if without > 0 else 0.0


_times: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, dict[Hashable, Any]]] = (
    weakref.WeakKeyDictionary()
)


def times_of(target: Any, draft: Any, kind: Hashable, new: Callable[[], Any] = StepTimes) -> Any:
    """
    The step times shared by all calls of one target and draft (a model, or the type of a drafter without one), for one
    kind of step: a batch size, for example. They are freed with the target or the draft; `new` makes the times of a
    kind that has none yet.
    """
    of_target = _times.setdefault(target, weakref.WeakKeyDictionary())
    return of_target.setdefault(draft, {}).setdefault(kind, new())
