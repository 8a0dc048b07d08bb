"""The base class of captured steps: rows that the host loads, and a graph over them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from ...cache.device_paged_cache import DevicePagedCache, places_of
from ...compiling.layers import compiled_function
from ...graphs import Record, with_captured_experts
from ...random_generators import draws_undone
from ...ranks import Ranks
from ...verification.device_warpers import TEXTS
from ..request import Request
from .keys import StepSize
from .rows import InFlightRows
from .staged_rows import RowValues


if TYPE_CHECKING:
    from ...drafters import Drafting
    from ...forwards.tree_forward import TreeForward
    from ..target import InFlightTarget


class CapturedStep(ABC):
    """
    A step over requests in flight, captured once for a size and replayed for any requests that fit.

    Args:
        target (`InFlightTarget`), drafting (`Drafting`): the engine's target and draft.
        size (`StepSize`): number of rows, and of blocks, levels and tokens per row, for which the step has room.
        processing (`frozenset[str]`): see `StepKind`.
    """

    compiles = False
    """Whether the step's forwards are compiled before the capture."""
    compiles_whole = False
    """Whether they are compiled as a whole, for this step alone; else layer by layer, for all steps."""
    is_vital = True
    """Whether a failed capture of this step ends the capture of all steps, and not only of its kind."""

    def __init__(
        self, target: InFlightTarget, drafting: Drafting, size: StepSize, processing: frozenset[str] = frozenset()
    ):
        store = drafting.features
        trash_slot = 0 if store is None else store.trash_slot
        self._target: Any = target
        self._ranks = Ranks.of(target.model)
        self._models: Any = (target.model, *drafting.parts)
        has_texts = not TEXTS.isdisjoint(processing)
        text_length = size.blocks * target.cache.pool.block_size + size.depth + 1 if has_texts else 0
        self.rows = InFlightRows(size, target.device, trash_slot, target.adapters.index, processing, text_length)
        self._first_slots = torch.zeros(size.rows, dtype=torch.long, device=target.device)
        self._caches = [cache for cache in (target.cache, drafting.cache) if cache is not None]
        self._cache: Any = None
        self._forward: Any = None

    def capture(self, record: Record, pool: Any) -> None:
        """
        Captures the step, which may run it more than once on the rows that are loaded. Random states are restored.

        Args:
            record (`Callable`): captures a function; see `record_cuda_graph`.
            pool (`GraphPool`, *optional*): memory shared with other graphs.

        Raises:
            RuntimeError: if the step cannot be captured.
        """
        device, captured = self.rows.device, copy.copy(self)
        captured._cache = DevicePagedCache(self._target.cache, self.rows.tables, self.rows.state_slots)
        shift = self._first_slots if self.rows.position_shift is None else self.rows.position_shift
        captured._forward = self._target.forward.over(captured._cache, self._first_slots, shift)
        adapters, choices = self._target.adapters, self.rows.adapters
        captured._forward.adapters = lambda rows, tokens: adapters.of_rows(choices, tokens)
        self._compile(captured._forward)
        if self.compiles and self.compiles_whole:
            captured._cache.places = compiled_function(places_of)
        with draws_undone(device):
            self._replay, _ = record(captured._run_captured, device, pool=pool)
        self._cache = captured._cache  # has tensors that the graph reads
        self._let_models_go()

    @property
    def about(self) -> str:
        """What the step does, and its size, for a log."""
        size = self.rows.size
        return f"{self._purpose} for {size.rows} rows with {size.blocks} blocks each"

    @property
    def _purpose(self) -> str:
        return type(self).__name__

    def _let_models_go(self) -> None:
        """Drops what the captured function alone has run with: a graph is replayed without it, and outlives models."""
        self._target = self._models = None

    def _compile(self, forward: TreeForward) -> None:
        """Marks a forward as compiled, if the step's forwards are to be."""
        forward.compiles, forward.compiles_layers = self.compiles, not self.compiles_whole

    def _run_captured(self) -> list[torch.Tensor]:
        with with_captured_experts(*self._models):
            return self._run()

    @abstractmethod
    def _run(self) -> list[torch.Tensor]:
        """The function that is captured; returns the tensors that are read after a replay."""

    def load(self, requests: list[Request], values: RowValues, starts: list[int] | None = None) -> None:
        """Copies the rows of a step to the device, see `InFlightRows.load`. Blocks that may hold NaN are zeroed."""
        tables = [request.table for request in requests]
        for cache in self._caches:
            cache.clean(tables)
        self.rows.load(requests, values, starts, self._caches[0].note_states(tables))
