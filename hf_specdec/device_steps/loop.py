"""The host's part of steps on the device: launching steps, and reading their reports one step behind."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from ..verification.choosing import NOTHING_TO_DRAW_FROM
from .captures import step_for
from .drawing import mean_overlaps
from .obstacles import obstacle_to_whole_steps
from .reports import Reports
from .step import DeviceStep
from .verdicts import NOTHING_TO_DRAW, SPOILED


if TYPE_CHECKING:
    from ..generation.loop import SpeculativeCall


def run_device_steps(call: SpeculativeCall) -> None:
    """
    Runs a call to its end, if its steps can run whole on the device; or until a draft token spoils a step, see
    `rows_with_nan`.

    Args:
        call (`SpeculativeCall`): a call after its prefill.
    """
    if call.judge.all_finished:
        return
    obstacle = obstacle_to_whole_steps(call)
    if obstacle is not None:
        if call.plan.compile:
            warnings.warn(
                f"`compile=True` has no effect: the steps of this call do not run whole on a CUDA device, since "
                f"{obstacle}.",
                stacklevel=2,
            )
        return
    drafter: Any = call.drafter  # of a type in `PARTS`
    drafter.catch_up(call.sequences)
    step = step_for(call)
    if step is not None:
        with call.metrics.phase("steps"):
            _Loop(call, step).run()


class _Loop:
    """
    Launches step after step, and reads each report while the next step runs, unless the step under way may be the last
    by the length of the text. When all rows have ended, one more step may be under way: it changes nothing.
    """

    def __init__(self, call: SpeculativeCall, step: DeviceStep):
        self.call, self.step = call, step
        sequences: Any = call.sequences
        self.lengths = list(sequences.lengths)
        self.ended = list(sequences.resting)
        self.new_tokens: list[list[int]] = [[] for _ in self.lengths]
        self.streamed, self.limit = 0, sequences.limit
        self.is_spoiled = False
        """Whether a step has taken nothing from a row: then the call goes on by steps of the host, without drafts."""
        self.most_new = step.tree.depth + 1

    def run(self) -> None:
        reports = Reports(self.step.rows.report)
        while not all(self.ended) and (reports or not self.is_spoiled):
            if not reports or (self._goes_on() and not self.is_spoiled):
                self.step.replay()
                reports.fetch()
                if len(reports) < Reports.MOST_UNREAD:
                    continue
            self._read(reports.read())
        self._hand_over()

    def _goes_on(self) -> bool:
        """Whether some row goes on even if the step under way accepts all its draft tokens (and no row ends)."""
        return any(
            not ended and length + self.most_new < self.limit
            for length, ended in zip(self.lengths, self.ended, strict=True)
        )

    def _read(self, report: list[list[int]]) -> None:
        """
        Reads the report of a step: new tokens, lengths, ended rows and metrics.

        Raises:
            RuntimeError: as in plain `generate`, if there was nothing to draw from at a node; or if the device rests
                all rows though some go on.
        """
        call = self.call
        if any(accepted == NOTHING_TO_DRAW for accepted, *_ in report):
            raise RuntimeError(NOTHING_TO_DRAW_FROM)
        if not self.is_spoiled:
            self._count_spoiled(report)
        if all(accepted < 0 for accepted, *_ in report) and not self.is_spoiled:
            raise RuntimeError("The device has ended rows that go on. Call `generate` with `cuda_graphs=False`.")
        self._learn([row[2 + self.most_new :] for row in report if row[0] >= 0])
        for row, (accepted, drafted, *tokens) in enumerate(report):
            if accepted < 0 or self.ended[row]:
                continue
            new = [token for token in tokens[: self.most_new] if token >= 0]
            call.log.add(row, self.lengths[row], accepted, drafted)
            self.lengths[row] += len(new)
            self.ended[row] = new[-1] in call.sequences.end_tokens or self.lengths[row] >= self.limit
            self.new_tokens[row] += new
        if call.streamer is not None:
            self._stream()

    def _count_spoiled(self, report: list[list[int]]) -> None:
        """Counts the drafts of spoiled rows as refused. (A step that is under way then is spoiled again.)"""
        drafted = [row[1] for row in report if row[0] == SPOILED]
        for count in drafted:
            self.call.metrics.add_draft(count, 0)
        self.is_spoiled = bool(drafted)

    def _learn(self, overlaps: list[list[int]]) -> None:
        """Updates the temperature of q, from reported overlaps, for steps that are not yet launched."""
        temperature, drawing = self.call.temperature, self.step.drawing
        if drawing is not None and overlaps and temperature.begin_step():
            temperature.learn(mean_overlaps(overlaps))
            drawing.draft_temperature.fill_(temperature.value)

    def _stream(self) -> None:
        """Streams the columns for which every row has a token or has ended; ended rows are padded."""
        lengths = [len(tokens) for tokens in self.new_tokens]
        going = [length for length, ended in zip(lengths, self.ended, strict=True) if not ended]
        pad = self.call.judge.pad_token
        for column in range(self.streamed, min(going) if going else max(lengths)):
            tokens = [row[column] if column < len(row) else pad for row in self.new_tokens]
            self.call.streamer.put(torch.tensor(tokens, device="cpu"))
            self.streamed = column + 1

    def _waits(self) -> bool:
        """Whether a row rests without an end: after the last position that the target knows."""
        sequences = self.call.sequences
        if sequences.limit == sequences.max_length:
            return False
        return any(
            length == self.limit and sequences.tokens(row, length - 1)[0] not in sequences.end_tokens
            for row, length in enumerate(self.lengths)
        )

    def _hand_over(self) -> None:
        """Leaves text, lengths and cache of the call as steps by the host would have, which go on if rows do."""
        call, sequences, rows = self.call, self.call.sequences, self.step.rows
        longest, cache = max(self.lengths), call.target.cache
        sequences.take(rows.text[:, :longest], self.lengths, self.ended)
        cache.set_lengths([length - 1 for length in self.lengths])
        if all(self.ended) and not self._waits():
            call.judge.end(longest)
            return
        cache.wipe()
        call.judge.advance(streams=False)  # these columns have been streamed
        call.give_up_drafts()
