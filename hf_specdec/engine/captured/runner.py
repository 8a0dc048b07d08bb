"""Running captured steps: which steps are captured, which graph runs them, and what the host does with reports."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from transformers.utils import logging

from ...compiling.layers import any_number_of_shapes
from ...graphs import RECORDERS, GraphPool, fingerprint_of, obstacle_to_graphs, warn_of_failed_capture
from ...graphs.exchanges import captured_together
from ...graphs.paged import FEWEST_BLOCKS, next_size
from ...kernels import DTYPES, kernels_are_installed
from ...ranks import Ranks
from ...states.kernel import MOST_NODES
from ...trees import DynamicTree, TokenTree
from ...verification import Verifier, Walk
from ..request import Request
from .captured import CapturedStep
from .constraining import has_grammar
from .keys import StepKey, StepKind, StepSize
from .log_probabilities import best_asked
from .parts import DraftGroup, Outcome, StepPart
from .processing import filters_by_kernels, processing_of
from .prompts import DevicePrompts
from .repeats import Repeats
from .staged_rows import RowValues
from .step import InFlightStep
from .stored import CapturedSteps
from .values import ValuesOfRows
from .walks import kinds_among


if TYPE_CHECKING:
    from ...drafters import Drafting, DraftRequest
    from ..target import InFlightTarget

logger = logging.get_logger(__name__)

MOST_PARTS = 3
"""Most parts of a step, one for each tree that requests ask for. Every part is a forward of the target."""


class DeviceSteps:
    """
    The captured steps of an engine. A step is captured when it is first needed and no larger graph can run it. After a
    failed capture of a decoding step, no step is captured any more.

    Args:
        target (`InFlightTarget`), drafting (`Drafting`): the engine's target and draft.
        cuda_graphs (`bool` or `"auto"`): `SpeculativeConfig.cuda_graphs`.
        pool (`GraphPool`, *optional*): memory that all graphs of the engine share.
        compiles (`bool`): whether forwards are compiled before the capture; if that fails, they are only captured.
        compiles_whole (`bool`): whether they are compiled as a whole, anew for every step: faster steps, but only for
            a batch that stays the same.
        fewest_blocks (`int`): see `StepSize.of`.
    """

    def __init__(
        self,
        target: InFlightTarget,
        drafting: Drafting,
        cuda_graphs: bool | Literal["auto"] = False,
        pool: GraphPool | None = None,
        compiles: bool = False,
        compiles_whole: bool = False,
        fewest_blocks: int = FEWEST_BLOCKS,
    ):
        self.compiles, self.compiles_whole = compiles, compiles_whole
        """Whether forwards are compiled before the capture; and whether as a whole."""
        self.fewest_blocks = fewest_blocks
        self.fewest_rows = 1
        """Rows for which steps have room at least: those of a batch that only shrinks, so that nothing is captured."""
        self.mixes_rows = True
        """
        Whether rows of a step may be verified in different ways, and have seeds; else a step does what its rows need.
        """
        self._target, self._drafting, self._cuda_graphs, self._pool = target, drafting, cuda_graphs, pool
        self._ranks = Ranks.of(target.model)
        self._values, self._steps = ValuesOfRows(drafting), CapturedSteps()
        self._fingerprint: Any = None
        self.has_failed = False
        """Whether a capture has failed, after which no step is captured."""
        self.deliver_results: Callable[[], None] = lambda: None
        """Called by the engine's thread while the device runs a step, and before a capture, which takes long."""
        self.works = False
        """Whether steps can be captured; see `renew`."""
        self.prompts = DevicePrompts(self, target, drafting)
        """Captured prefill steps."""
        self.asked: dict[StepKind, DraftRequest] = {}
        """How trees are drafted in steps of a kind, of steps that may be captured ahead."""
        self._captures = 0
        self.seconds_of_capture = 0.3
        """Seconds that the last capture took; those of a usual one before the first."""
        self._reads_at_once = False
        self._read: set[tuple[bool, int]] = set()

    def capture_no_size_twice(self) -> None:
        """
        From now on, a captured size serves smaller ones for ever; see `CapturedSteps`. The first steps without a tree
        let a head read at each width, so that no later call has to wait for these captures.
        """
        self._steps.capture_no_size_twice()
        self._reads_at_once = True

    def rely_on_larger(self) -> None:
        """
        From now on, steps and prompts run in the next larger graph that there is, and none is captured in its place:
        graphs are captured ahead (`ahead.py`). What no graph can run is captured when it comes, as before.
        """
        self._steps.rely_on_larger()
        self.prompts.are_ahead = True
        for cache in (self._target.cache, self._drafting.cache):
            if cache is not None and cache.graphs is not None:
                cache.graphs.relies_on_larger = True

    @property
    def stored(self) -> CapturedSteps:
        """The captured decoding steps."""
        return self._steps

    def ready_trees(self, requests: list[Request]) -> frozenset[TokenTree | DynamicTree | None]:
        """Trees (None: no tree) of a step of these requests for which nothing need be captured."""
        size = StepSize.of(requests, 0, 1, self.fewest_blocks, self.fewest_rows)
        draws = any(request.options.do_sample for request in requests)
        asked = best_asked(requests), processing_of(requests), has_grammar(requests)
        return self._steps.trees_for(size, draws, *asked)

    def renew(self) -> bool:
        """
        Drops captured steps if weights have moved since, and checks again whether steps can be captured. Returns
        whether there are none now.
        """
        models = (self._target.model, *self._drafting.parts)
        forward = self._target.forward
        can_work = (
            self._cuda_graphs is not False
            and not self.has_failed
            and kernels_are_installed()
            and all(obstacle_to_graphs(model, "auto") is None for model in models)
            and all(model.device == self._target.device for model in models)
            and forward.can_be_captured
            and forward.has_kernels
            and forward.dtype in DTYPES
        )
        self.works = self._ranks.on_all(can_work)
        if self.compiles and not self.has_failed and (self._ranks.are_several or not self.works):
            warnings.warn(
                "`compile=True` has no effect: steps of these requests do not run whole on one CUDA device.",
                stacklevel=2,
            )
            self.compiles = False
        fingerprint = [self._target.adapters.key, *(fingerprint_of(model) for model in models)]
        if not self._ranks.on_all(fingerprint == self._fingerprint):
            self._steps.clear()
            self._read.clear()
            self.prompts.clear()
            if self._pool is not None:
                self._pool.leave()
        self._fingerprint = fingerprint
        return not len(self._steps)

    # ---------------------------------------------------------------------------------------------------- which steps

    def run(
        self, requests: list[Request], groups: Sequence[DraftGroup], goes_on: Callable[[], bool] = lambda: False
    ) -> Iterator[Outcome]:
        """
        Runs a captured step of all these requests, and yields its outcome. Yields nothing if the step cannot be
        captured; requests and draft are then unchanged, except that features of parts before one whose capture failed
        are zero. (That happens at most once, since a failure ends all captures. Drafts from them may be worse.)

        As long as `goes_on` agrees, the step is launched again for the same requests, each time before the run on its
        way has been read, and more outcomes follow: the device does not wait for the host. `goes_on` is called when
        the run on its way is the only one whose outcome has not been yielded and taken, and there are blocks for
        another; if it agrees, the step runs again. Until all outcomes have been taken, requests must keep their
        blocks.
        """
        parts = self._parts(requests, groups)
        if parts is None:
            return
        captures = self._captures
        outcome, repeats, is_ahead = Outcome(Walk.start(len(requests), [])), None, False
        for number, part in enumerate(parts):
            step = self._launch(part)
            if step is None:
                self._drop_features(parts[:number])
                for earlier in parts[:number]:
                    self._target.cache.drop_states([request.table for request in earlier.own])
                    self._drafting.note_dropped(earlier.of(earlier.drafted))
                return
            outcome.launched_at = outcome.launched_at or step.launched_at
            if len(parts) == 1:
                repeats = Repeats(part, step, self._target, self._drafting)
                is_ahead = self._launch_ahead(repeats, goes_on)
            self._take(part, outcome)
        for part in parts:
            self._note(part, outcome)
        outcome.captured = captures != self._captures
        yield outcome
        while repeats is not None and is_ahead:
            left_out = repeats.leavers(outcome)
            outcome = Outcome(Walk.start(len(requests), []), left_out=left_out, launched_at=repeats.step.launched_at)
            is_ahead = self._launch_ahead(repeats, goes_on)
            self._take(repeats.part, outcome)
            self._note(repeats.part, outcome)
            repeats.count_drafts(outcome)
            yield outcome

    def _drop_features(self, parts: list[StepPart]) -> None:
        """Zeroes the new features, NaN perhaps, that these parts have written and of which nothing is taken."""
        if self._drafting.features is not None:
            for part in parts:
                read = {*part.drafted, *part.reading}
                for row in part.rows:  # those that were not read have new features after their waiting ones
                    self._drafting.features.wipe(part.requests[row], 0 if row in read else None)

    def _launch_ahead(self, repeats: Repeats, goes_on: Callable[[], bool]) -> bool:
        """Starts the next run of a step while one is on its way, if it can and may run. Returns whether it does."""
        wanted = repeats.part.wanted
        can_go_on = wanted is not None and repeats.step.can_repeat and self._steps.may_repeat(wanted)
        can_go_on = can_go_on and not has_grammar(repeats.part.own)  # of which a step may take tokens back
        if not can_go_on or not repeats.has_room() or not goes_on():
            return False
        repeats.launch()
        return True

    def _parts(self, requests: list[Request], groups: Sequence[DraftGroup]) -> list[StepPart] | None:
        """
        Groups the rows by their trees. Rows without drafts join the first part, or make a part of their own if they
        outnumber its drafted rows. None if not all rows can be in captured steps.
        """
        can_run = self.works and self._target.cache.has_memory
        if not can_run or any(request.options.device_warpers is None for request in requests):
            return None
        if (self._target.cache.state_layers or self._ranks.are_several) and has_grammar(requests):
            return None
        shifts = [request.position_shift for request in requests]
        if any(shift is not None and shift.dim() != 2 for shift in shifts):
            return None
        parts: dict[Any, StepPart] = {}
        for group in groups:
            plan: Any = group.asked.plan
            if not self._drafting.can_be_captured:
                return None
            if not self._drafting.can_grow(plan.tree):
                return None
            if self._target.cache.state_layers and plan.tree.num_nodes >= MOST_NODES:
                return None
            asked = group.asked
            by_position = plan.draws_children and plan.draws_by_position
            key = plan.tree, plan.draws_children, by_position, asked.calibration is not None, asked.reports_ranks
            part = parts.setdefault(key, StepPart(requests, *key[:3], shapes=key[3], reports_ranks=key[4]))
            part.groups.append(group)
        drafted = {row for group in groups for row in group.rows}
        plain = [row for row in range(len(requests)) if row not in drafted]
        found = list(parts.values())
        if plain and found and len(plain) <= len(found[0].drafted):
            found[0].plain = plain
        elif plain:
            found.append(StepPart(requests, plain=plain))
        return found if len(found) <= MOST_PARTS else None

    # ------------------------------------------------------------------------------------------------------- one part

    def _launch(self, part: StepPart) -> InFlightStep | None:
        """Starts the step of a part's rows and returns it; None if its capture failed."""
        num_rows = next_size(max(self.fewest_rows, len(part.own)))
        lag, values = self._values.of(part, self._new_width(part), num_rows)
        size = StepSize.of(part.own, part.depth, lag, self.fewest_blocks, self.fewest_rows)
        part.wanted = StepKey(self._kind_of(part, values.kinds), size)
        step = part.step = self._step_for(part.wanted, part, values)
        if step is not None:
            part.load_calibration()
            step.launch()
        return step

    def key_for(self, part: StepPart, rows: int, fewest: int, blocks: int, read_width: int = 0) -> StepKey:
        """
        Kind and size of a step with rows like those of a part.

        Args:
            part (`StepPart`): the rows; their number does not matter.
            rows (`int`), blocks (`int`): those of the size.
            fewest (`int`): fewest rows that are to run in such a step, which may have further tokens to read.
            read_width (`int`): width at which a head reads in the step; 0: it need not.
        """
        drafted = len(part.drafted)
        kinds = [one.options.verifier(part.draws and place < drafted) for place, one in enumerate(part.own)]
        lag = read_width or self._values.lag_of(part, next_size(fewest))
        return StepKey(self._kind_of(part, kinds), StepSize(rows, blocks, part.depth, lag))

    def _kind_of(self, part: StepPart, kinds: list[Verifier]) -> StepKind:
        tests = part.draws and not part.by_position
        found = kinds_among(kinds, tests) if self.mixes_rows else frozenset(kinds)
        filtered = part.own if Verifier.BY_POSITION in found else part.of(part.drafted) if part.draws else []
        return StepKind(
            tree=part.tree,
            kinds=found,
            has_seeds=self.mixes_rows,
            draws=part.draws,
            is_filtered=filters_by_kernels(filtered),
            by_position=part.by_position,
            processing=processing_of(part.own),
            shapes=part.shapes,
            reports_ranks=part.reports_ranks,
            has_grammars=has_grammar(part.own),
            reads=bool(part.reading),
            compiles=self.compiles,
            compiles_whole=self.compiles_whole,
            best=best_asked(part.own),
        )

    def _new_width(self, part: StepPart) -> int:
        """A width at which a head has not read yet, where it is to read at each at once; else 0."""
        store = self._drafting.features
        if not self._reads_at_once or part.groups or store is None or not max(store.counts(part.own)):
            return 0
        draws = any(request.options.do_sample for request in part.own)
        for width in store.widths:
            if (draws, width) not in self._read:
                self._read.add((draws, width))
                return width
        return 0

    def _step_for(self, wanted: StepKey, part: StepPart, values: RowValues) -> InFlightStep | None:
        """A captured step of a kind and size, with the part's requests loaded; None if its capture failed."""
        key, own = self._steps.chosen(wanted), part.own
        step = self._steps.get(key)
        is_new = step is None
        if step is None:
            step = self.new_step(key, part.groups[0].asked if part.groups else None)
        step.load(own, values)
        if is_new:
            step.rows.keep_nothing()  # a capture may run the step twice, and features are read first
            if not self.capture(step):
                if not key.kind.compiles:
                    return None
                plain = wanted._replace(kind=replace(wanted.kind, compiles=False))
                return self._step_for(plain, part, values)
            step.load(own, values)
            self._steps.add(key, step)
        return step

    def new_step(self, key: StepKey, asked: DraftRequest | None) -> InFlightStep:
        """A step of a kind and size that is yet to be captured; `asked` says how its trees are drafted."""
        if asked is not None and self._steps.are_ahead:
            self.asked[key.kind] = replace(asked, refine=None)  # which refers to the engine
        return InFlightStep(self._target, self._drafting, key, asked)

    def capture(self, step: CapturedStep) -> bool:
        """Captures a step with rows loaded. Returns whether it succeeded; a failure ends captures, or compilation."""
        compiles = step.compiles
        if compiles and self._captures == 0:
            name, what = type(self._target.model).__name__, "steps" if self.compiles_whole else "layers"
            logger.warning(f"Compiling the {what} of {name}. This takes some minutes, once.")
        try:
            self.record(step)
        except Exception as error:  # for whatever reason: requests run without captured steps
            self.note_failure(error, compiles, step.is_vital)
            return False
        return True

    def note_failure(self, error: Exception, compiled: bool, is_vital: bool) -> None:
        """Ends captures after one that has failed, or those of prompts alone, or if it was compiled, compilation."""
        if compiled:
            self.compiles = False
        elif not is_vital:
            self.prompts.give_up()
        else:
            self.works, self.has_failed = False, True
            self._steps.clear()
            self.prompts.give_up()
        what = "compiled" if compiled else "captured in a CUDA graph"
        warn_of_failed_capture(self._target.model, error, "A step", what)

    def record(self, step: CapturedStep) -> None:
        """Captures a step with rows loaded. Raises whatever keeps it from being captured."""
        self.deliver_results()  # results would have to wait for the capture
        start = time.perf_counter()
        with captured_together(self._ranks), any_number_of_shapes() if step.compiles else nullcontext():
            step.capture(RECORDERS[self._target.device.type], self._pool)
        self._captures += 1
        if not step.compiles or self._captures > 1:  # the first one compiles for all
            self.seconds_of_capture = self._ranks.agree_on(time.perf_counter() - start)[0]

    def _note(self, part: StepPart, outcome: Outcome) -> None:
        """Takes note of what the draft has read in a part's step."""
        if part.step is not None and part.step.features is not None:  # a copy: the next replay overwrites it
            outcome.features.append((part.rows, part.step.features[: len(part.rows)].clone()))
        read = [row for row in part.drafted + part.reading if row not in outcome.left_out]
        self._drafting.note_proposed(part.of(read))
        outcome.was_deferred |= part.was_deferred
        outcome.only_read |= bool(part.reading)

    def _take(self, part: StepPart, outcome: Outcome) -> None:
        """
        Waits for the report of a part's step and adds it to `outcome`. The host delivers earlier results meanwhile.
        """
        self.deliver_results()
        outcome.take(part)
