"""Warm-up: capturing an engine's CUDA graphs, the first before requests come, the others in spare time."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..engine.capture_plan import CapturePlan
from ..engine.captured.ahead import Ahead, PromptsAhead, StepAhead
from ..engine.captured.stored import PATIENCE
from ..engine.request import Request, RequestStatus
from ..graphs import end_compilation, reason_of
from ..trees import DynamicTree, TokenTree
from ..trees.capture_budget import CaptureBudget


if TYPE_CHECKING:
    from ..engine.engine import Engine

STEPS = 4
"""Most steps that dummy requests run."""
SHARE_OF_TIME = 0.01
"""Share of the time of steps for which open requests may have waited for captures."""
NUM_RECENT = 16
"""Captures the longest of which the next one is expected to take: one that compiles takes many times as long."""
COMPILES_AHEAD = {"cuda"}
"""Types of devices for which kernels are compiled."""
PROMPTS_THAT_WAIT = 4
"""Prompt chunks without a graph of their own after which one is captured before others."""


class WarmUp:
    """
    Captures the graphs of an engine; to be called by the thread that runs it.

    Args:
        engine (`Engine`): the engine.
        new_requests (`Callable`): makes dummy requests that end after some steps; takes their number and `do_sample`.
        goes_on (`Callable`, *optional*): called before every capture of the first part, which ends when it returns
            False.
        at_once (`bool`): whether the first part has all graphs, and nothing is left for spare time; so it is if ranks
            run a target together, which would have spare time at different times.
    """

    def __init__(
        self,
        engine: Engine,
        new_requests: Callable[[int, bool], list[Request]],
        goes_on: Callable[[], bool] = lambda: True,
        at_once: bool = False,
    ):
        self._engine, self._new_requests, self._goes_on = engine, new_requests, goes_on
        self._at_once = at_once or engine.ranks.are_several
        self._left: list[Ahead] = []
        self._plan: list[Ahead] = []
        """All graphs that are planned, also those that have been captured."""
        self._num_drops = engine.device_steps.num_drops
        self._beside_requests = CaptureBudget(share=SHARE_OF_TIME)
        """For captures for which open requests wait: a share of the time of steps since the first part."""
        self._recent = deque[float](maxlen=NUM_RECENT)
        """Seconds of the last captures."""

    @property
    def num_left(self) -> int:
        """Number of graphs that are planned and not captured yet."""
        return len(self._left)

    def run(self) -> None:
        """
        Captures the first part, after which steps with any number of requests capture nothing. Of dummy requests
        nothing stays: the engine's counts are reset as well.
        """
        engine, steps = self._engine, self._engine.device_steps
        if not steps.works:
            return
        try:
            with engine.prefixes.resting():
                plan = CapturePlan(engine, self._new_requests)
                self._run(self._new_requests(1, True), plan.main_tree(1))  # with which the memory for K/V comes
                steps.rely_on_larger()
                first, later = list(plan.first()), list(plan.later())
                self._left = _distinct([*first, *later])
                self._plan, self._num_drops = list(self._left), steps.num_drops
                most_left = 0 if self._at_once else len(self._left) - len(_distinct(first))
                self._compile_kernels(self._left[: len(self._left) - most_left])
                while len(self._left) > most_left and steps.works:
                    if not self._goes_on():
                        return
                    self._capture(self._left[0])
                    del self._left[0]
                self._run_dummies(plan)
        finally:
            end_compilation()
            engine.reset_counts()
            engine.forget_temperatures()
            engine.choices.forget_texts()
            engine.choices.autos.end_warm_up(are_all_timed=not self._left)
            self._beside_requests.time = 0.0

    def _compile_kernels(self, plan: list[Ahead]) -> None:
        """
        Begins to compile the kernels of all these steps beside each other: each capture would else wait for the few
        of its own. What fails, or ranks would meet at different times, is left to the captures.
        """
        engine, steps = self._engine, self._engine.device_steps
        if engine.model.device.type not in COMPILES_AHEAD or engine.ranks.are_several:
            return
        for ahead in plan:
            if self._goes_on() and not ahead.is_there(steps):
                with suppress(Exception):
                    ahead.compile_kernels(steps)

    def _run_dummies(self, plan: CapturePlan) -> None:
        """
        Runs steps whose drafts have forwards of their own, which are captured one by one, for the sizes of the plan.
        """
        if self._engine.drafting.features is not None:
            return
        for rows in plan.ladder:
            if not self._goes_on():
                return
            number = min(rows, self._engine.scheduler.max_requests)
            self._run(self._new_requests(number, False), plan.main_tree(number))

    def _run(self, requests: list[Request], tree: TokenTree | DynamicTree | None) -> None:
        """Runs dummy requests for at most `STEPS` steps with a tree, and removes them."""
        with self._engine.choices.always(tree):
            self._run_given(requests)

    def _run_given(self, requests: list[Request]) -> None:
        engine = self._engine
        scheduler, drafting, first = engine.scheduler, engine.drafting, engine.num_steps
        for request in requests:
            scheduler.add(request)
        while scheduler.has_work and engine.num_steps < first + STEPS:
            for request in chain.from_iterable(engine.step()):
                if request.is_over:
                    engine.end(request)
        if drafting.can_be_captured and drafting.features is None:  # a draft model catches up by forwards of its own
            drafting.catch_up([one for one in scheduler.decoding if drafting.knows(one)], 1)
        for request in requests:
            if not request.is_over:
                engine.end(request)

    def _capture(self, ahead: Ahead) -> None:
        """Captures one graph of the first part; a failure ends captures, as in a step, or compilation alone."""
        steps = self._engine.device_steps
        if ahead.is_there(steps):
            return
        try:
            began, compiles_for_all = time.perf_counter(), steps.compiles and not steps.num_captures
            self._take_times(ahead, ahead.capture(steps))
            if not compiles_for_all:
                self._recent.append(time.perf_counter() - began)
        except Exception as error:  # for whatever reason: requests run in other graphs, or by the host
            compiled = steps.compiles
            steps.note_failure(error, compiled, isinstance(ahead, StepAhead))
            if compiled and steps.works:
                self._capture(ahead)

    def _take_times(self, ahead: Ahead, seconds: list[float]) -> None:
        """Lets "auto" know how long steps take in a graph, with any number of rows for which it serves at first."""
        if isinstance(ahead, StepAhead) and seconds:
            self._engine.choices.autos.note_times(ahead.key, ahead.fewest, seconds)

    # ---------------------------------------------------------------------------------------------------- spare time

    def use_spare_time(self, seconds: float) -> bool:
        """
        Captures one graph, if there is time for it: no request waits for its first token, and those that are open have
        waited little for captures. Returns whether it did. If a capture fails, it is the last one: the graphs that
        there are go on serving.

        Args:
            seconds (`float`): seconds that steps have taken since the last call.
        """
        self._beside_requests.time += seconds
        ahead = self._next()
        if ahead is None:
            return False
        engine, began, is_idle = self._engine, time.perf_counter(), not self._engine.scheduler.has_work
        try:
            self._take_times(ahead, ahead.capture(engine.device_steps))
            self._left = [one for one in self._left if not one.is_there(engine.device_steps)]
        except Exception as error:  # whatever it is, requests go on
            self._left.clear()
            self._at_once = True
            warnings.warn(
                f"A CUDA graph could not be captured in spare time. Requests run in the graphs that there are, and no "
                f"more are captured: {reason_of(error)}",
                stacklevel=2,
            )
        engine.last_end = None  # the next step is no measure
        self._recent.append(time.perf_counter() - began)
        if not is_idle:
            self._beside_requests.spent_on_trials += self._recent[-1]
        if not self._left:
            engine.choices.autos.end_warm_up(are_all_timed=True)
        return True

    def _next(self) -> Ahead | None:
        """What to capture now: what requests have wanted most, or else the next of the plan."""
        engine, steps = self._engine, self._engine.device_steps
        if self._at_once or not steps.works or not steps.stored.are_ahead:
            return None
        if engine.scheduler.has_work and not self._may_wait:
            return None
        if self._num_drops != steps.num_drops:  # weights have moved, or there are other adapters
            self._left, self._num_drops = list(self._plan), steps.num_drops
        wanted = next(self._wanted(), None)
        if wanted is not None:
            return wanted
        while self._left and self._left[0].is_there(steps):
            del self._left[0]
        return self._left[0] if self._left else None

    @property
    def _may_wait(self) -> bool:
        """Whether the open requests may wait for a capture."""
        scheduler = self._engine.scheduler
        if scheduler.waiting or any(request.status != RequestStatus.DECODING for request in scheduler.active):
            return False
        budget = self._beside_requests
        budget.cost = max(self._recent, default=self._engine.device_steps.budget.cost)
        return budget.allows()

    def _wanted(self) -> Iterator[Ahead]:
        """What requests had to do without, have wanted often, and can have."""
        steps, autos = self._engine.device_steps, self._engine.choices.autos
        for number, key in steps.stored.wanted:
            if number < PATIENCE:
                break
            if key.kind.tree is None or key.kind in steps.draft_requests:
                is_timed = autos.has_times(key)
                ahead = StepAhead(key, steps.draft_requests.get(key.kind), key.size.rows, is_timed)
                if not ahead.is_there(steps):  # as one that was wanted before its compilation failed
                    yield ahead
        for number, prompts in steps.prompts.stored.wanted:
            if number >= PROMPTS_THAT_WAIT:
                yield PromptsAhead(prompts)


def _distinct(plan: list[Ahead]) -> list[Ahead]:
    """The plan without what it has named before."""
    found = dict[Any, Ahead]()
    for ahead in plan:
        found.setdefault(ahead.key, ahead)
    return list(found.values())
