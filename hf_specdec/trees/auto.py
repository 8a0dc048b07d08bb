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
from dataclasses import dataclass, field, replace
from typing import Any

from .auto_tables import AcceptanceTable, TimeTable, likeliest_paths
from .choice import TreeChoice
from .draft_tree import DraftTree
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


@dataclass
class Plan:
    """A tree, or none, and the tokens per second that it promises."""

    tree: TokenTree | None
    tokens_per_second: float


def best_plan(chances: list[list[float]], propose: TimeTable, rest: TimeTable, limits: AutoTree, reach: int) -> Plan:
    """
    The tree with the most expected tokens per second.

    Args:
        chances (`list[list[float]]`): acceptance by depth and rank.
        propose (`TimeTable`): seconds to draft, by depth; 0 stands for no tree.
        rest (`TimeTable`): seconds of the rest of a step, by draft nodes.
        limits (`AutoTree`): how large it may be.
        reach (`int`): most nodes to trust `rest` with.
    """
    num_nodes = min(limits.max_nodes, reach)
    drafting, checking = propose.up_to(limits.max_depth), rest.up_to(num_nodes)
    best, paths = Plan(None, 1.0 / (drafting[0] + checking[0])), None
    for depth in range(1, limits.max_depth + 1):
        expected, likeliest = 1.0, likeliest_paths(chances, num_nodes, depth)
        for count, (chance, _) in enumerate(likeliest, start=1):
            expected += chance
            rate = expected / (drafting[depth] + checking[count])
            if rate > best.tokens_per_second:
                best, paths = Plan(None, rate), [path for _, path in likeliest[:count]]
    return best if paths is None else Plan(TokenTree(paths), best.tokens_per_second)


@dataclass
class Memory:
    """What calls of one target with one draft and batch size have measured so far."""

    limits: AutoTree
    acceptance: AcceptanceTable = field(init=False)
    propose: TimeTable = field(default_factory=TimeTable)
    rest: TimeTable = field(default_factory=TimeTable)

    def __post_init__(self) -> None:
        self.acceptance = AcceptanceTable(self.limits.max_depth, self.limits.max_children)

    def plan(self) -> Plan:
        """The best plan now; trees of more than twice the nodes that were ever timed are left for later."""
        reach = max(2 * self.rest.largest, 4)
        return best_plan(self.acceptance.chances(), self.propose, self.rest, self.limits, reach)

    def cost(self, tree: TokenTree) -> float:
        """The time that a step with this tree wastes if nothing is accepted, in steps without one."""
        plain = self.propose.up_to(0)[0] + self.rest.up_to(0)[0]
        return (self.propose.up_to(tree.depth)[-1] + self.rest.up_to(tree.num_nodes)[-1]) / plain - 1.0

    def rate(self, tree: TokenTree | None) -> float:
        """Tokens per second that a tree promises now."""
        if tree is None:
            return 1.0 / (self.propose.up_to(0)[0] + self.rest.up_to(0)[0])
        chances, expected = self.acceptance.chances(), 1.0
        reached: dict[tuple[int, ...], float] = {(): 1.0}
        for path in tree.paths:
            reached[path] = reached[path[:-1]] * chances[len(path) - 1][path[-1]]
            expected += reached[path]
        return expected / (self.propose.up_to(tree.depth)[-1] + self.rest.up_to(tree.num_nodes)[-1])


class AutoChoice(TreeChoice):
    """
    Chooses the tree of every step of one call.

    Args:
        memory (`Memory`): what is known; goes on learning.
    """

    REPLAN = 8
    """Steps between two plans."""
    GAIN = 1.03
    """How much better another tree must promise to be."""
    PROBE = 64
    """
    Steps without trees, at least, after which one carries a small tree, to see whether the text has changed; more
    where that would cost over a hundredth of the time, so that speculation which does not pay costs next to nothing.
    """

    def __init__(self, memory: Memory):
        super().__init__(None)
        self.memory = memory
        limits = memory.limits
        self._small = TokenTree.chain(min(2, limits.max_depth))
        paths = likeliest_paths(memory.acceptance.chances(), min(limits.max_nodes, 8), min(4, limits.max_depth))
        middling = TokenTree([path for _, path in paths])
        unknown = memory.rest.largest < 1
        # Every one twice: the first of a kind is slow for reasons of its own. The first steps take trees: most texts
        # can use them.
        self._to_try = [self._small, self._small, middling, middling, None, None] if unknown else []
        self._planned: TokenTree | None = self._small
        self._steps_to_plan = self._without = 0
        self._is_first = True

    def begin_step(self, length: int) -> TokenTree | None:
        if self._to_try:
            self.tree = self._to_try.pop(0)
            return self.tree
        if self._steps_to_plan == 0:
            self._steps_to_plan = self.REPLAN
            plan = self.memory.plan()
            if plan.tokens_per_second > self.GAIN * self.memory.rate(self._planned) or self._is_first:
                self._planned = plan.tree
            self._is_first = False
        self._steps_to_plan -= 1
        self.tree = self._planned
        self._without = self._without + 1 if self.tree is None else 0
        if self._without >= self.PROBE and self._without >= 100 * self.memory.cost(self._small):
            self._without, self.tree = 0, self._small
        return self.tree

    def end_step(self, draft: DraftTree, paths: list[list[int] | None], propose: float, rest: float) -> None:
        # What was drafted, which at the end of a text, or where a drafter knows no more, is less than was asked for.
        self.memory.propose.add(draft.topology.depth, propose)
        self.memory.rest.add(draft.num_nodes, rest)
        if self.tree is not None:
            self.memory.acceptance.add(self.tree, draft, paths)


_memories: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, dict[Any, Memory]]] = (
    weakref.WeakKeyDictionary()
)


def memory_of(target: Any, draft: Any, batch_size: int, limits: AutoTree) -> Memory:
    """
    The memory that calls of one target and draft (a model, or a kind of drafter without one) share, for one batch
    size. It goes when either does.
    """
    of_target = _memories.setdefault(target, weakref.WeakKeyDictionary())
    return of_target.setdefault(draft, {}).setdefault((batch_size, limits), Memory(limits))
