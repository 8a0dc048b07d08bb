"""Engines that run `generate` calls by captured steps, kept from call to call with their memory and graphs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..cache.blocks import BlockPool
from ..cache.sizes import bytes_of_states, bytes_of_steps, bytes_per_token, layer_sizes
from ..drafters import Drafter
from ..engine.engine import Engine
from ..engine.policy import LoadPolicy
from ..forwards.chunks import busy_at, chunk_size_for
from ..models.modules import num_parameters_of
from ..plan import SpeculationPlan
from ..ranks import Ranks
from ..states import layer_kinds_of
from ..trees import AutoTree, TreeSchedule


BLOCK_SIZE = 32
"""Tokens of a K/V block."""
FEWEST_BLOCKS = 16
"""Blocks per row, one of them reserved, for which steps have room at least; further sizes are powers of two."""
MOST_ENGINES = 4
"""Most engines that a target keeps, the least recently used dropped first."""
SHARE_OF_FREE_MEMORY = 0.5
"""Share of the free memory that the K/V of target and draft may take."""
_ATTRIBUTE = "_engines_of_calls"

_lock = threading.Lock()


@dataclass(frozen=True)
class EngineKey:
    """
    What an engine is made for, besides its target.

    Args:
        draft (`int`): `id` of the draft's model.
        rows (`int`): rows of a call.
        blocks (`int`): K/V blocks of a row.
        dtypes (`tuple`): dtypes and devices of target and draft.
        compiles, compiles_whole (`bool`): see `DeviceSteps`; steps with the draft's own tree under "auto" are compiled
            as a whole besides.
        in_inference_mode (`bool`): tensors made in inference mode cannot be used outside of it.
    """

    draft: int
    rows: int
    blocks: int
    dtypes: tuple[Any, ...]
    compiles: bool
    compiles_whole: bool
    in_inference_mode: bool


class _Kept(dict[EngineKey, tuple[Engine, Any]]):
    """
    The idle engines of a target, the most recently used last, each with a CUDA event after its last work, which may be
    under way on another stream (None on a CPU). Copies and pickles are empty.
    """

    def __deepcopy__(self, memo: Any) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


@contextmanager
def borrowed_engine(
    model: PreTrainedModel, drafter: Drafter, plan: SpeculationPlan, rows: int, num_slots: int
) -> Iterator[Engine | None]:
    """
    A context with an engine for one call: one that an earlier call has left, or a new one. It is dropped if the
    context ends in an exception. None where memory is scarce.

    Args:
        model (`PreTrainedModel`): the target.
        drafter (`Drafter`): the drafter of the call, which drafts with one model.
        plan (`SpeculationPlan`): how the call speculates.
        rows (`int`): rows of the call.
        num_slots (`int`): most tokens of a row, those of a tree included.
    """
    wanted = _key(model, drafter, plan, rows, num_slots)
    with _lock:
        kept: _Kept = vars(model).setdefault(_ATTRIBUTE, _Kept())
        key = _with_room(kept, wanted)
        engine, last_work = kept.pop(key, (None, None))
    ranks = Ranks.of(model)
    if not ranks.on_all(engine is not None):  # each rank frees its drafts when it may
        engine, last_work, key = None, None, wanted  # another rank's may have had other room
    if engine is None and not ranks.on_all(_has_memory(model, drafter, key)):
        yield None
        return
    if last_work is not None:
        torch.cuda.current_stream(model.device).wait_event(last_work)
    policy = LoadPolicy(disable_by_batch_size=plan.disable_by_batch_size)
    if engine is None:
        engine = _new_engine(model, drafter, plan, policy, key)
        weakref.finalize(drafter.parts[0], _forget, weakref.ref(model), key)
    else:
        engine.policy = policy
        engine.take_drafter(drafter)
    yield engine
    engine.let_drafter_go()
    if model.device.type == "cuda":
        last_work = torch.cuda.current_stream(model.device).record_event()
    with _lock:
        kept[key] = engine, last_work
        while len(kept) > MOST_ENGINES:
            del kept[next(iter(kept))]


def _with_room(kept: _Kept, key: EngineKey) -> EngineKey:
    """The key of the smallest kept engine with as many blocks and else the same properties; `key` if there is none."""
    able = [one for one in kept if one.blocks >= key.blocks and replace(one, blocks=key.blocks) == key]
    return min(able, key=lambda one: one.blocks, default=key)


def _forget(model: weakref.ref[PreTrainedModel], key: EngineKey) -> None:
    """Drops the engine of a draft that is freed."""
    target = model()
    if target is not None:
        vars(target)[_ATTRIBUTE].pop(key, None)


def _key(model: PreTrainedModel, drafter: Drafter, plan: SpeculationPlan, rows: int, num_slots: int) -> EngineKey:
    draft = drafter.parts[0]
    needed = -(-num_slots // BLOCK_SIZE) + 1
    changes_trees = isinstance(plan.tree, AutoTree | TreeSchedule) or plan.disable_by_batch_size is not None
    return EngineKey(
        draft=id(draft),
        rows=rows,
        blocks=max(FEWEST_BLOCKS, 1 << (needed - 1).bit_length()) - 1,
        dtypes=(model.dtype, model.device, draft.dtype, draft.device),
        compiles=plan.compile,
        compiles_whole=plan.compile and not changes_trees and not _have_states(model, drafter),
        in_inference_mode=torch.is_inference_mode_enabled(),
    )


def _have_states(model: PreTrainedModel, drafter: Drafter) -> bool:
    """Whether target or draft has layers with states, which are not compiled as a whole."""
    return layer_kinds_of(model) is not None or layer_kinds_of(drafter.parts[0]) is not None


def _new_engine(
    model: PreTrainedModel, drafter: Drafter, plan: SpeculationPlan, policy: LoadPolicy, key: EngineKey
) -> Engine:
    size = num_parameters_of(model)
    engine = Engine(
        model,
        drafter,
        BlockPool(key.rows * key.blocks, BLOCK_SIZE),
        policy,
        max_requests=key.rows,
        chunk_size=chunk_size_for(size),
        busy_at=busy_at(size),
        cuda_graphs=plan.cuda_graphs,
        compiles=key.compiles,
        compiles_whole=key.compiles_whole,
        fewest_blocks=FEWEST_BLOCKS,
    )
    engine.device_steps.prompts.captures_at_once = True
    engine.device_steps.prompts.draws_tokens = False  # a seed gives one text, whichever call captures
    engine.device_steps.mixes_rows, engine.device_steps.fewest_rows = False, key.rows
    engine.lets_rows_rest = True
    engine.device_steps.compiles_own_whole = key.compiles and not _have_states(model, drafter)
    engine.device_steps.capture_no_size_twice()
    engine.choices.autos.keep_captures_for(key.rows)
    for part, cache in ((model, engine.target.cache), (engine.drafting.parts[0], engine.drafting.cache)):
        if cache is not None:  # the draft's model runs in the target's dtype, perhaps as a copy
            cache.allocate(layer_sizes(part))
    engine.drafting.make_store()
    return engine


def _has_memory(model: PreTrainedModel, drafter: Drafter, key: EngineKey) -> bool:
    """Whether K/V and states of an engine take a small share of the memory that is free."""
    if model.device.type != "cuda":
        return True
    per_token = sum(sum(bytes_per_token(part).values()) for part in (model, *drafter.models))
    free, _ = torch.cuda.mem_get_info(model.device)
    cached = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    per_row = sum((bytes_of_states(part) + bytes_of_steps(part)).total() for part in (model, *drafter.models))
    return key.rows * (key.blocks * BLOCK_SIZE * per_token + per_row) < SHARE_OF_FREE_MEMORY * (free + cached)
