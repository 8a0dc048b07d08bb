"""A forward as a graph: what differs from step to step lies at fixed places, which are filled before each replay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import ModelOutput

from ..attention import TreeContext
from ..cache import TreeCache, WriteWindow
from .capturing import Record


if TYPE_CHECKING:
    from ..features import Features
    from ..forward import NodeInputs, TreeForward


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
