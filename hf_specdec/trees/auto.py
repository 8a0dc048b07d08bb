"""
`tree="auto"`: the trees to choose from, and the one with the most expected tokens per second.

The acceptance table holds how often the target's token is the child of rank r at depth d, given that its parent was
accepted: the product along a path is the path's probability, and 1 + the sum over a tree's nodes is the expected
number of tokens per step (Sequoia, arXiv 2402.12374). The time table holds how long steps take, by the depth of the
tree (drafting) and by its number of nodes (the rest of the step). For every depth and number of nodes the best tree
has the likeliest paths; among all these trees, the drafter's own default tree, and no tree, the one with the most
tokens per second is taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from .auto_tables import likeliest_paths
from .dynamic import DynamicTree
from .step_times import StepTimes
from .token_tree import TokenTree


WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of draft nodes of the trees to choose from: few, so that each is measured often."""


@dataclass(frozen=True, kw_only=True)
class AutoTree:
    """
    The trees among which `tree="auto"` chooses.

    Args:
        max_nodes (`int`): most draft tokens of a tree.
        max_depth (`int`): most levels of draft tokens.
        max_children (`int`): most children of a node.
        first (`TokenTree` or `DynamicTree`, *optional*): a tree to choose, too, of any size: a drafter's own default.
        prior (`tuple[float, …]`, *optional*): expected acceptance of the draft's best token by depth; see
            `AcceptanceTable`.
        takes_either (`bool`): whether the best tokens may fill trees in a call that draws its draft tokens, too.
    """

    max_nodes: int = 64
    max_depth: int = 8
    max_children: int = 8
    first: TokenTree | DynamicTree | None = None
    prior: tuple[float, ...] | None = None
    takes_either: bool = False

    @property
    def num_nodes(self) -> int:
        """Most draft nodes of a step."""
        return self.max_nodes if self.first is None else max(self.max_nodes, self.first.num_nodes)

    @property
    def depth(self) -> int:
        """Most levels of draft tokens."""
        return self.max_depth if self.first is None else max(self.max_depth, self.first.depth)

    def within(self, max_depth: int | None, max_children: int) -> AutoTree:
        """The limits lowered to a drafter's depth (None: any) and number of children per node."""
        depth = self.max_depth if max_depth is None else min(self.max_depth, max_depth)
        return replace(self, max_depth=depth, max_children=min(self.max_children, max_children))

    def to_dict(self) -> str:
        """The string "auto", which `tree=` accepts again."""
        return "auto"


Chosen = TypeVar("Chosen", bound=TokenTree | DynamicTree, covariant=True)


class Plan(NamedTuple, Generic[Chosen]):
    """A tree (None: no tree), its expected tokens per second, and whether it takes the draft's best tokens."""

    tree: Chosen | None
    tokens_per_second: float
    takes_best: bool = False


def best_plan(
    chances: list[list[float]],
    times: StepTimes,
    limits: AutoTree,
    reach: int,
    at_best: bool = False,
    widths: Sequence[int] = WIDTHS,
    is_drafting: bool = False,
) -> Plan[TokenTree]:
    """
    The static tree, or no tree, with the most expected tokens per second.

    Args:
        chances (`list[list[float]]`): acceptance probabilities `[depth][rank]`, given an accepted parent.
        times (`StepTimes`): seconds that steps take.
        limits (`AutoTree`): largest size of the tree.
        reach (`int`): largest number of nodes for which `times` is trusted.
        at_best (`bool`): whether the times are lowered by their errors; see `TimeTable.up_to`.
        widths (`Sequence[int]`): numbers of nodes to choose from, rising.
        is_drafting (`bool`): whether the draft has run, so that a step without a tree has the time of a level, too.
    """
    num_nodes = min(limits.max_nodes, reach)
    drafting = times.propose.up_to(limits.max_depth, at_best)
    checking = times.rest.up_to(num_nodes, at_best)
    least = checking[0] + (drafting[1] if is_drafting else 0.0)
    best_rate = 1.0 / least if least > 0 else 0.0
    paths: list[tuple[int, ...]] | None = None
    # Shallower trees use the same list without its deeper paths: it is twice as long, so that enough are left.
    likeliest = likeliest_paths(chances, 2 * num_nodes, limits.max_depth)
    for depth in range(1, limits.max_depth + 1):
        shallow = [item for item in likeliest if len(item[1]) <= depth][:num_nodes]
        expected = list(accumulate((chance for chance, _ in shallow), initial=1.0))
        for count in widths:
            if count <= len(shallow) and (rate := expected[count] / (drafting[depth] + checking[count])) > best_rate:
                best_rate, paths = rate, [path for _, path in shallow[:count]]
    return Plan(None if paths is None else TokenTree(paths), best_rate)


_times: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, dict[Hashable, Any]]] = (
    weakref.WeakKeyDictionary()
)


def times_of(target: Any, draft: Any, kind: Hashable, new: Callable[[], Any] = StepTimes) -> Any:
    """
    The step times shared by all calls of one target and draft (a model, or the type of a drafter without one), in one
    dtype, on one device with one number of threads, for one kind of step: a batch size, for example. They are freed
    with the target or the draft; `new` makes the times of a kind that has none yet.
    """
    of_target = _times.setdefault(target, weakref.WeakKeyDictionary())
    key = getattr(target, "dtype", None), getattr(target, "device", None), torch.get_num_threads(), kind
    return of_target.setdefault(draft, {}).setdefault(key, new())
