"""The captured steps of an engine: which are captured, and when, and which of them runs rows."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from transformers.utils import logging

from ...compiling.layers import any_number_of_shapes
from ...graphs import (
    RECORDERS,
    GraphPool,
    compile_kernels,
    fingerprint_of,
    obstacle_to_graphs,
    warn_of_failed_capture,
)
from ...graphs.exchanges import captured_together
from ...graphs.sizes import FEWEST_BLOCKS, next_size
from ...kernels import DTYPES, kernels_are_installed
from ...ranks import Ranks
from ...trees import AutoTree, DynamicTree, TokenTree
from ...trees.capture_budget import CaptureBudget
from ...verification import Verifier
from ..request import Request
from ..wanted_trees import wanted_tree
from .captured import CapturedStep
from .keys import StepKey, StepKind, StepSize
from .kinds import has_own_tree, kind_of, part_under_auto
from .parts import StepPart
from .prompts import DevicePrompts
from .staged_rows import RowValues
from .step import InFlightStep
from .stored import CapturedSteps
from .values import ValuesOfRows


if TYPE_CHECKING:
    from ...drafters import Drafting, DraftRequest
    from ..target import InFlightTarget

logger = logging.get_logger(__name__)


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
        self.compiles_own_whole = False
        """
        Whether forwards of steps with the requests' own tree are compiled as a whole, see `has_own_tree`: those of
        most of the time in `generate`, which are then as fast under "auto" as with this tree fixed.
        """
        self.fewest_blocks = fewest_blocks
        self.fewest_rows = 1
        """Rows for which steps have room at least: those of a batch that only shrinks, so that nothing is captured."""
        self.mixes_rows = True
        """
        Whether rows of a step may be verified in different ways, and have seeds; else a step does what its rows need.
        """
        self._target, self._drafting, self._cuda_graphs, self._pool = target, drafting, cuda_graphs, pool
        self._ranks = Ranks.of(target.model)
        self._values = ValuesOfRows(drafting)
        self.stored = CapturedSteps()
        """The captured decoding steps."""
        self._fingerprint: Any = None
        self.num_drops = 0
        """How often all captured steps have been dropped because weights had moved; see `renew`."""
        self.has_failed = False
        """Whether a capture has failed, after which no step is captured."""
        self.deliver_results: Callable[[], None] = lambda: None
        """Called by the engine's thread while the device runs a step, and before a capture, which takes long."""
        self.works = False
        """Whether steps can be captured; see `renew`."""
        self.prompts = DevicePrompts(self, target, drafting)
        """Captured prefill steps."""
        self.draft_requests: dict[StepKind, DraftRequest] = {}
        """How trees are drafted in steps of a kind, of steps that may be captured ahead."""
        self.num_captures = 0
        """Captures so far."""
        self._compiled: set[bool] = set()
        """Whether steps have been compiled as a whole (True), and by layers (False)."""
        self.budget = CaptureBudget()
        """Says which steps are worth a capture, where "auto" chooses."""
        self._reads_at_once = False
        self._read: set[tuple[bool, int]] = set()

    def capture_no_size_twice(self) -> None:
        """
        From now on, a captured size serves smaller ones for ever; see `CapturedSteps`. The first steps without a tree
        let a head read at each width, so that no later call has to wait for these captures; under "auto" they wait
        until they pay, as its trees do.
        """
        self.stored.capture_no_size_twice()
        self._reads_at_once = True

    def rely_on_larger(self) -> None:
        """
        From now on, steps and prompts run in the next larger graph that there is, and none is captured in its place:
        graphs are captured ahead (`ahead.py`). What no graph can run is captured when it comes, as before.
        """
        self.stored.rely_on_larger()
        self.prompts.are_ahead = self.budget.is_closed = True
        for cache in (self._target.cache, self._drafting.cache):
            if cache is not None and cache.graphs is not None:
                cache.graphs.relies_on_larger = True

    def ready_trees(self, requests: list[Request]) -> frozenset[TokenTree | DynamicTree | None]:
        """
        Trees (None: no tree) of a step of these requests for which nothing need be captured, nor before it for a head
        that has to read pending features first.
        """
        size = StepSize.of(requests, 0, 1, self.fewest_blocks, self.fewest_rows)
        serving = [key for key in self.stored.fitting(size) if self._serves_auto(key.kind, requests)]
        store = self._drafting.features
        waits = 0 if store is None else max(store.counts(requests))
        reads = any(key.kind.reads and waits <= key.size.lag for key in serving)
        drafting = [key for key in serving if not key.kind.reads]
        return frozenset(key.kind.tree for key in drafting if key.kind.tree is None or reads or waits <= key.size.lag)

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
            self.stored.clear()
            self._read.clear()
            self.prompts.stored.clear()
            if self._pool is not None:
                self._pool.leave()
            self.num_drops += 1  # last: other threads may read it
        self._fingerprint = fingerprint
        return not len(self.stored)

    # ---------------------------------------------------------------------------------------------------- which steps

    def loaded(self, part: StepPart) -> InFlightStep | None:
        """The captured step that is to run a part, with its rows loaded; None if its capture failed."""
        num_rows = next_size(max(self.fewest_rows, len(part.own)))
        lag, values = self._values.of(part, self._new_width(part), num_rows)
        size = StepSize.of(part.own, part.depth, lag, self.fewest_blocks, self.fewest_rows)
        part.wanted = StepKey(self._kind_of(part, values.kinds), size)
        return self._step_for(part.wanted, part, values)

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
        verifiers = [one.options.verifier(part.draws and place < drafted) for place, one in enumerate(part.own)]
        lag = read_width or self._values.lag_of(part, next_size(fewest))
        return StepKey(self._kind_of(part, verifiers), StepSize(rows, blocks, part.depth, lag))

    def _kind_of(self, part: StepPart, verifiers: list[Verifier]) -> StepKind:
        is_whole = self.compiles_whole or (self.compiles_own_whole and has_own_tree(part))
        return kind_of(part, verifiers, self.mixes_rows, self.compiles, self.compiles and is_whole)

    def _serves_auto(self, kind: StepKind, requests: list[Request]) -> bool:
        """Whether steps of a kind can run these requests if "auto" chooses the tree of the kind for them."""
        may_shape = self._drafting.has_confidence and not self._ranks.are_several
        part = part_under_auto(requests, kind.tree, kind.reads, may_shape)
        verifiers = [request.options.verifier(part.draws) for request in requests]
        return kind.stands_in_for(self._kind_of(part, verifiers))

    def _new_width(self, part: StepPart) -> int:
        """A width at which a head has not read yet, where it is to read at each at once; else 0."""
        store = self._drafting.features
        if any(isinstance(wanted_tree(request), AutoTree) for request in part.own):
            return 0
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
        key, own = self.stored.chosen(wanted), part.own
        step = self.stored.get(key)
        is_new = step is None
        if step is None:
            step = self.new_step(key, part.groups[0].draft_request if part.groups else None)
        step.load(own, values)
        if is_new:
            step.rows.keep_nothing()  # a capture may run the step, more than once; features are read first
            if not self.capture(step):
                if not key.kind.compiles:
                    return None
                # By layers, where these may do; else it is only captured.
                kind = replace(wanted.kind, compiles=self.compiles, compiles_whole=False)
                return self._step_for(wanted._replace(kind=kind), part, values)
            step.load(own, values)
            self.stored.add(key, step)
        return step

    def new_step(self, key: StepKey, draft_request: DraftRequest | None) -> InFlightStep:
        """A step of a kind and size that is yet to be captured; `draft_request` says how its trees are drafted."""
        if draft_request is not None and self.stored.are_ahead:
            self.draft_requests[key.kind] = replace(draft_request, refine=None)  # which refers to the engine
        return InFlightStep(self._target, self._drafting, key, draft_request)

    def capture(self, step: CapturedStep) -> bool:
        """Captures a step with rows loaded. Returns whether it succeeded; a failure ends captures, or compilation."""
        compiles, is_own = step.compiles, step.compiles_whole and not self.compiles_whole
        if compiles and step.compiles_whole not in self._compiled:
            name, what = type(self._target.model).__name__, "steps" if step.compiles_whole else "layers"
            logger.warning(f"Compiling the {what} of {name}. This takes some minutes, once.")
        try:
            self.record(step)
        except Exception as error:  # for whatever reason: requests run without captured steps
            if is_own:
                self.compiles_own_whole = False
                warn_of_failed_capture(self._target.model, error, "A step", "compiled as a whole")
            else:
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
            self.stored.clear()
            self.prompts.give_up()
        what = "compiled" if compiled else "captured in a CUDA graph"
        warn_of_failed_capture(self._target.model, error, "A step", what)

    def compile_kernels(self, step: CapturedStep) -> None:
        """Begins to compile the kernels of a step with rows loaded, which is of no use after it."""
        step.capture(compile_kernels, None)

    def record(self, step: CapturedStep) -> None:
        """Captures a step with rows loaded. Raises whatever keeps it from being captured."""
        self.deliver_results()  # results would have to wait for the capture
        start = time.perf_counter()
        with captured_together(self._ranks), any_number_of_shapes() if step.compiles else nullcontext():
            step.capture(RECORDERS[self._target.device.type], self._pool)
        self.num_captures += 1
        logger.info(f"Captured {step.about}: {time.perf_counter() - start:.2f} s.")
        is_usual = step.compiles_whole == self.compiles_whole  # further ones cost as much
        if is_usual and (not step.compiles or step.compiles_whole in self._compiled):  # the first one compiles for all
            self.budget.cost = self._ranks.agree_on(time.perf_counter() - start)[0]
        if step.compiles:
            self._compiled.add(step.compiles_whole)
