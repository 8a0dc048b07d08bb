"""
CUDA graphs of forwards over trees: at small batch a forward's launches take the host longer than the device computes.

A `GraphStore` holds the K/V of a model for one batch size and capacity, and the graphs that were captured over them,
so that calls with other prompts replay them. It goes with its model. Everything that differs from step to step is
copied into the graph's own tensors first: tokens, positions, slots to write, masks over all slots, other inputs.
A forward is captured when its shape comes for the second time; where that fails, the model goes on without graphs.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput, output_capturing

from .attention import TreeContext, implementation_of, supports_switching
from .cache import TreeCache, WriteWindow
from .kernels import NODES_PER_WORD
from .prompts import WIDTHS


if TYPE_CHECKING:
    from .device_steps.step import DeviceStep
    from .features import Features
    from .forward import NodeInputs, TreeForward

SMALLEST_CAPACITY = 512
MOST_QUERIES = 256
"""Longer forwards are those of prompts, whose lengths seldom come again, and busy the device long enough."""
STORES_PER_MODEL = 4
MOST_GRAPHS = 64
"""Of a store."""
SHARE_OF_FREE_MEMORY = 0.3

Record = Callable[..., tuple[Callable[[], None], list[torch.Tensor]]]
"""As `record_cuda_graph`."""


_capturing = threading.Lock()
"""Two threads at a time would both capture the draws of the device's one random generator."""


