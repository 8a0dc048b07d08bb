"""The choices of `tree="auto"` that requests share, and what is remembered for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from ..trees import AutoTree, DynamicTree, TokenTree, TreeChoice, choice_of, remembered_of
from ..trees.auto import times_of
from ..trees.auto_learning import Acceptances, Ratio
from ..trees.candidate_choice import CandidateChoice
from ..trees.candidate_ways import CandidateWays
from ..trees.whole_times import WholeTimes
from .request import Request


if TYPE_CHECKING:
    from .captured.keys import StepKey


class AutoChoices:
    """
    Requests with `tree="auto"` share one choice, since they share the step's time: there is a choice for every batch
    size (by powers of two), while acceptance statistics are common to all batch sizes. Steps with any sampled request
    have choices and statistics of their own, because they take longer and accept less.

    Args:
        target, draft: the models whose step times are remembered; see `choice_of`.
        takes_few (`Callable`): returns whether "auto" must choose from a few candidate trees, as where each tree needs
            a CUDA graph.
    """

    def __init__(self, target: PreTrainedModel, draft: Hashable, takes_few: Callable[[], bool]):
        self.target, self.draft, self._takes_few = target, draft, takes_few
        self._auto: dict[Any, TreeChoice] = {}
        self._ways: dict[Any, CandidateWays] = {}
        self._with_best: dict[Any, set[TokenTree | DynamicTree]] = {}
        self._advantages: dict[Any, dict[DynamicTree, Ratio]] = {}
        self._acceptance: dict[tuple[AutoTree, bool], Acceptances] = {}
        self._own_times: dict[Any, WholeTimes] = {}
        self._is_warm = False
        self._timed_ahead: set[Any] = set()
        self._kept_for: int | None = None

    def keep_captures_for(self, rows: int) -> None:
        """
        From now on captures are kept for later calls of up to `rows` rows, whose steps all have room for as many:
        times hold for this engine's graphs alone.
        """
        self._kept_for = rows

    def forget_texts(self) -> None:
        """Forgets acceptance statistics. Step times are kept, because they belong to the machine and not to texts."""
        for of_texts in (self._auto, self._ways, self._acceptance):
            of_texts.clear()

    def forget_captures(self) -> None:
        """Forgets step times that hold for this engine's graphs, which are gone."""
        for of_graphs in (self._with_best, self._ways):
            of_graphs.clear()
        if self._own_times:
            self._own_times.clear()
            self._auto.clear()

    def note_times(self, key: StepKey, fewest: int, seconds: Sequence[float]) -> None:
        """
        Takes the seconds of runs of a step that was captured ahead as those of steps with `fewest` requests and more,
        as many as it has rows.
        """
        number = 1 << (fewest - 1).bit_length()
        while number < 2 * key.size.rows:
            for draws in self._draws_of(key):
                kind = ("in flight", number, draws)
                self._timed_ahead.add(kind)
                for one in seconds:
                    self._shared_times(kind).add(key.kind.tree, one)
            number *= 2

    def has_times(self, key: StepKey) -> bool:
        """Whether steps with as many requests as a step has rows were timed ahead."""
        number = 1 << (key.size.rows - 1).bit_length()
        return any(("in flight", number, draws) in self._timed_ahead for draws in self._draws_of(key))

    @staticmethod
    def _draws_of(key: StepKey) -> list[bool]:
        """Whether requests are sampled that run in a step; both where it serves both."""
        is_mixed = len(key.kind.kinds) > 1
        return [is_mixed] if key.kind.tree is not None or not is_mixed else [False, True]

    def end_warm_up(self, are_all_timed: bool) -> None:
        """Takes note that trees are captured ahead alone, and whether all that are worth it have been timed."""
        self._is_warm = True
        if are_all_timed:
            for kind in self._timed_ahead:
                self._shared_times(kind).are_complete = True
            for choice in self._auto.values():
                if isinstance(choice, CandidateChoice):
                    choice.times.are_complete = True

    @contextmanager
    def keeping_advantages(self) -> Iterator[None]:
        """A context in which nothing is learnt of what dynamic trees give beyond static ones."""
        advantages = copy.deepcopy(self._advantages)
        try:
            yield
        finally:
            self._advantages = advantages

    def begin_step(self, num_requests: int, asking: list[Request]) -> None:
        """
        Begins a step of so many requests, of which `asking` ask for "auto": `of` and `ways_of` are its own from now
        on.
        """
        # The smallest power of two that is not below it.
        self._batch_size = 1 << max(num_requests - 1, 0).bit_length() if self._kept_for is None else self._kept_for
        self._draws = any(request.options.do_sample for request in asking)
        # Those that filter have other graphs; in flight they come and go.
        self._filters = self._kept_for is not None and any(request.options.filters for request in asking)

    def of(self, tree: AutoTree) -> TreeChoice:
        takes_few = self._takes_few()
        kind: Any = ("in flight", self._batch_size, "filtered" if self._filters else self._draws)
        if takes_few:  # which `ways_of` fills in either way
            tree = replace(tree, takes_either=False)
        if (tree, kind, takes_few) not in self._auto:
            acceptance = self._acceptance_of(tree)
            if takes_few:
                is_kept = self._kept_for is not None
                times = self._own_times.setdefault(kind, WholeTimes()) if is_kept else self._shared_times(kind)
                advantages = self._advantages.setdefault((tree, self._draws), {})
                choice: Any = CandidateChoice(times, tree, acceptance.of(), is_kept, advantages)
            else:
                choice = choice_of(tree, self.target, self.draft, kind)
                choice.acceptance = acceptance
            self._auto[tree, kind, takes_few] = choice
        return self._auto[tree, kind, takes_few]

    def ways_of(self, tree: AutoTree) -> CandidateWays | None:
        """What says how captured steps fill the trees of rows that ask for this "auto", if there is a choice."""
        if not (tree.takes_either and self._draws and self._takes_few()):
            return None
        key = tree, self._batch_size
        if key not in self._ways:
            acceptance = self._acceptance_of(tree)
            with_best = self._with_best.setdefault(key, set())
            self._ways[key] = CandidateWays(acceptance, with_best, was_tried=bool(with_best))
            self._ways[key].may_capture = not self._is_warm
        return self._ways[key]

    def _acceptance_of(self, tree: AutoTree) -> Acceptances:
        key = replace(tree, takes_either=False), self._draws
        if key not in self._acceptance:
            by_host = not self._takes_few()
            remembered = remembered_of(self.target, self.draft, self._draws) if by_host else None
            self._acceptance[key] = Acceptances(tree, remembered)
        return self._acceptance[key]

    def _shared_times(self, kind: Any) -> WholeTimes:
        times: WholeTimes = times_of(self.target, self.draft, (kind, "whole"), WholeTimes)
        return times
