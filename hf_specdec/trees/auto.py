"""
`tree="auto"`: the tree that promises the most tokens per second, from what the call itself has measured.

Two tables are kept. How often the target's token is the child of rank r at depth d, once its parent was accepted: the
product along a path is the path's chance, and 1 + the sum over a tree's nodes its expected tokens per step (Sequoia,
arXiv 2402.12374). And how long steps take, by the depth of the tree (drafting) and its number of nodes (the rest). For
every depth and number of nodes the best tree has the likeliest paths; of all these, and no tree, the one with the most
tokens per second is taken.
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
    What `tree="auto"` chooses among.

    Args:
        max_nodes (`int`): most draft tokens of a tree.
        max_depth (`int`): most levels.
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
        """The same, within what a drafter can do."""
        depth = self.max_depth if max_depth is None else min(self.max_depth, max_depth)
        return replace(self, max_depth=depth, max_children=min(self.max_children, max_children))

    def to_dict(self) -> str:
        """What `tree=` accepts again."""
        return "auto"


# ------------------------------------------------------------------------------------------------------------ the plan


def best_plan(chances: list[list[float]], times: StepTimes, limits: AutoTree, reach: int) -> Plan:
    """
    The tree with the most expected tokens per second.

    Args:
        chances (`list[list[float]]`): acceptance by depth and rank.
        times (`StepTimes`): what steps cost.
        limits (`AutoTree`): how large it may be.
        reach (`int`): most nodes to trust `times` with.
    """
    num_nodes = min(limits.max_nodes, reach)
    drafting, checking = times.propose.up_to(limits.max_depth), times.rest.up_to(num_nodes)
    best_rate = 1.0 / (drafting[0] + checking[0])
    paths: list[tuple[int, ...]] | None = None
    # Shallower trees have the same paths but the deep ones: of twice as many enough are left.
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
        propose (`TimeTable`): drafting, by the tree's depth.
        rest (`TimeTable`): the rest of the step, by draft nodes.
    """

    propose: TimeTable = field(default_factory=TimeTable)
    rest: TimeTable = field(default_factory=TimeTable)

    @property
    def are_known(self) -> bool:
        """Whether steps with and without a tree were measured: else the one would be judged by the other."""
        return self.rest.has(0) and self.rest.largest > 0 and self.propose.largest > 0

    def has(self, tree: TokenTree | None) -> bool:
        """Whether any step with so many nodes was timed."""
        return self.rest.has(0 if tree is None else tree.num_nodes)

    def of(self, tree: TokenTree | None) -> float:
        """What a step with this tree takes."""
        depth, nodes = (0, 0) if tree is None else (tree.depth, tree.num_nodes)
        return self.propose.up_to(depth)[-1] + self.rest.up_to(nodes)[-1]


class AutoChoice(PlannedChoice):
    """
    Chooses the tree of every step of one call. Acceptance is learnt anew by every call, since it is the text's.

    Args:
        times (`StepTimes`): what is known of the machine; goes on learning.
        limits (`AutoTree`): how large a tree may be.
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
        # Where a probe costs much there are fewer: speculation that does not pay costs next to nothing.
        if self._without >= self.PROBE and self._without >= 100 * self._cost_of_probe():
            self.tree = self._probe()
        return self.tree

    def end_step(self, draft: DraftTree, paths: list[list[int] | None], propose: float, rest: float) -> None:
        # What was drafted, which at the end of a text, or where a drafter knows no more, is less than was asked for.
        self.times.propose.add(draft.topology.depth, propose)
        self.times.rest.add(draft.num_nodes, rest)
        if self.tree is not None:
            self.acceptance.add(draft, paths)

    def plan(self) -> Plan:
        """The best plan now; trees of more than twice the nodes that were ever timed are left for later."""
        reach = max(2 * self.times.rest.largest, 4)
        return best_plan(self.acceptance.chances(), self.times, self.limits, reach)

    def _cost_of_probe(self) -> float:
        """The time that a probe wastes if nothing is accepted, in steps without a tree."""
        without = self.times.of(None)
        return self.times.of(self._small) / without - 1.0 if without > 0 else 0.0


_times: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, dict[Hashable, Any]]] = (
    weakref.WeakKeyDictionary()
)


def times_of(target: Any, draft: Any, kind: Hashable, new: Callable[[], Any] = StepTimes) -> Any:
    """
    The step times that calls of one target and draft (a model, or a kind of drafter without one) share, for one kind
    of steps: a batch size, say. They go when either does. `new` makes those of a kind that nobody has had.
    """
    of_target = _times.setdefault(target, weakref.WeakKeyDictionary())
    return of_target.setdefault(draft, {}).setdefault(kind, new())
