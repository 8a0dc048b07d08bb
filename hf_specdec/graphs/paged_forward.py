"""
`PagedForward`: a captured forward over requests in flight. Padding rows write to `WASTE_BLOCK`, which is never read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import ModelOutput

from ..attention.kernel import KernelInputs
from ..cache.blocks import WASTE_BLOCK, ZERO_BLOCK
from ..cache.paged_layers import PagedWindow
from ..forwards.node_inputs import NodeInputs
from ..forwards.tree_forward import TreeForward
from ..states import StaticKernelForward
from . import Record, RecordedForward


if TYPE_CHECKING:
    from ..forwards.features import Features
    from .paged import ForwardSize


class PagedForward:
    """
    A forward of one size, captured in a graph.

    Args:
        forward (`TreeForward`): the forward, over a `PagedCache`.
        nodes (`NodeInputs`), inputs (`KernelInputs`): inputs of the present step, with which the graph is captured.
        size (`ForwardSize`): rows, queries, nodes and blocks for which the graph has room.
        record (`Callable`): captures a function, see `record_cuda_graph`.
    """

    def __init__(
        self, forward: TreeForward, nodes: NodeInputs, inputs: KernelInputs, size: ForwardSize, record: Record
    ):
        rows, queries, num_nodes, num_blocks = size
        self._queries, device = queries, forward.device
        window: Any = forward.cache.write_window
        num_slots = num_blocks * window.block_size

        def integers(*shape: int, value: int = 0) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.long, device=device)

        others = nodes.others and {
            name: value.new_zeros(rows, queries, *value.shape[2:]) if isinstance(value, torch.Tensor) else value
            for name, value in nodes.others.items()
        }
        positions = None if nodes.positions is None else integers(rows, queries)
        self._nodes = NodeInputs(integers(rows, queries), positions, nodes.logits_to_keep, others)
        words = (rows, queries, inputs.ancestors.shape[2])
        self._kernel_inputs = KernelInputs(
            lengths=integers(rows),
            ancestors=integers(*words),
            query_depths=integers(rows, queries),
            node_depths=integers(rows, num_nodes),
            first_slots=integers(rows),
            block_tables=integers(rows, num_blocks, value=ZERO_BLOCK),
            ancestors_in_windows=None if inputs.ancestors_in_windows is None else integers(*words),
        )
        self._blocks, self._offsets = integers(rows, queries, value=WASTE_BLOCK), integers(rows, queries)
        self._padded = PaddedContext(self._kernel_inputs, num_slots, forward.dtype)  # kept: its mask may be read
        live = forward.cache.kernel_forward
        self._states = None if live is None else StaticKernelForward(live, rows, queries)
        self._load(window, nodes, inputs)
        tables: Any = self._kernel_inputs.block_tables

        def places() -> PagedWindow:
            """A new window for every run, so that the indices derived from it are computed in the graph."""
            return PagedWindow(self._blocks, self._offsets, tables, num_slots, window.block_size, in_place=True)

        self._recorded = RecordedForward(forward, self._nodes, self._padded, places, self._states, record)

    def __call__(self, cache: Any, nodes: NodeInputs, inputs: KernelInputs, features: Features | None) -> ModelOutput:
        """Replays the graph for another step of a cache. The output's tensors belong to the caller."""
        self._load(cache.write_window, nodes, inputs)
        if self._states is not None:
            self._states.load(cache.kernel_forward)
        batch, queries = nodes.tokens.shape
        return self._recorded(
            features, lambda tensor: tensor[:batch, :queries] if tensor.shape[1] == self._queries else tensor[:batch]
        )

    def _load(self, window: PagedWindow, nodes: NodeInputs, inputs: KernelInputs) -> None:
        """Copies the inputs of another step to the tensors that the graph reads."""
        batch = len(nodes.tokens)
        _put(self._nodes.tokens, nodes.tokens, batch)
        if self._nodes.positions is not None:
            assert nodes.positions is not None
            _put(self._nodes.positions, nodes.positions, batch)
        for name, value in (self._nodes.others or {}).items():
            if isinstance(value, torch.Tensor):
                _put(value, (nodes.others or {})[name], batch)
        _put(self._blocks, window.blocks, batch, WASTE_BLOCK)
        _put(self._offsets, window.offsets, batch)
        own = self._kernel_inputs.tensors()
        for name, value in inputs.tensors().items():
            _put(own[name], value, batch, ZERO_BLOCK if name == "block_tables" else 0)


def _put(place: torch.Tensor, values: torch.Tensor, batch: int, elsewhere: int = 0) -> None:
    """Writes values, per row or common to all `batch` rows, into a graph's input, and `elsewhere` into its padding."""
    region = place[(slice(batch), *(slice(size) for size in values.shape[1:]))]
    if region.shape != place.shape:
        place.fill_(elsewhere)
    region.copy_(values)


class PaddedContext:
    """
    The `tree_context` of a captured forward, all of whose layers use the attention kernel.

    Args:
        kernel_inputs (`KernelInputs`): the kernel's inputs, at fixed addresses.
        num_slots (`int`): slots per block table.
        dtype (`torch.dtype`): dtype of the mask that the model gets and the kernel does not read.
    """

    uses_kernel = True
    one_row: Any = None

    def __init__(self, kernel_inputs: KernelInputs, num_slots: int, dtype: torch.dtype):
        self.kernel_inputs, self.was_used = kernel_inputs, False
        rows, queries, _ = kernel_inputs.ancestors.shape
        placeholder = torch.zeros(1, 1, 1, 1, dtype=dtype, device=kernel_inputs.lengths.device)
        self._mask = placeholder.expand(rows, 1, queries, num_slots)

    def mask(
        self, dtype: torch.dtype, device: torch.device, window: int | None = None, chunk: int | None = None
    ) -> torch.Tensor:
        """A mask of the right shape without content, which the kernel does not read."""
        return self._mask

    def model_mask(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """`mask`, since no layer reads it."""
        return self._mask
