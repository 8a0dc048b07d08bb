"""The captured step that a call gets: an earlier call's, or a new one."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers.utils import logging

from ..graphs import RECORDERS, warn_of_failed_capture
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


def step_for(call: SpeculativeCall) -> DeviceStep | None:
    """A captured step with the state of this call; None if it cannot be captured."""
    target, sequences = call.target, call.sequences
    drafter: Any = call.drafter
    plan: Any = call.plan
    tree = plan.tree
    warpers: Any = Warpers.of(call.distribution.processors)
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
            warn_of_failed_capture(target.model, error, part="A step", what=what)
        if with_compiler:
            store.compiles_steps = False
    return None
