"""Choosing the draft tree of each request in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..trees import (
    AutoTree,
    DraftTree,
    DynamicTree,
    Evidence,
    TokenTree,
    TreeChoice,
    TreeSchedule,
    choice_of,
    remembered_of,
)
from ..trees.auto import times_of
from ..trees.auto_learning import Acceptances, Ratio
from ..trees.auto_menu import MenuChoice
from ..trees.menu_ways import MenuWays
from ..trees.told import Belief, Told
from ..trees.tree_menu import TreeMenu
from ..trees.whole_times import WholeTimes
from .request import Request


if TYPE_CHECKING:
    from .captured import DeviceSteps

Refine = Callable[[Mapping[int, Sequence[float]]], TokenTree | DynamicTree | None]


class TreeChoices:
    """
    Chooses the draft trees of a step. A fixed tree, or the entry of a `TreeSchedule` for the present text length,
    belongs to its request. Requests with `tree="auto"` share one choice, since they share the step's time: there is a
    choice for every batch size (by powers of two), while acceptance statistics are common to all batch sizes. Steps
    with any sampled request have choices and statistics of their own, because they take longer and accept less.

    Args:
        target, draft: the models whose step times are remembered under "auto"; see `choice_of`.
        max_step_nodes (`int`, *optional*): most draft tokens per step, shared equally among the rows.
        takes_few (`Callable`, *optional*): returns whether "auto" must choose from a short menu of trees, as where
            each tree needs a CUDA graph.
        evidence (`Callable`, *optional*): what the draft knows of requests before it proposes; see `Drafter.evidence`.
        captures (`DeviceSteps`, *optional*): says which trees need a capture, and how long that takes.
    """

    def __init__(
        self,
        target: Any,
        draft: Any,
        max_step_nodes: int | None,
        takes_few: Callable[[], bool] = lambda: False,
        evidence: Callable[[list[Request]], Evidence | None] = lambda requests: None,
        captures: DeviceSteps | None = None,
    ):
        self._evidence, self._captures = evidence, captures
        self._takes_few = takes_few
        self.target, self.draft, self.max_step_nodes = target, draft, max_step_nodes
        self._auto: dict[Any, TreeChoice] = {}
        self._ways: dict[Any, MenuWays] = {}
        self._with_best: dict[Any, set[TokenTree | DynamicTree]] = {}
        self._advantages: dict[Any, dict[DynamicTree, Ratio]] = {}
        self._is_warm = False
        self._acceptance: dict[tuple[AutoTree, bool], Acceptances] = {}
        self._asked: dict[AutoTree, list[int]] = {}
        self._share: int | None = None
        self._always: tuple[TokenTree | DynamicTree | None] | None = None
        self._kept_for: int | None = None
        self._own_times: dict[Any, WholeTimes] = {}

    def keep_captures_for(self, rows: int) -> None:
        """
        From now on captures are kept for later calls of up to `rows` rows, whose steps all have room for as many:
        "auto" tries all that may be worth a capture at first, and times hold for this engine's graphs alone.
        """
        self._kept_for = rows

    @contextmanager
    def always(self, tree: TokenTree | DynamicTree | None) -> Iterator[None]:
        """A context in which every request takes this tree, or none for None; "auto" still learns from these steps."""
        self._always = (tree,)
        try:
            yield
        finally:
            self._always = None
            self._advantages.clear()  # of which given trees and texts say nothing

    @property
    def are_given(self) -> bool:
        """Whether all requests take the same given tree for the time being; see `always`."""
        return self._always is not None

    def trees_of(self, request: Request) -> list[TokenTree | DynamicTree]:
        """Trees that a request may take: its own, all of its schedule, and those that "auto" chooses from."""
        tree = None if request.options.plan is None else request.options.plan.tree
        entries = [entry for _, entry in tree.entries] if isinstance(tree, TreeSchedule) else [tree]
        found: dict[Any, None] = {}
        for entry in entries:
            if isinstance(entry, AutoTree):
                found |= dict.fromkeys(TreeMenu(entry).trees)
            elif entry is not None:
                found[entry] = None
        return list(found)

    def forget_texts(self) -> None:
        """Forgets acceptance statistics. Step times are kept, because they belong to the machine and not to texts."""
        for of_texts in (self._auto, self._ways, self._acceptance, self._asked):
            of_texts.clear()

    def forget_captures(self) -> None:
        """Forgets step times that hold for this engine's graphs, which are gone."""
        if self._own_times:
            self._own_times.clear()
            self._auto.clear()

    def end_warm_up(self) -> None:
        """Takes note that every tree that is worth a capture has been timed."""
        self._is_warm = True
        for choice in self._auto.values():
            if isinstance(choice, MenuChoice):
                choice.times.are_complete = True

    def begin_step(self, requests: list[Request]) -> list[TokenTree | DynamicTree | None]:
        """Chooses the tree of every row of the step that begins; None for a row that drafts nothing."""
        self._batch_size = _bucket(len(requests)) if self._kept_for is None else self._kept_for
        self._asked = {}
        wanted = self._wanted = _shared([_wanted_tree(request) for request in requests])
        for row, tree in enumerate(wanted):
            if isinstance(tree, AutoTree):
                self._asked.setdefault(tree, []).append(row)
        asking = [requests[row] for rows in self._asked.values() for row in rows]
        self._draws = any(request.options.do_sample for request in asking)
        # Those that filter have other graphs; in flight they come and go.
        self._filters = self._kept_for is not None and any(request.options.filters for request in asking)
        longest = max((request.length for request in requests), default=0)
        share = self._share = None if self.max_step_nodes is None else self.max_step_nodes // max(len(requests), 1)
        for tree in self._asked:
            choice = self._auto_choice(tree)
            if isinstance(choice, MenuChoice):
                choice.most_nodes = share
                self._tell_of_captures(choice, requests)
        chosen = {tree: self._chosen(tree, requests, rows, longest) for tree, rows in self._asked.items()}
        trees = [chosen[tree] if isinstance(tree, AutoTree) else tree for tree in wanted]
        for asked in chosen:
            if self._always is None and (ways := self._ways_of(asked)) is not None:
                ways.begin_step(_tree_of_ways(self._auto_choice(asked)))
        if self._always is not None:
            trees = [self._always[0]] * len(trees)
        if share is None:
            return trees
        return [None if tree is None else _within(tree, share) for tree in trees]

    def _tell_of_captures(self, choice: MenuChoice, requests: list[Request]) -> None:
        if self._captures is None or self._kept_for is not None:
            return
        choice.ready = self._captures.ready_trees(requests)
        choice.seconds_of_capture = self._captures.seconds_of_capture

    def _chosen(
        self, tree: AutoTree, requests: list[Request], rows: list[int], longest: int
    ) -> TokenTree | DynamicTree | None:
        """The tree of the rows that ask for this "auto"."""
        choice, evidence = self._auto_choice(tree), None
        if choice.reads_evidence:
            evidence = self._evidence([requests[row] for row in rows])
        if evidence is not None:
            evidence = {rows[place]: chance for place, chance in evidence.items()}
        return choice.begin_step(longest, evidence)

    def takes_best(self, row: int) -> bool:
        """Whether a row's children are the draft's best tokens in this step, although its request draws them."""
        wanted = self._wanted[row]
        if not isinstance(wanted, AutoTree):
            return False
        ways = self._ways_of(wanted)
        return self._auto_choice(wanted).takes_best if ways is None else self._always is None and ways.takes_best

    def is_auto(self, row: int) -> bool:
        """Whether "auto" chooses the tree of a row of this step."""
        return isinstance(self._wanted[row], AutoTree)

    def auto_of(self, row: int) -> AutoTree | None:
        """The "auto" of a row of this step that reads what the draft tells, see `refiner`, `belief_of`; else None."""
        wanted = self._wanted[row]
        if not isinstance(wanted, AutoTree):
            return None
        choice = self._auto_choice(wanted)
        if self._always is not None and not (isinstance(choice, MenuChoice) and self._always[0] in choice.menu.trees):
            return None
        return wanted if choice.reads_confidence else None

    def belief_of(self, tree: AutoTree) -> Callable[[], Belief] | None:
        """
        How captured steps read what a draft tells of rows that ask for this "auto"; None where `refiner` reads it.
        """
        choice = self._auto_choice(tree)
        return choice.belief if isinstance(choice, MenuChoice) else None

    def refiner(self, tree: AutoTree, rows: list[int], most_nodes: int) -> Refine:
        """
        Chooses the tree of these rows of the step again from what their draft tells, of at most `most_nodes` nodes
        and the rows' share of `max_step_nodes`; see `TreeChoice.refine`.
        """
        choice = self._auto_choice(tree)
        most = most_nodes if self._share is None else min(most_nodes, self._share)

        def refine(told: Mapping[int, Sequence[float]]) -> TokenTree | DynamicTree | None:
            refined = choice.refine({rows[place]: its for place, its in told.items()}, most)
            # The choice may stay with its own tree, which is not cut to what the step has room for.
            return None if refined is None else _within(refined, most)

        return refine

    def begin_next(self, requests: list[Request]) -> bool:
        """
        Begins a step of the same requests with the same trees, before the last step has ended. Returns False if a
        request may take another tree: the next step must be begun by `begin_step`.
        """
        if any(_may_change(request) for request in requests):
            return False
        return all(self._begins_next(tree) for tree in self._asked)

    def _begins_next(self, asked: AutoTree) -> bool:
        choice, ways = self._auto_choice(asked), self._ways_of(asked)
        return choice.begin_next() and (ways is None or ways.begin_next(_tree_of_ways(choice)))

    def end_step(self, draft: DraftTree, paths: list[list[int] | None], propose: float, rest: float) -> None:
        """Lets "auto" learn from the step that `begin_step` began, all rows included; see `TreeChoice.end_step`."""
        for tree, rows in self._asked.items():
            asked = set(rows)
            own = [path if row in asked else None for row, path in enumerate(paths)]
            self._auto_choice(tree).end_step(draft, own, propose, rest)

    def end_device_step(
        self,
        trees: dict[int, Any],
        paths: list[list[int] | None],
        seconds: float | None,
        only_read: bool = False,
        was_put_off: bool = False,
        told: Mapping[int, Told] = MappingProxyType({}),
    ) -> None:
        """
        Lets "auto" learn from a step that ran on the device as a whole. (Rows with fixed trees add the same time to
        the step whatever "auto" chooses.)

        Args:
            trees (`dict[int, TokenTree or DynamicTree]`): the tree by row; rows without one are missing.
            paths (`list`): the accepted nodes of every row; None for a row without a draft or without a result, as one
                without room, which does not count as a rejection.
            seconds (`float`, *optional*): duration of the step; None if it was not measured or is no typical time.
            only_read (`bool`): whether an EAGLE head read waiting features in the step for later trees.
            was_put_off (`bool`): whether rows lost their trees in this step because the head had to read first.
            told (`Mapping[int, Told]`): by row what the draft told of its acceptance.
        """
        for asked, rows in self._asked.items():
            drafted = [row for row in rows if row in trees]
            choice = self._auto_choice(asked)
            if isinstance(choice, MenuChoice):
                tree = trees[drafted[0]] if drafted else None
                if not isinstance(tree, DynamicTree) or tree in choice.menu.trees:  # as in a warm-up with a schedule
                    its = [told[row] for row in drafted if row in told and paths[row] is not None]
                    ways = self._ways_of(asked)
                    if ways is not None:
                        choice.acceptance = ways.present
                    choice.end_whole_step(tree, [paths[row] for row in drafted], seconds, only_read, its)
                    if ways is not None:
                        choice.acceptance = ways.planned
                    if was_put_off and not drafted:
                        choice.put_off()

    def _ways_of(self, tree: AutoTree) -> MenuWays | None:
        """What says how captured steps fill the trees of rows that ask for this "auto", if there is a choice."""
        if not (tree.takes_either and self._draws and self._takes_few()):
            return None
        key = tree, self._batch_size
        if key not in self._ways:
            acceptance = self._acceptance_of(tree)
            with_best = self._with_best.setdefault(key, set())
            choice = self._auto_choice(tree)
            is_complete = isinstance(choice, MenuChoice) and choice.times.are_complete
            self._ways[key] = MenuWays(acceptance, with_best, may_capture=not (self._is_warm or is_complete))
        return self._ways[key]

    def _acceptance_of(self, tree: AutoTree) -> Acceptances:
        key = replace(tree, takes_either=False), self._draws
        if key not in self._acceptance:
            by_host = not self._takes_few()
            remembered = remembered_of(self.target, self.draft, self._draws) if by_host else None
            self._acceptance[key] = Acceptances(tree, remembered)
        return self._acceptance[key]

    def _auto_choice(self, tree: AutoTree) -> TreeChoice:
        takes_few = self._takes_few()
        kind: Any = ("in flight", self._batch_size, "filtered" if self._filters else self._draws)
        if takes_few:  # which `_ways_of` fills in either way
            tree = replace(tree, takes_either=False)
        if (tree, kind, takes_few) not in self._auto:
            acceptance = self._acceptance_of(tree)
            if takes_few:
                is_kept = self._kept_for is not None
                times = self._own_times.setdefault(kind, WholeTimes()) if is_kept else self._shared_times(kind)
                advantages = self._advantages.setdefault((tree, self._draws), {})
                choice: Any = MenuChoice(times, tree, acceptance.of(), is_kept, advantages)
            else:
                choice = choice_of(tree, self.target, self.draft, kind)
                choice.acceptance = acceptance
            self._auto[tree, kind, takes_few] = choice
        return self._auto[tree, kind, takes_few]

    def _shared_times(self, kind: Any) -> WholeTimes:
        times: WholeTimes = times_of(self.target, self.draft, (kind, "whole"), WholeTimes)
        return times


