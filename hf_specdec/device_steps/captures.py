"""Which calls run by captured steps, and the step that a call gets: an earlier call's, or a new one."""

from __future__ import annotations

import warnings
import weakref
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
from .step import DeviceStep
from .verdicts import Warpers


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


def warpers_on_device(call: SpeculativeCall) -> Warpers | None:
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
    # Every slot that a step may write must be there: the target's for the tree, the draft's for all candidates.
    most = (sequences.max_length or 0) + plan.tree.depth + 2
    if stores[0].capacity < most + plan.tree.num_nodes or stores[1].capacity < most + plan.tree.num_slots:
        return None
    can_run = all(
        forward.can_be_captured and forward.position_shift.dim() == 1 and forward.device == sequences.device
        for forward in forwards
    )
    if not can_run or not all(map(is_left_padded, forwards)):
        return None
    warpers = Warpers.of(call.distribution.processors)
    return None if warpers is None or (warpers.values and not call.do_sample) else warpers


def step_for(call: SpeculativeCall, warpers: Warpers) -> DeviceStep | None:
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


def _capture(store: Any, compiles: bool, target: Target, drafter: Any, *rest: Any) -> DeviceStep | None:
    """A captured step, compiled first if `compiles` and if possible; None if the step cannot be captured."""
    record, name = RECORDERS[target.forward.device.type], type(target.model).__name__
    for with_compiler in (True, False) if compiles and store.compiles_steps else (False,):
        if with_compiler:
            logger.warning(f"Compiling the steps of {name}. This takes a minute or two, once.")
        try:
            # All levels of a tree run the same code, on different shapes.
            with any_number_of_shapes():
                step = DeviceStep(target, drafter, *rest)
                step.capture(target, drafter, with_compiler, record)
                return step
        except Exception as error:  # whatever the obstacle, the call can run without
            what = "compiled" if with_compiler else "captured in a CUDA graph"
            warnings.warn(f"A step of {name} could not be {what}, and runs without: {reason_of(error)}", stacklevel=2)
        if with_compiler:
            store.compiles_steps = False
    return None
