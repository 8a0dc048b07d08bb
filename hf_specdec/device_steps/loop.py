"""The host's part of steps on the device: launching steps, and reading their reports one step behind."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.utils import logging

from ..graphs import RECORDERS, reason_of
from ..kernels import DTYPES, kernels_are_installed
from ..trees import DynamicTree, TokenTree
from ..trees.choice import TreeChoice
from .drafts import PARTS, is_left_padded
from .drawing import mean_overlaps
from .step import DeviceStep
from .verdicts import NOTHING_TO_DRAW, SPOILED, Warpers


if TYPE_CHECKING:
    from ..generation.loop import SpeculativeCall
    from ..generation.target import Target

logger = logging.get_logger(__name__)

MOST_STEPS = 8
"""Most captured steps that the store of a target keeps."""
MOST_SHAPES = 2**14
"""Most input shapes for which a model is compiled."""


def any_number_of_shapes() -> AbstractContextManager[None]:
    """Context in which models are compiled for any number of shapes: each is captured, and seldom comes again."""
    return torch._dynamo.config.patch(recompile_limit=MOST_SHAPES, accumulated_recompile_limit=MOST_SHAPES)


def run_device_steps(call: SpeculativeCall) -> bool:
    """
    Runs a call to its end, if its steps can run whole on the device; or until a draft token spoils a step, see
    `rows_with_nan`.

    Args:
        call (`SpeculativeCall`): a call after its prefill.

    Returns:
        `bool`: whether the call has run; if not, at most its drafter has caught up with the prompt.
    """
    warpers = _warpers_of(call)
    if warpers is None:
        if call.plan.compile and not call.judge.all_finished:
            warnings.warn("`compile=True`: the steps of this call are not whole on a CUDA device.", stacklevel=2)
        return False
    drafter: Any = call.drafter  # of a type in `PARTS`
    drafter.catch_up(call.sequences)
    step = _step_for(call, warpers)
    if step is None:
        return False
    with call.metrics.phase("steps"):
        _Loop(call, step).run()
    return True


# ------------------------------------------------------------------------------------------------- which calls can


def _warpers_of(call: SpeculativeCall) -> Warpers | None:
    """
    The warpers of a call whose steps can run whole on the device; None for other calls, where the host has to look at
    every step, or the forwards cannot be captured.
    """
    target, sequences = call.target, call.sequences
    drafter: Any = call.drafter
    plan: Any = call.plan
    if type(drafter) not in PARTS or target.forward.dtype not in DTYPES or not kernels_are_installed():
        return None
    forwards = (target.forward, drafter.forward)
    stores: tuple[Any, ...] = (target.cache.storage, drafter.cache.storage)
    is_simple = (
        type(call.choice) is TreeChoice
        and isinstance(plan.tree, TokenTree | DynamicTree)
        and plan.disable_by_batch_size is None
        and not call.synced_gpus
        and not call.recorder.wanted
        and not call.judge.all_finished
        and sequences.max_length is not None
        and target.slots_before == 0
        and all(type(criterion) in (MaxLengthCriteria, EosTokenCriteria) for criterion in call.judge.criteria)
    )
    if not is_simple or any(store is None or not store.works for store in stores):
        return None
    if stores[1] in stores[0].captures_no_steps_with:
        return None
    # Every slot that a step may write must be there.
    most = (sequences.max_length or 0) + plan.tree.num_slots + plan.tree.depth + 2
    if any(store.capacity < most for store in stores):
        return None
    can_run = all(
        forward.can_be_captured and forward.position_shift.dim() == 1 and forward.device == sequences.device
        for forward in forwards
    )
    if not can_run or not all(map(is_left_padded, forwards)):
        return None
    warpers = Warpers.of(call.distribution.processors)
    return None if warpers is None or (warpers.values and not call.do_sample) else warpers


def _step_for(call: SpeculativeCall, warpers: Warpers) -> DeviceStep | None:
    """A captured step with the state of this call; None if it cannot be captured."""
    target, sequences = call.target, call.sequences
    drafter: Any = call.drafter
    plan: Any = call.plan
    tree = plan.tree
    store: Any = target.cache.storage
    of_draft = drafter.cache.storage
    places = [
        layer.keys.data_ptr()
        for cache in (target.cache, drafter.cache)
        for layer in cache.layers
        if layer.is_initialized
    ]
    key = (
        id(of_draft),
        hash(tuple(places)),
        id(getattr(drafter, "held_rows", None)),
        tree,
        tuple(sorted(sequences.end_tokens)),
        _kind_of(call),
        tuple(warpers.values),
        plan.draws_children,
        tuple((forward.key, forward.has_kernel) for forward in (target.forward, drafter.forward)),
        plan.compile,
    )
    state = (target, drafter, sequences, warpers)
    step = store.steps.pop(key, None)
    if step is None:
        step = _capture(store, plan.compile, *state, _kind_of(call), plan.draws_children, tree)
        if step is None:
            store.captures_no_steps_with.add(of_draft)
            return None
        while len(store.steps) >= MOST_STEPS:
            del store.steps[next(iter(store.steps))]
        weakref.finalize(of_draft, _forget, weakref.ref(store), key)
    store.steps[key] = step  # last: the most recently used
    step.load(*state)
    return step


def _kind_of(call: SpeculativeCall) -> Literal["greedy", "target", "rejection"]:
    """The kind of `Verdict` that a call needs."""
    if not call.do_sample:
        return "greedy"
    return "rejection" if call.plan.uses_rejection else "target"


def _forget(store: weakref.ref, key: Any) -> None:
    """Drops the captured step of a freed draft. The store is referenced weakly: a draft may outlive its targets."""
    of_target = store()
    if of_target is not None:
        of_target.steps.pop(key, None)


def _capture(store: Any, compiles: bool, target: Target, *rest: Any) -> DeviceStep | None:
    """A captured step, compiled first if `compiles` and if possible; None if the step cannot be captured."""
    record, name = RECORDERS[target.forward.device.type], type(target.model).__name__
    for with_compiler in (True, False) if compiles and store.compiles_steps else (False,):
        if with_compiler:
            logger.warning(f"Compiling the steps of {name}. This takes a minute or two, once.")
        try:
            # All levels of a tree run the same code, on different shapes.
            with any_number_of_shapes():
                return DeviceStep(target, *rest, with_compiler, record)  # type: ignore[call-arg]
        except Exception as error:  # whatever the obstacle, the call can run without
            what = "compiled" if with_compiler else "captured in a CUDA graph"
            warnings.warn(f"A step of {name} could not be {what}, and runs without: {reason_of(error)}", stacklevel=2)
        if with_compiler:
            store.compiles_steps = False
    return None


# ------------------------------------------------------------------------------------------------------- the loop


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
        self.columns: list[list[int]] = [[] for _ in self.lengths]
        self.shown, self.max_length = 0, sequences.max_length
        self.is_spoiled = False
        """Whether a step has taken nothing from a row: then the call goes on by steps of the host, without drafts."""
        self.most_new = step.tree_depth + 1

    def run(self) -> None:
        reports: deque[_Report] = deque()
        spare = [_Report(self.step.rows.report) for _ in range(2)]
        while not all(self.ended) and (reports or not self.is_spoiled):
            if not reports or (self._goes_on() and not self.is_spoiled):
                self.step.replay()
                report = spare.pop()
                report.copy_()
                reports.append(report)
                if len(reports) < 2:
                    continue
            spare.append(reports[0])
            self._read(reports.popleft().rows())
        self._hand_over()

    def _goes_on(self) -> bool:
        """Whether some row goes on even if the step under way accepts all its draft tokens (and no row ends)."""
        return any(
            not ended and length + self.most_new < self.max_length
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
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        self.is_spoiled |= any(accepted == SPOILED for accepted, *_ in report)
        if all(accepted < 0 for accepted, *_ in report) and not self.is_spoiled:
            raise RuntimeError("The device has ended rows that go on. Call `generate` with `cuda_graphs=False`.")
        self._learn([row[2 + self.most_new :] for row in report if row[0] >= 0])
        for row, (accepted, drafted, *tokens) in enumerate(report):
            if accepted < 0 or self.ended[row]:
                continue
            new = [token for token in tokens[: self.most_new] if token >= 0]
            call.log.add(row, self.lengths[row], accepted, drafted)
            self.lengths[row] += len(new)
            self.ended[row] = new[-1] in call.sequences.end_tokens or self.lengths[row] >= self.max_length
            self.columns[row] += new
        if call.streamer is not None:
            self._stream()

    def _learn(self, overlaps: list[list[int]]) -> None:
        """Updates the temperature of q, from reported overlaps, for steps that are not yet launched."""
        temperature, drawing = self.call.temperature, self.step.drawing
        if drawing is not None and overlaps and temperature.begin_step():
            temperature.learn(mean_overlaps(overlaps))
            drawing.draft_temperature.fill_(temperature.value)

    def _stream(self) -> None:
        """Streams the columns for which every row has a token or has ended; ended rows are padded."""
        lengths = [len(tokens) for tokens in self.columns]
        going = [length for length, ended in zip(lengths, self.ended, strict=True) if not ended]
        pad = self.call.judge.pad_token
        for column in range(self.shown, min(going) if going else max(lengths)):
            tokens = [row[column] if column < len(row) else pad for row in self.columns]
            self.call.streamer.put(torch.tensor(tokens))
            self.shown = column + 1

    def _hand_over(self) -> None:
        """Leaves text, lengths and cache of the call as steps by the host would have."""
        call, sequences, rows = self.call, self.call.sequences, self.step.rows
        longest, cache = max(self.lengths), call.target.cache
        sequences.take(rows.text[:, :longest], self.lengths, self.ended)
        cache.set_lengths([length - 1 for length in self.lengths])
        if all(self.ended):
            call.judge.end(longest)
            return
        cache.wipe()
        call.judge.streamer = None  # these columns have been streamed
        call.judge.advance()
        call.judge.streamer = call.streamer
        call.give_up_drafts()


class _Report:
    """Copy of a step's report from the device to the host."""

    def __init__(self, source: torch.Tensor):
        on_device = source.device.type == "cuda"
        self._source = source
        self._copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=on_device)
        self._event: Any = torch.cuda.Event() if on_device else None

    def copy_(self) -> None:
        """Starts the copy, on the present stream."""
        self._copy.copy_(self._source, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._source.device))  # the stream of the copy

    def rows(self) -> list[list[int]]:
        """The copied report, as a list per row; waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()