def _tree_of_ways(choice: TreeChoice) -> TokenTree | DynamicTree | None:
    """The tree of the present step for which `MenuWays` choose; none in an exploration, which draws."""
    return None if isinstance(choice, MenuChoice) and choice.explores else choice.tree


def _bucket(batch_size: int) -> int:
    """The smallest power of two that is not below `batch_size`."""
    return 1 << max(batch_size - 1, 0).bit_length()


def _wanted_tree(request: Request) -> Any:
    """The tree, or "auto", that a request asks for at its present length; None if it does not speculate."""
    tree = None if request.options.plan is None else request.options.plan.tree
    if not isinstance(tree, TreeSchedule):
        return tree
    return [entry for start, entry in tree.entries if start <= request.length][-1]


def _shared(wanted: list[Any]) -> list[Any]:
    """The trees that requests ask for, with one "auto" for those that draw and those that do not."""
    greedy = {tree for tree in wanted if isinstance(tree, AutoTree) and not tree.takes_either}
    if not greedy:
        return wanted
    plain = [replace(tree, takes_either=False) if isinstance(tree, AutoTree) else tree for tree in wanted]
    return [other if other in greedy else tree for tree, other in zip(wanted, plain, strict=True)]


def _may_change(request: Request) -> bool:
    """Whether a schedule has another tree for a longer text of the request."""
    tree = None if request.options.plan is None else request.options.plan.tree
    return isinstance(tree, TreeSchedule) and request.length < tree.entries[-1][0]


@lru_cache(maxsize=256)
def _within(tree: TokenTree | DynamicTree, num_nodes: int) -> TokenTree | DynamicTree | None:
    """A tree cut to `num_nodes`: the first nodes of a static tree in level order, or a smaller dynamic tree."""
    if num_nodes == 0 or tree.num_nodes <= num_nodes:
        return tree if num_nodes else None
    if isinstance(tree, DynamicTree):
        return DynamicTree(depth=tree.depth, top_k=tree.top_k, num_nodes=num_nodes)
    return TokenTree(tree.paths[:num_nodes])
