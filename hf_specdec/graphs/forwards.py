"""Captured forwards, whose changing inputs lie at fixed addresses and are filled before each replay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import ModelOutput

from ..attention import AttentionContext, TreeContext
from ..cache import SlotsOfRows, TreeCache
from ..states import StaticKernelForward
from .capturing import Record
from .experts import with_captured_experts


if TYPE_CHECKING:
    from ..forwards.features import Features
    from ..forwards.node_inputs import NodeInputs
    from ..forwards.tree_forward import TreeForward


class StaticContext:
    """
    The `tree_context` of a captured forward: masks and kernel inputs of the present step, at fixed addresses.

    Args:
        context (`TreeContext`): context of the present step, over all slots.
    """

    one_row: Any = None

    def __init__(self, context: TreeContext):
        self.was_used = False
        self.uses_kernel = context.uses_kernel
        inputs = context.kernel_inputs
        self.kernel_inputs = None if inputs is None else inputs.for_batch(len(context.lengths))
        self._context = context
        self._masks: dict[Any, torch.Tensor] = {}
        self._placeholder: torch.Tensor | None = None

    def mask(
        self, dtype: torch.dtype, device: torch.device, window: int | None = None, chunk: int | None = None
    ) -> torch.Tensor:
        """Additive mask `[batch, 1, queries, capacity]` of the present step, see `TreeContext.mask`."""
        key = (dtype, device, window, chunk)
        if key not in self._masks:
            mask = self._context.mask(*key)
            self._masks[key] = mask.expand(len(self._context.lengths), -1, -1, -1).contiguous()
        return self._masks[key]

    def model_mask(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Mask that the model itself is given, see `TreeContext.model_mask`."""
        if not self.uses_kernel:
            return self.mask(dtype, device)
        if self._placeholder is None:
            self._placeholder = self._context.model_mask(dtype, device)
        return self._placeholder

    def refresh(self, context: TreeContext) -> None:
        """Copies masks and kernel inputs from the context of another step."""
        self._context = context
        inputs = context.kernel_inputs
        if self.kernel_inputs is not None and inputs is not None:
            self.kernel_inputs.copy_(inputs)
        for key, mask in self._masks.items():
            mask.copy_(context.mask(*key))


class RecordedForward:
    """
    A captured forward, over inputs at fixed addresses, which the owner keeps and fills.

    Args:
        forward (`TreeForward`): the forward.
        nodes (`NodeInputs`), context (`AttentionContext`): inputs of the forward.
        window (`Callable`): makes the write window of the cache, for every run.
        states (`StaticKernelForward`, *optional*): what the kernels of layers with states read.
        record (`Callable`): function that captures another one, see `record_cuda_graph`.
    """

    def __init__(
        self,
        forward: TreeForward,
        nodes: NodeInputs,
        context: AttentionContext,
        window: Callable[[], Any],
        states: StaticKernelForward | None,
        record: Record,
    ):
        self._kind: type[ModelOutput] = ModelOutput
        self._names: list[str] = []
        self._features = forward.features

        def run() -> list[torch.Tensor]:
            """The tensors of the forward's output, and the watched hidden states."""
            cache = forward.cache
            live = cache.write_window, cache.kernel_forward
            cache.write_window = window()
            cache.kernel_forward = None if states is None else states.forward()
            try:
                recording: Any = nullcontext([]) if self._features is None else self._features.recorded()
                with recording as hidden, with_captured_experts(forward.model):
                    outputs = forward.run(nodes, context)
            finally:
                cache.write_window, cache.kernel_forward = live
            self._kind = type(outputs)
            self._names = [name for name, value in outputs.items() if isinstance(value, torch.Tensor)]
            return [outputs[name] for name in self._names] + [one for place in hidden for one in place]

        self._replay, self._tensors = record(run, forward.device)
        self._features = None  # refers to the call, and so to the model, which must not be kept alive

    def __call__(
        self, features: Features | None, part: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    ) -> ModelOutput:
        """
        Replays the forward over its present inputs; the caller owns the tensors of the output.

        Args:
            features (`Features`, *optional*): collects watched hidden states.
            part (`Callable`, *optional*): takes from each tensor the part that is wanted.
        """
        self._features = features  # read by stand-ins for graphs alone, which run the function again
        self._replay()
        self._features = None
        tensors = [part(tensor).clone() for tensor in self._tensors]  # the next replay writes over the graph's own
        if features is not None:
            for place, states in enumerate(tensors[len(self._names) :]):
                features.add(place, states)
        return self._kind(**dict(zip(self._names, tensors, strict=False)))


class CapturedForward:
    """
    A captured forward of one shape, with its inputs.

    Args:
        forward (`TreeForward`): the forward.
        nodes (`NodeInputs`), context (`TreeContext`): inputs of the present step; the context covers all slots.
        record (`Callable`): function that captures another one, see `record_cuda_graph`.
    """

    def __init__(self, forward: TreeForward, nodes: NodeInputs, context: TreeContext, record: Record):
        self._nodes, self._masks = nodes.clone(), StaticContext(context)
        slots = _slots(forward.cache).to(forward.device, copy=True)
        # Kept, because a replay reads its tensors.
        self._window = window = SlotsOfRows(context.num_slots, slots)
        live = forward.cache.kernel_forward
        self._states = None if live is None else StaticKernelForward(live, *nodes.tokens.shape)
        self._recorded = RecordedForward(forward, self._nodes, self._masks, lambda: window, self._states, record)

    def __call__(
        self, cache: TreeCache, nodes: NodeInputs, context: TreeContext, features: Features | None
    ) -> ModelOutput:
        """Replays the forward with the inputs of another step; the caller owns the tensors of the output."""
        self._nodes.copy_(nodes)
        self._window.slots.copy_(_slots(cache))
        self._masks.refresh(context)
        if self._states is not None:
            assert cache.kernel_forward is not None
            self._states.load(cache.kernel_forward)
        return self._recorded(features)


def _slots(cache: TreeCache) -> torch.Tensor:
    """Slots to which the nodes of the present step are written, `[batch, nodes]` int64."""
    window = cache.write_window
    if isinstance(window, SlotsOfRows):
        return window.slots
    if window is None:
        raise RuntimeError("`TreeCache.write_nodes` must say where a forward writes, before it runs.")
    return torch.arange(window.start, window.end, device=cache.device).expand(len(cache.lengths), -1)
