"""Choosing the draft tree of each request in a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from ..trees import AutoTree, DraftTree, DynamicTree, Evidence, TokenTree, TreeChoice, TreeSchedule
from ..trees.candidate_choice import CandidateChoice
from ..trees.candidate_trees import CandidateTrees
from ..trees.candidate_ways import CandidateWays
from ..trees.confidence import Calibration, RowOutcome
from .auto_choices import AutoChoices
from .request import Request
from .wanted_trees import may_change, shared, wanted_tree, within


if TYPE_CHECKING:
    from .captured import DeviceSteps

Refine = Callable[[Mapping[int, Sequence[float]]], TokenTree | DynamicTree | None]


class TreeChoices:
    """
    Chooses the draft trees of a step. A fixed tree, or the entry of a `TreeSchedule` for the present text length,
    belongs to its request; those with `tree="auto"` share a choice of `autos`.

    Args:
        target, draft, takes_few: see `AutoChoices`.
        max_step_nodes (`int`, *optional*): most draft tokens per step, shared equally among the rows.
        evidence (`Callable`, *optional*): what the draft knows of requests before it proposes; see `Drafter.evidence`.
        captures (`DeviceSteps`, *optional*): says which trees need a capture, and how long that takes.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: Hashable,
        max_step_nodes: int | None,
        takes_few: Callable[[], bool] = lambda: False,
        evidence: Callable[[list[Request]], Evidence | None] = lambda requests: None,
        captures: DeviceSteps | None = None,
    ):
        self._evidence, self._captures = evidence, captures
        self.max_step_nodes = max_step_nodes
        self.autos = AutoChoices(target, draft, takes_few)
        self._rows_of: dict[AutoTree, list[int]] = {}
        """The rows of the present step that ask for each "auto"."""
        self._scheduled: list[int] = []
        """The rows of the present step whose tree comes from a schedule."""
        self._share: int | None = None
        self._always: tuple[TokenTree | DynamicTree | None] | None = None

    @contextmanager
    def always(self, tree: TokenTree | DynamicTree | None) -> Iterator[None]:
        """A context in which every request takes this tree, or none for None; "auto" still learns from these steps."""
        self._always = (tree,)
        try:
            with self.autos.keeping_advantages():  # of which given trees and texts say nothing
                yield
        finally:
            self._always = None

    @property
    def are_given(self) -> bool:
        """Whether all requests take the same given tree for the time being; see `always`."""
        return self._always is not None

    @property
    def are_learning(self) -> bool:
        """Whether "auto" chooses for any row of the present step, and learns from it."""
        return bool(self._rows_of)

    def trees_of(self, request: Request) -> list[TokenTree | DynamicTree]:
        """Trees that a request may take: its own, all of its schedule, and those that "auto" chooses from."""
        tree = None if request.options.plan is None else request.options.plan.tree
        entries = [entry for _, entry in tree.entries] if isinstance(tree, TreeSchedule) else [tree]
        found: dict[Any, None] = {}
        for entry in entries:
            if isinstance(entry, AutoTree):
                found |= dict.fromkeys(CandidateTrees(entry).trees)
            elif entry is not None:
                found[entry] = None
        return list(found)

    def forget_texts(self) -> None:
        """Forgets acceptance statistics; see `AutoChoices.forget_texts`."""
        self._rows_of.clear()
        self.autos.forget_texts()

    def begin_step(self, requests: list[Request]) -> list[TokenTree | DynamicTree | None]:
        """Chooses the tree of every row of the step that begins; None for a row that drafts nothing."""
        self._rows_of = {}
        plans = [request.options.plan for request in requests]
        self._scheduled = [
            row for row, plan in enumerate(plans) if plan is not None and isinstance(plan.tree, TreeSchedule)
        ]
        wanted = self._wanted = shared([wanted_tree(request) for request in requests])
        for row, tree in enumerate(wanted):
            if isinstance(tree, AutoTree):
                self._rows_of.setdefault(tree, []).append(row)
        asking = [requests[row] for rows in self._rows_of.values() for row in rows]
        self.autos.begin_step(len(requests), asking)
        longest = max((request.length for request in requests), default=0)
        share = self._share = None if self.max_step_nodes is None else self.max_step_nodes // max(len(requests), 1)
        for tree in self._rows_of:
            choice = self.autos.of(tree)
            if isinstance(choice, CandidateChoice):
                choice.most_nodes = share
                self._tell_of_captures(choice, self.autos.ways_of(tree), requests)
        chosen = {tree: self._chosen(tree, requests, rows, longest) for tree, rows in self._rows_of.items()}
        trees = [chosen[tree] if isinstance(tree, AutoTree) else tree for tree in wanted]
        for auto in chosen:
            if self._always is None and (ways := self.autos.ways_of(auto)) is not None:
                ways.begin_step(_tree_of_ways(self.autos.of(auto)))
        if self._always is not None:
            trees = [self._always[0]] * len(trees)
        if share is None:
            return trees
        return [None if tree is None else within(tree, share) for tree in trees]

    def _tell_of_captures(self, choice: CandidateChoice, ways: CandidateWays | None, requests: list[Request]) -> None:
        if self._captures is None:
            return
        choice.ready = self._captures.ready_trees(requests)
        choice.captures = self._captures.budget
        if ways is not None:
            ways.captures = self._captures.budget

    def _chosen(
        self, tree: AutoTree, requests: list[Request], rows: list[int], longest: int
    ) -> TokenTree | DynamicTree | None:
        """The tree of the rows that ask for this "auto"."""
        choice, evidence = self.autos.of(tree), None
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
        ways = self.autos.ways_of(wanted)
        return self.autos.of(wanted).takes_best if ways is None else self._always is None and ways.takes_best

    def is_auto(self, row: int) -> bool:
        """Whether "auto" chooses the tree of a row of this step."""
        return isinstance(self._wanted[row], AutoTree)

    def auto_of(self, row: int) -> AutoTree | None:
        """The "auto" of a row of this step that reads the draft's confidence, see `refiner`; else None."""
        wanted = self._wanted[row]
        if not isinstance(wanted, AutoTree):
            return None
        choice = self.autos.of(wanted)
        if self._always is not None:
            candidates = choice.candidates if isinstance(choice, CandidateChoice) else ()
            if self._always[0] not in candidates:
                return None
        return wanted if choice.reads_confidence else None

    def calibration_of(self, tree: AutoTree) -> Callable[[], Calibration] | None:
        """
        How captured steps read a draft's confidence of rows that ask for this "auto"; None where `refiner` reads it.
        """
        choice = self.autos.of(tree)
        return choice.learning.calibration if isinstance(choice, CandidateChoice) else None

    def refiner(self, tree: AutoTree, rows: list[int], most_nodes: int) -> Refine:
        """
        Chooses the tree of these rows of the step again from their draft's confidence, of at most `most_nodes` nodes
        and the rows' share of `max_step_nodes`; see `TreeChoice.refine`.
        """
        choice = self.autos.of(tree)
        most = most_nodes if self._share is None else min(most_nodes, self._share)

        def refine(confidences: Mapping[int, Sequence[float]]) -> TokenTree | DynamicTree | None:
            refined = choice.refine({rows[place]: its for place, its in confidences.items()}, most)
            # The choice may stay with its own tree, which is not cut to what the step has room for.
            return None if refined is None else within(refined, most)

        return refine

    def begin_next(self, requests: list[Request]) -> bool:
        """
        Begins a step of the same requests with the same trees, before the last step has ended. Returns False if a
        request may take another tree: the next step must be begun by `begin_step`.
        """
        if any(may_change(requests[row]) for row in self._scheduled):
            return False
        return all(self._begins_next(tree) for tree in self._rows_of)

    def _begins_next(self, auto: AutoTree) -> bool:
        choice, ways = self.autos.of(auto), self.autos.ways_of(auto)
        return choice.begin_next() and (ways is None or ways.begin_next(_tree_of_ways(choice)))

    def end_step(self, draft: DraftTree, paths: list[list[int] | None], propose: float, rest: float) -> None:
        """Lets "auto" learn from the step that `begin_step` began, all rows included; see `TreeChoice.end_step`."""
        for tree, rows in self._rows_of.items():
            asking = set(rows)
            own = [path if row in asking else None for row, path in enumerate(paths)]
            self.autos.of(tree).end_step(draft, own, propose, rest)

    def end_device_step(
        self,
        trees: dict[int, Any],
        paths: list[list[int] | None],
        seconds: float | None,
        only_read: bool = False,
        was_deferred: bool = False,
        row_outcomes: Mapping[int, RowOutcome] = MappingProxyType({}),
    ) -> None:
        """
        Lets "auto" learn from a step that ran on the device as a whole. (Rows with fixed trees add the same time to
        the step whatever "auto" chooses.)

        Args:
            trees (`dict[int, TokenTree or DynamicTree]`): the tree by row; rows without one are missing.
            paths (`list`): the accepted nodes of every row; None for a row without a draft or without a result, as one
                without room, which does not count as a rejection.
            seconds (`float`, *optional*): duration of the step; None if it was not measured or is no typical time.
            only_read (`bool`): whether an EAGLE head read pending features in the step for later trees.
            was_deferred (`bool`): whether rows lost their trees in this step because the head had to read first.
            row_outcomes (`Mapping[int, RowOutcome]`): by row the draft's confidence.
        """
        for auto, rows in self._rows_of.items():
            drafted = [row for row in rows if row in trees]
            choice = self.autos.of(auto)
            if isinstance(choice, CandidateChoice):
                tree = trees[drafted[0]] if drafted else None
                if not isinstance(tree, DynamicTree) or tree in choice.candidates:  # as in a warm-up with a schedule
                    its = [row_outcomes[row] for row in drafted if row in row_outcomes and paths[row] is not None]
                    ways = self.autos.ways_of(auto)
                    if ways is not None:
                        choice.learning.acceptance = ways.present
                    choice.end_whole_step(tree, [paths[row] for row in drafted], seconds, only_read, its)
                    if ways is not None:
                        choice.learning.acceptance = ways.planned
                    if was_deferred and not drafted:
                        choice.defer()


def _tree_of_ways(choice: TreeChoice) -> TokenTree | DynamicTree | None:
    """The tree of the present step for which `CandidateWays` choose; none in an exploration, which draws."""
    return None if isinstance(choice, CandidateChoice) and choice.explores else choice.tree