def record_cuda_graph(
    run: Callable[[], list[torch.Tensor]], device: torch.device, pool: GraphPool | None = None
) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """
    Captures `run` after a first run for what is done once; returns what replays it, and its tensors. Graphs that share
    a `pool` must never run at the same time, nor read what another left there.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    try:
        return _capture_on(stream, run, device, pool)
    except torch.cuda.OutOfMemoryError:
        pass  # what the failed capture has made is known to the exception: it must be gone first
    # Elsewhere torch would have given back what it holds for later; while a graph is captured it cannot.
    gc.collect()
    torch.cuda.empty_cache()
    return _capture_on(stream, run, device, pool)


def _capture_on(
    stream: torch.cuda.Stream, run: Callable[[], list[torch.Tensor]], device: torch.device, pool: GraphPool | None
) -> tuple[Callable[[], None], list[torch.Tensor]]:
    graph = torch.cuda.CUDAGraph()
    # The graph gets a cuBLAS workspace of its own: that of the stream goes when torch.compile captures its graphs.
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with _capturing, torch.cuda.stream(stream), _without_collection():
            torch.cuda.synchronize(device)
            graph.capture_begin(None if pool is None else pool.handle(), "thread_local")
            try:
                tensors = run()
            finally:
                graph.capture_end()
    except BaseException:
        if pool is not None:
            pool.leave()
        raise
    finally:
        torch._C._cuda_clearCublasWorkspaces()
    return graph.replay, tensors


@contextmanager
def _without_collection() -> Iterator[None]:
    """
    What garbage holds may not be freed while a graph is captured. (`torch.cuda.graph` collects it all before instead,
    and empties torch's cache: both take longer than the capture.)
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphPool:
    """
    Memory for graphs that take turns. Where a capture has failed, or all graphs may be gone, nothing more can be
    captured into the same: those to come get another.
    """

    def __init__(self) -> None:
        self._handle: Any = None

    def handle(self) -> Any:
        """What torch knows the memory by."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def leave(self) -> None:
        """Lets it to those that are captured already."""
        self._handle = None


RECORDERS: dict[str, Record] = {"cuda": record_cuda_graph}
"""By type of device, how a forward is captured; elsewhere none is."""


# ---------------------------------------------------------------------------------------------------------- one graph


class StaticContext:
    """
    The `tree_context` of a captured forward: what it says of the present step, at fixed places.

    Args:
        context (`TreeContext`): of the present step, over all slots.
    """

    def __init__(self, context: TreeContext):
        self.was_used = False
        self.uses_kernel = context.uses_kernel
        self.kernel_inputs = context.kernel_inputs.for_batch(len(context.lengths)) if self.uses_kernel else None
        self._context = context
        self._masks: dict[Any, torch.Tensor] = {}
        self._placeholder: torch.Tensor | None = None

    def mask(self, dtype: torch.dtype, device: torch.device, window: int | None = None) -> torch.Tensor:
        """As `TreeContext.mask`, `[batch, 1, queries, capacity]`."""
        key = (dtype, device, window)
        if key not in self._masks:
            mask = self._context.mask(*key)
            self._masks[key] = mask.expand(len(self._context.lengths), -1, -1, -1).contiguous()
        return self._masks[key]

    def model_mask(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As `TreeContext.model_mask`."""
        if not self.uses_kernel:
            return self.mask(dtype, device)
        if self._placeholder is None:
            self._placeholder = self._context.model_mask(dtype, device)
        return self._placeholder

    def refresh(self, context: TreeContext) -> None:
        """Takes what another step says."""
        self._context = context
        if self.kernel_inputs is not None:
            self.kernel_inputs.copy_(context.kernel_inputs)
        for key, mask in self._masks.items():
            mask.copy_(context.mask(*key))


class RecordedForward:
    """
    A forward as a graph, over inputs at fixed places, which the owner keeps and fills.

    Args:
        forward (`TreeForward`): the forward.
        nodes (`NodeInputs`), context: what it is given.
        window (`Callable`): makes what says where it writes.
        record (`Callable`): captures a function, see `record_cuda_graph`.
    """

    def __init__(
        self, forward: TreeForward, nodes: NodeInputs, context: Any, window: Callable[[], Any], record: Record
    ):
        self._kind: type[ModelOutput] = ModelOutput
        self._names: list[str] = []
        self._features = forward.features

        def run() -> list[torch.Tensor]:
            """Its output's tensors, and the hidden states that somebody watches."""
            live, forward.cache.write_window = forward.cache.write_window, window()
            try:
                recording: Any = nullcontext([]) if self._features is None else self._features.recorded()
                with recording as states:
                    outputs = forward.run(nodes, context)
            finally:
                forward.cache.write_window = live
            self._kind = type(outputs)
            self._names = [name for name, value in outputs.items() if isinstance(value, torch.Tensor)]
            return [outputs[name] for name in self._names] + [one for place in states for one in place]

        self._replay, self._tensors = record(run, forward.device)
        self._features = None  # knows the call, and so the model: it must not keep that alive

    def __call__(
        self, features: Features | None, part: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    ) -> ModelOutput:
        """
        The forward's output for what its inputs hold now; its tensors are the caller's.

        Args:
            features (`Features`, *optional*): who watches hidden states.
            part (`Callable`, *optional*): what of a tensor counts.
        """
        self._features = features
        self._replay()
        self._features = None
        tensors = [part(tensor).clone() for tensor in self._tensors]  # the next replay writes over the graph's own
        if features is not None:
            for place, states in enumerate(tensors[len(self._names) :]):
                features.add(place, states)
        return self._kind(**dict(zip(self._names, tensors, strict=False)))


class CapturedForward:
    """
    A forward of one shape as a graph.

    Args:
        forward (`TreeForward`): the forward.
        nodes (`NodeInputs`), context (`TreeContext`): those of the present step, the latter over all slots.
        record (`Callable`): captures a function, see `record_cuda_graph`.
    """

    def __init__(self, forward: TreeForward, nodes: NodeInputs, context: TreeContext, record: Record):
        self._nodes, self._masks = nodes.clone(), StaticContext(context)
        slots = _slots(forward.cache).to(forward.device, copy=True)
        # Kept: a replay reads what it holds.
        self._window = window = WriteWindow(None, forward.cache.storage.capacity, slots)
        self._recorded = RecordedForward(forward, self._nodes, self._masks, lambda: window, record)

    def __call__(self, cache: TreeCache, nodes: NodeInputs, context: TreeContext, features: Any) -> ModelOutput:
        """The forward's output for another step; its tensors are the caller's."""
        self._nodes.copy_(nodes)
        self._window.slots.copy_(_slots(cache))
        self._masks.refresh(context)
        return self._recorded(features)


def _slots(cache: TreeCache) -> torch.Tensor:
    """Where the nodes of the present step are written, `[batch, nodes]` int64."""
    window = cache.write_window
    if window.slots is not None:
        return window.slots
    slots = torch.arange(window.start, window.end, device=cache.device)
    return slots.expand(len(cache.lengths), -1)


# ----------------------------------------------------------------------------------------------- the graphs of a model


class GraphStore:
    """
    K/V for one model, batch size and capacity, and the graphs captured over them.

    Args:
        capacity (`int`): slots.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.works = True
        self._layers: dict[int, Any] = {}
        self._graphs: dict[Any, CapturedForward] = {}
        self._seen: set[Any] = set()
        self._pool = GraphPool()
        self.steps: dict[Any, DeviceStep] = {}
        """Whole steps of this target, each with some draft, that were captured over this memory."""
        self.compiles_steps = True
        self.captures_no_steps_with: weakref.WeakSet[GraphStore] = weakref.WeakSet()
        """The stores of drafts with which a step could not be captured."""
        self._last_used: torch.cuda.Event | None = None

    def take(self, device: torch.device) -> None:
        """Lets the present stream wait for what the last borrower left under way on its own."""
        if self._last_used is not None:
            torch.cuda.current_stream(device).wait_event(self._last_used)

    def leave(self, device: torch.device) -> None:
        """Notes what is under way; see `take`."""
        if device.type == "cuda":
            self._last_used = torch.cuda.current_stream(device).record_event()

    def layer(
        self, index: int, shapes: list[tuple[int, ...]], likes: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros for the keys and values of a layer, like these but for the shapes: the same memory at every call."""
        held = self._layers.get(index)
        wanted = [(shape, like.dtype) for shape, like in zip(shapes, likes, strict=True)]
        if held is None or [(tuple(states.shape), states.dtype) for states in held] != wanted:
            self._graphs.clear()
            self._pool.leave()
            self.steps.clear()
            held = self._layers[index] = tuple(map(torch.Tensor.new_zeros, likes, shapes))
        else:
            torch._foreach_zero_(list(held))  # what another text left there may be no number
        return held

    def held(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The keys and values of a layer, as the last call left them; None before the first."""
        return self._layers.get(index)

    def run(self, forward: TreeForward, nodes: NodeInputs, context: TreeContext) -> ModelOutput | None:
        """A forward by its graph; None if it is to run without."""
        queries = nodes.tokens.shape[1]
        if not self.works or not forward.can_be_captured or (queries > MOST_QUERIES and queries not in WIDTHS):
            return None
        if forward.cache.write_window.end > self.capacity:  # the cache is about to leave
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


def warn_of_failed_capture(
    model: PreTrainedModel, error: Exception, part: str = "A forward", what: str = "captured in a CUDA graph"
) -> None:
    """Says that a model goes on without graphs, and why."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    warnings.warn(
        f"{part} of {type(model).__name__} could not be {what}, and runs without: {reason}",
        stacklevel=3,
    )


_Key = tuple[int, int, bool]
"""Batch size, capacity, and whether in inference mode."""


@dataclass
class _Shelf:
    """The stores of a model. `fingerprint` says what its graphs depend on besides shapes."""

    fingerprint: Any
    stores: dict[_Key, GraphStore] = field(default_factory=dict)
    lent: set[_Key] = field(default_factory=set)


_lock = threading.Lock()
_shelves: weakref.WeakKeyDictionary[nn.Module, _Shelf] = weakref.WeakKeyDictionary()


class GraphLoans:
    """
    What one call borrows. Two calls at a time never have the same store: the second goes without.

    Args:
        wanted (`bool` or `"auto"`): `SpeculativeConfig.cuda_graphs`; "auto": where it can be done.
    """

    def __init__(self, wanted: bool | Literal["auto"]):
        self.wanted = wanted
        self._lent: list[tuple[_Shelf, _Key, GraphStore, torch.device]] = []

    def store(self, model: PreTrainedModel, batch_size: int, num_slots: int) -> GraphStore | None:
        """
        A store with room for so many slots per row, or None.

        Raises:
            ValueError: if graphs are demanded of a model that cannot be captured.
        """
        if self.wanted is False:
            return None
        if obstacle_to_graphs(model, self.wanted) is not None:
            return None
        num_slots += NODES_PER_WORD  # nodes that nobody sees, behind those of a step
        capacity = max(SMALLEST_CAPACITY, 1 << (num_slots - 1).bit_length())
        # Tensors of an inference mode are of no use outside of one.
        key, fingerprint = (batch_size, capacity, torch.is_inference_mode_enabled()), fingerprint_of(model)
        with _lock:
            shelf = _shelves.get(model)
            if shelf is None or shelf.fingerprint != fingerprint:
                shelf = _shelves[model] = _Shelf(fingerprint)
            if key in shelf.lent:
                return None
            if key not in shelf.stores and not _has_memory(model, batch_size, capacity):
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
        """Lets other calls have the stores."""
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
    """Loans for one call."""
    loans = GraphLoans(wanted)
    try:
        yield loans
    finally:
        loans.give_back()


def obstacle_to_graphs(model: PreTrainedModel, wanted: bool | Literal["auto"]) -> str | None:
    """
    Why forwards of a model cannot be captured; None if they can.

    Raises:
        ValueError: if they cannot, and graphs are demanded (`wanted` is True, not "auto").
    """
    obstacle = _obstacle(model)
    if obstacle is not None and wanted is True:
        raise ValueError(
            f"`cuda_graphs=True`: {type(model).__name__} {obstacle}. Use `cuda_graphs='auto'`, which then goes "
            "without."
        )
    return obstacle


def _obstacle(model: PreTrainedModel) -> str | None:
    """Why forwards of a model cannot be captured."""
    if model.device.type not in RECORDERS:
        return f"runs on {model.device.type}"
    if len({parameter.device for parameter in model.parameters()}) > 1 or hasattr(model, "_hf_hook"):
        return "is spread over devices"
    if getattr(model, "_tp_size", None) not in (None, 1):
        return "is spread over processes"
    if model.training:
        return "is in training mode"
    if torch.is_autocast_enabled(model.device.type):
        return "runs under autocast, which puts away the weights that it has converted"
    if hasattr(model, "_orig_mod") or not supports_switching(model):
        return "does not attend through transformers' `AttentionInterface`"
    if any(map(_has_hooks, model.modules())):
        return "has forward hooks, which a graph would pass by"
    return None


def _has_hooks(module: nn.Module) -> bool:
    """Whether there are hooks besides ours, and transformers' for `output_hidden_states`, which it never removes."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not hasattr(hook, "of_features") and hook.__module__ != output_capturing.__name__ for hook in hooks)


def fingerprint_of(model: PreTrainedModel) -> Any:
    """Where its weights are, which adapters act, how it attends: what was moved or switched is captured anew."""
    places = tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
    adapters = tuple(
        str([getattr(module, name, None) for name in ("active_adapters", "disable_adapters", "merged", "scaling")])
        for module in model.modules()
        if isinstance(getattr(module, "disable_adapters", None), bool)  # a model has a method of that name
    )
    return hash(places), implementation_of(model), adapters


def _has_memory(model: PreTrainedModel, batch_size: int, capacity: int) -> bool:
    if model.device.type != "cuda":
        return True
    config = model.config.get_text_config(decoder=True)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    needed = 2 * config.num_hidden_layers * batch_size * capacity * heads * size * model.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(model.device)
    kept = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)  # by torch, for reuse
    return needed < SHARE_OF_FREE_MEMORY * (free + kept)
