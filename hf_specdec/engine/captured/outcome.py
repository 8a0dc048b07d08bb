"""What comes of a captured step, as its report says, and what requests, caches and counts get of it."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...trees.confidence import RowOutcome
from ...verification import NAN_LOGITS, DraftTemperature, Walk
from ...verification.choosing import NOTHING_TO_CHOOSE
from .drawing import mean_overlaps
from .grammars import constrained
from .parts import DraftGroup, StepPart
from .reshaping import num_columns, read_row_outcome
from .verdicts import NOTHING_TO_DRAW


if TYPE_CHECKING:
    from ...verification.log_probabilities import TokenLogprob
    from ..engine import Engine
    from ..request import Request


@dataclass
class Outcome:
    """
    Result of a captured step.

    Args:
        walk (`Walk`): accepted nodes and new tokens of all rows, not yet appended to the requests.
        drafted (`dict[int, int]`): number of valid draft tokens, by row, of the rows that were drafted for.
        features (`list`): pairs of row numbers and the target's recorded features of the root and the accepted nodes,
            `[rows, tokens, size]`; empty if features went directly to the draft's store (`Drafting.features`).
        errors (`dict`): errors of the rows that fail after their tokens: messages, or exceptions that their own
            options have raised.
        spoiled (`dict[int, int]`): rows from which nothing is taken, see `rows_with_nan`, and their numbers of draft
            tokens.
        left_out (`set[int]`): rows from which nothing is taken: their requests were over before the report came, or
            were spoiled in the run before it.
        left_with_nan (`set[int]`): those of them whose K/V may have NaN now.
        launched_at (`float`), came_at (`float`): when the step was launched, and when its last report had come
            (`time.perf_counter`).
        captured (`bool`): whether a graph was captured first, which takes long.
        only_read (`bool`): whether an EAGLE head read pending features in the step for later trees.
        was_deferred (`bool`): whether rows lost their trees in this step because the head had to read first.
        row_outcomes (`dict[int, RowOutcome]`): by row the draft's confidence, and what came of it, where the step's
            own choice of nodes makes this worth a report.
        learnt (`set[DraftTemperature]`): draft temperatures that have taken this step into account.
        logprobs (`dict[int, list[TokenLogprob]]`): by row, those of the tokens of requests that ask for them.
    """

    walk: Walk
    drafted: dict[int, int] = field(default_factory=dict)
    features: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)
    errors: dict[int, str | Exception] = field(default_factory=dict)
    spoiled: dict[int, int] = field(default_factory=dict)
    left_out: set[int] = field(default_factory=set)
    left_with_nan: set[int] = field(default_factory=set)
    launched_at: float = 0.0
    came_at: float = 0.0
    captured: bool = False
    only_read: bool = False
    was_deferred: bool = False
    row_outcomes: dict[int, RowOutcome] = field(default_factory=dict)
    learnt: set[DraftTemperature] = field(default_factory=set)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)

    @classmethod
    def of_rows(cls, count: int, left_out: Collection[int] = (), launched_at: float = 0.0) -> Outcome:
        """The outcome of a step of so many rows before anything is taken from its reports."""
        walk = Walk([None] * count, [[] for _ in range(count)])
        return cls(walk, left_out=set(left_out), launched_at=launched_at)

    def take(self, part: StepPart) -> None:
        """Waits for the report of a part's step, see `InFlightStep.report`. Draft temperatures learn from it."""
        assert part.step is not None
        report, new, were_drafted = part.step.report(), part.step.rows.size.depth + 1, set(part.drafted)
        self.came_at = time.perf_counter()
        logprobs = part.step.logprobs()
        columns = slice(2 * new, 2 * new + (num_columns(new - 1, part.shapes) if part.reports_ranks else 0))
        for place, (row, (accepted, drafted, is_nan, *rest)) in enumerate(zip(part.rows, report, strict=False)):
            if row in self.left_out:
                if is_nan:
                    self.left_with_nan.add(row)
                continue
            path, tokens = rest[:new], rest[new : 2 * new]
            error: str | Exception | None = error_of(accepted, is_nan)
            if is_nan and row in were_drafted:
                self.spoiled[row] = drafted
                continue
            found = [] if error is not None else tokens[: accepted + 1]
            if error is None and part.requests[row].options.grammar is not None:
                found, error = constrained(part.requests[row], found, partial(part.step.logits_at, place))
                if 0 < len(found) <= accepted:
                    part.step.keep_until(place, len(found) - 1, part.requests[row])
            if error is not None:
                self.errors[row] = error
            self.walk.paths[row] = path[1 : len(found)]
            self.walk.tokens[row] = found
            if logprobs is not None:
                self.logprobs[row] = logprobs.of(part.requests[row], place)
            if row in were_drafted:
                self.drafted[row] = drafted
                if part.reports_ranks and accepted >= 0:
                    self.row_outcomes[row] = read_row_outcome(
                        rest[columns], new - 1, max(len(found) - 1, 0), part.shapes
                    )
        if part.draws and not part.by_position:
            overlaps = {row: of_row[3 + columns.stop :] for row, of_row in zip(part.rows, report, strict=False)}
            self._learn(part.groups, overlaps)

    def _learn(self, groups: list[DraftGroup], overlaps: dict[int, list[int]]) -> None:
        """Lets the draft temperatures of groups learn from the reported overlaps of rows with a result."""
        for group in groups:
            temperature = group.draft_request.temperature
            own = [overlaps[row] for row in group.rows if row in self.drafted]
            if own and temperature not in self.learnt and temperature.begin_step():
                temperature.learn(mean_overlaps(own))
            self.learnt.add(temperature)

    def give(self, engine: Engine, requests: list[Request], groups: list[DraftGroup]) -> None:
        """Gives the requests of the step their tokens, updates caches and counts, and lets "auto" learn."""
        walk = self.walk
        engine.num_steps += 1
        for row, request in enumerate(requests):
            if row in self.left_out:
                continue
            tokens, path = walk.tokens[row], walk.paths[row] or []
            num_kept = engine.bookkeeping.append(request, tokens)
            error = self.errors.get(row)
            if error is not None and not request.is_over:
                request.fail(error, by_its_options=isinstance(error, Exception))
            request.logprobs += self.logprobs.get(row, [])[:num_kept]
            if num_kept < len(tokens) and not engine.runs_ahead:
                engine.target.cache.limit_states(request.table, num_kept)
            if request.error is not None or row in self.spoiled:
                walk.paths[row] = None
                continue
            engine.bookkeeping.num_tokens_generated += num_kept
            walk.paths[row] = path = path[:num_kept]
            engine.target.cache.note_length(request.table, request.length - 1)
            engine.bookkeeping.count(request, len(path), self.drafted.get(row))
        for rows, features in self.features:
            kept = [[] if (own := walk.paths[row]) is None else list(range(len(own) + 1)) for row in rows]
            engine.drafting.observe([requests[row] for row in rows], kept, features)
        kept_of_all = [0 if path is None else len(path) + 1 for path in walk.paths]
        if engine.drafting.features is not None:
            engine.drafting.note_features(requests, kept_of_all)
        elif not self.features:
            engine.drafting.observe(requests, [[] if path is None else [0, *path] for path in walk.paths])
        seconds = self._take_seconds(engine)
        if engine.speculates:
            ran = self.drafted.keys() | self.left_out | self.spoiled.keys()
            of_groups = {row: group.draft_request.plan.tree for group in groups for row in group.rows}
            trees = {row: tree for row, tree in of_groups.items() if row in ran}
            paths = [path if self.drafted.get(row) else None for row, path in enumerate(walk.paths)]
            flags = {"only_read": self.only_read, "was_deferred": self.was_deferred}
            engine.choices.end_device_step(trees, paths, seconds, **flags, row_outcomes=self.row_outcomes)
        engine.bookkeeping.mark_nan_of_failed(requests)
        # What goes on was wiped after this run had been launched.
        if self.left_with_nan:
            engine.bookkeeping.mark_nan([requests[row] for row in self.left_with_nan if requests[row].is_over])
        if self.spoiled:
            engine.bookkeeping.refuse_spoiled([(requests[row], drafted) for row, drafted in self.spoiled.items()])

    def _take_seconds(self, engine: Engine) -> float | None:
        """
        Seconds from the launch of a captured step, or from the report of the step before it if that came later, to its
        report. (What the host does with a report counts where it keeps the device waiting, as the next step is then
        launched late, and not in a step that was launched alone: else that would seem slower than one launched ahead.)
        None if that is no measure of a step, because prompts were read in between (as after every pause) or something
        was captured. The next step is measured from this report on.
        """
        before, engine.last_end = engine.last_end, self.came_at
        if before is None or self.captured:
            return None
        seconds = self.came_at - max(before, self.launched_at)
        if engine.choices.are_learning:
            seconds = engine.ranks.agree_on(seconds)[0]
            engine.device_steps.budget.time += seconds
        return seconds


def error_of(accepted: int, is_nan: int) -> str | None:
    """
    The error message of a row with these values in its report; None if there is no error.

    Args:
        accepted (`int`): number of accepted nodes, -1 or `NOTHING_TO_DRAW`.
        is_nan (`int`): whether the logits have NaN.

    Raises:
        RuntimeError: if the row rested (-1) although it belongs to a request.
    """
    if is_nan:
        return NAN_LOGITS
    if accepted == NOTHING_TO_DRAW:
        return NOTHING_TO_CHOOSE
    if accepted < 0:
        raise RuntimeError("A step on the device has passed by a request. Use `cuda_graphs=False`.")
    return None
