"""Stores of captured graphs per model, with the K/V over which they were captured, and their loans to calls."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..attention import TreeContext
from ..attention.kernel import NODES_PER_WORD
from ..cache.sizes import bytes_of_states, bytes_of_steps, bytes_per_token
from ..forwards.chunks import WIDTHS
from ..ranks import Ranks
from ..states import PendingPaths
from .capturing import RECORDERS, GraphPool
from .exchanges import captured_together
from .forwards import CapturedForward
from .obstacles import fingerprint_of, obstacle_to_graphs, warn_of_failed_capture


if TYPE_CHECKING:
    from ..forwards.node_inputs import NodeInputs
    from ..forwards.tree_forward import TreeForward

SMALLEST_CAPACITY = 512
MOST_CAPTURED_QUERIES = 256
"""
Most queries per row of a captured forward, besides prompt chunks of a width in `WIDTHS`. Other longer forwards are
those of prompts, whose lengths seldom recur, and keep the device busy long enough.
"""
STORES_PER_MODEL = 4
MOST_GRAPHS = 64
"""Most graphs of one store."""
SHARE_OF_FREE_MEMORY = 0.3


class GraphStore:
    """
    K/V memory of one model, for one batch size and capacity, and the graphs captured over it.

    Args:
        capacity (`int`): slots per row.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.works = True
        self._memory: dict[Any, Any] = {}
        self._paths: PendingPaths | None = None
        self._pending: dict[int, dict[int, Any]] = {}
        self._graphs: dict[Any, CapturedForward] = {}
        self._seen: set[Any] = set()
        self._pool = GraphPool()
        self._last_used: torch.cuda.Event | None = None

    def take(self, device: torch.device) -> None:
        """Makes the present stream wait for work that the last borrower left under way on its own stream."""
        if self._last_used is not None:
            torch.cuda.current_stream(device).wait_event(self._last_used)

    def leave(self, device: torch.device) -> None:
        """Records an event for the work under way on the present stream, for which `take` waits."""
        if device.type == "cuda":
            self._last_used = torch.cuda.current_stream(device).record_event()

    def memory(self, key: Any, shapes: Sequence[tuple[int, ...]], likes: Sequence[torch.Tensor]) -> Any:
        """
        Zeroed tensors, as the keys and values of a layer, of these shapes, and dtype and device of `likes`. The memory
        of a key is the same at every call; other shapes or dtypes take new memory and drop all graphs.
        """
        held = self._memory.get(key)
        wanted = [(tuple(shape), like.dtype) for shape, like in zip(shapes, likes, strict=True)]
        if held is None or [(tuple(states.shape), states.dtype) for states in held] != wanted:
            self._graphs.clear()
            self._pool.leave()
            held = self._memory[key] = tuple(map(torch.Tensor.new_zeros, likes, shapes))
        else:
            torch._foreach_zero_(list(held))  # another text may have left NaN there
        return held

    def pending_states(self, index: int) -> dict[int, Any]:
        """What kernels leave pending of a layer's states, by the number of the state; see `StateLayer`."""
        return self._pending.setdefault(index, {})

    def paths(self, rows: int, device: torch.device) -> PendingPaths:
        """What is kept of the pending nodes of every row's states: nothing yet."""
        if self._paths is None:
            self._paths = PendingPaths(rows, device)
        self._paths.reset()
        return self._paths

    def held(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The keys and values of a layer, as the last call left them; None before the first."""
        return self._memory.get(index)

    def run(self, forward: TreeForward, nodes: NodeInputs, context: TreeContext) -> ModelOutput | None:
        """Runs a forward by its graph, which is captured at the second use of a shape; None if there is no graph."""
        queries = nodes.tokens.shape[1]
        if (
            not self.works
            or not forward.can_be_captured
            or (forward.cache.state_layers and forward.cache.kernel_forward is None)
            or (queries > MOST_CAPTURED_QUERIES and queries not in WIDTHS)
        ):
            return None
        if context.num_slots > self.capacity:  # the cache is about to outgrow this store
            return None
        features = forward.features
        words = -(-context.ancestors.shape[2] // NODES_PER_WORD) if context.uses_kernel else None
        key = (forward.key, nodes.key, words, None if features is None else features.boundaries)
        forward.cache.take_memory()
        captured = self._graphs.get(key)
        if captured is None and (key not in self._seen or len(self._graphs) == MOST_GRAPHS):
            self._seen.add(key)
            return None
        context = context.over(self.capacity)
        if captured is None:
            try:
                record = partial(RECORDERS[forward.device.type], pool=self._pool)
                with captured_together(Ranks.of(forward.model)):
                    captured = CapturedForward(forward, nodes, context, record)
            except RuntimeError as error:
                self._give_up(forward.model, error)
                return None
            self._graphs[key] = captured
        return captured(forward.cache, nodes, context, features)

    def _give_up(self, model: PreTrainedModel, error: Exception) -> None:
        self.works = False
        self._graphs.clear()
        self._pool.leave()
        warn_of_failed_capture(model, error)


_Key = tuple[int, int, bool]
"""Batch size, capacity, and whether in inference mode."""


@dataclass
class _Shelf:
    """The stores of a model. `fingerprint` is the state on which its graphs depend besides shapes."""

    fingerprint: Any
    stores: dict[_Key, GraphStore] = field(default_factory=dict)
    lent: set[_Key] = field(default_factory=set)


_lock = threading.Lock()
_shelves: weakref.WeakKeyDictionary[nn.Module, _Shelf] = weakref.WeakKeyDictionary()


class GraphLoans:
    """
    The stores that one call borrows. Two calls at a time never share a store: the second runs without graphs.

    Args:
        wanted (`bool` or `"auto"`): `SpeculativeConfig.cuda_graphs`; "auto": where the model can be captured.
    """

    def __init__(self, wanted: bool | Literal["auto"]):
        self.wanted = wanted
        self._lent: list[tuple[_Shelf, _Key, GraphStore, torch.device]] = []

    def store(self, model: PreTrainedModel, batch_size: int, num_slots: int) -> GraphStore | None:
        """
        Borrows a store of at least `num_slots` slots per row; None if there is none: graphs are unwanted or
        impossible, the store is lent, or memory is scarce.

        Raises:
            ValueError: if graphs are demanded of a model that cannot be captured.
        """
        if self.wanted is False:
            return None
        if obstacle_to_graphs(model, self.wanted) is not None:
            return None
        ranks = Ranks.of(model)
        num_slots += NODES_PER_WORD  # padding nodes after those of a step, to which no query attends
        capacity = max(SMALLEST_CAPACITY, 1 << (num_slots - 1).bit_length())
        # Tensors made in inference mode cannot be used outside of it.
        key, fingerprint = (batch_size, capacity, torch.is_inference_mode_enabled()), fingerprint_of(model)
        with _lock:
            shelf = _shelves.get(model)
            is_valid = ranks.on_all(shelf is not None and shelf.fingerprint == fingerprint)
            if shelf is None or not is_valid:
                shelf = _shelves[model] = _Shelf(fingerprint)
            is_free = key not in shelf.lent
            if not ranks.on_all(is_free and (key in shelf.stores or _has_memory(model, batch_size, capacity))):
                return None
            store = shelf.stores.pop(key, None) or GraphStore(capacity)
            spare = [old for old in shelf.stores if old not in shelf.lent]  # the least recently used first
            for old in spare[: max(len(shelf.stores) + 1 - STORES_PER_MODEL, 0)]:
                del shelf.stores[old]
            shelf.stores[key] = store  # last: the most recently used
            shelf.lent.add(key)
            self._lent.append((shelf, key, store, model.device))
        store.take(model.device)
        return store

    def give_back(self) -> None:
        """Gives the stores back, for other calls."""
        lent, self._lent = self._lent, []
        try:
            for _, _, store, device in lent:
                store.leave(device)
        finally:
            with _lock:
                for shelf, key, _, _ in lent:
                    shelf.lent.discard(key)


@contextmanager
def graph_loans(wanted: bool | Literal["auto"]) -> Iterator[GraphLoans]:
    """Context with the loans of one call, see `GraphLoans`, given back at its end."""
    loans = GraphLoans(wanted)
    try:
        yield loans
    finally:
        loans.give_back()


def _has_memory(model: PreTrainedModel, batch_size: int, capacity: int) -> bool:
    if model.device.type != "cuda":
        return True
    per_row = (bytes_of_states(model) + bytes_of_steps(model)).total()
    needed = batch_size * (capacity * sum(bytes_per_token(model).values()) + per_row)
    free, _ = torch.cuda.mem_get_info(model.device)
    kept = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)  # cached by torch
    return needed < SHARE_OF_FREE_MEMORY * (free + kept)
