"""Which calls run by captured steps, and what keeps others from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..kernels import DTYPES, kernels_are_installed
from ..trees import DynamicTree, TokenTree
from ..trees.choice import TreeChoice
from .drafts import PARTS, is_left_padded
from .verdicts import Warpers


if TYPE_CHECKING:
    from ..forwards.tree_forward import TreeForward
    from ..generation.loop import SpeculativeCall


def obstacle_to_whole_steps(call: SpeculativeCall) -> str | None:
    """The reason why the steps of a call do not run whole on the device; None if they can."""
    drafter: Any = call.drafter
    if type(drafter) not in PARTS:
        return f"{type(drafter).__name__} drafts on the host"
    return _obstacle_of_options(call) or _obstacle_of_models(call)


def _obstacle_of_options(call: SpeculativeCall) -> str | None:
    """What the host must look at in every step."""
    plan, sequences, target = call.plan, call.sequences, call.target
    others = [one for one in call.judge.criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)]
    if others:
        return f"the stopping criterion {type(others[0]).__name__} is asked after every token"
    if sequences.max_length is None:
        return "the text has no maximum length"
    if call.recorder.wanted:
        return f"{' and '.join(sorted(call.recorder.wanted))} are recorded"
    if type(call.choice) is not TreeChoice or not isinstance(plan.tree, TokenTree | DynamicTree):
        return "the tree is chosen for every step"
    if plan.disable_by_batch_size is not None:
        return "`disable_by_batch_size` is decided at every step"
    if call.synced_gpus:
        return "`synced_gpus` is on"
    if target.slots_before != 0:
        return "the text goes on from a cache or from embeddings"
    warpers = Warpers.of(call.distribution.processors)
    if warpers is None or (warpers.values and not call.do_sample):
        return "a logits processor is not plain temperature, top-k or top-p, in this order"
    return None


def _obstacle_of_models(call: SpeculativeCall) -> str | None:
    """What keeps the forwards of target and draft from running within a captured step."""
    target, sequences = call.target, call.sequences
    drafter: Any = call.drafter
    tree: Any = call.plan.tree
    forwards: tuple[TreeForward, ...] = (target.forward, drafter.forward)
    stores: tuple[Any, ...] = (target.cache.storage, drafter.cache.storage)
    if not kernels_are_installed():
        return "the Triton kernels are not installed"
    if target.forward.dtype not in DTYPES:
        return f"the kernels do not take {target.forward.dtype}"
    if any(store is None or not store.works for store in stores):
        return "there are no CUDA graphs"
    if stores[1] in stores[0].captures_no_steps_with:
        return "a step could not be captured"
    # Every slot that a step may write must be there: the target's for the tree, the draft's for all candidates.
    most = (sequences.max_length or 0) + tree.depth + 2
    if stores[0].capacity < most + tree.num_nodes or stores[1].capacity < most + tree.num_slots:
        return "the memory with CUDA graphs is too small"
    for forward in forwards:
        if not forward.can_be_captured or forward.position_shift.dim() != 1 or not is_left_padded(forward):
            return f"{type(forward.model).__name__} needs other inputs at every step"
        if forward.device != sequences.device:
            return f"{type(forward.model).__name__} is on another device than the prompt"
    return None
