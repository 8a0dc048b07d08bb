"""
CUDA graphs of forwards over requests in flight. Requests come and go and their texts grow, so that step sizes hardly
repeat: graphs are captured for fixed sizes, and a forward runs in the next larger one.
"""

from __future__ import annotations

import operator
import time
from functools import partial
from typing import Any, Literal

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput, logging

from ..attention import TreeContext
from ..forwards.chunks import WIDTHS
from ..forwards.node_inputs import NodeInputs
from ..forwards.tree_forward import TreeForward
from ..kernels import kernels_are_installed
from ..ranks import Ranks
from . import RECORDERS, GraphPool, fingerprint_of, obstacle_to_graphs, warn_of_failed_capture
from .exchanges import captured_together
from .paged_forward import PagedForward
from .sizes import FEWEST_BLOCKS, SIZES, next_power_of_two, next_size


logger = logging.get_logger(__name__)

MOST_STEP_QUERIES = 64
"""Most queries per row of a captured forward; longer forwards are prompt chunks."""
NODE_MULTIPLE = 16
"""Nodes per row, including those of earlier levels, are padded to a multiple of this."""
MOST_GRAPHS = 128


class PagedGraphs:
    """
    The CUDA graphs of one model over a `PagedCache`. A forward is captured when its size comes for the second time; if
    a capture fails, the model runs without graphs from then on.

    Args:
        model (`PreTrainedModel`): the model.
        pool (`GraphPool`, *optional*): memory that the graphs of several models share.
    """

    prompt_widths = (*WIDTHS, 1024)
    """Widths in tokens of captured prompt chunks, beside forwards of at most `MOST_STEP_QUERIES` queries."""

    def __init__(self, model: PreTrainedModel, pool: GraphPool | None = None):
        self.model: Any = model
        self.works, self._failed, self._pool = True, False, pool
        self._graphs: dict[Any, PagedForward] = {}
        self._seen: set[Any] = set()
        self._fingerprint: Any = None
        self._ranks = Ranks.of(model)
        self.relies_on_larger = False
        """
        Whether a forward without a graph of its own runs in a larger one that there is, and prompt chunks are never
        captured: others are, ahead of them.
        """

    @classmethod
    def of(
        cls, model: PreTrainedModel, wanted: bool | Literal["auto"], pool: GraphPool | None = None
    ) -> PagedGraphs | None:
        """
        The graphs of a model; None if `wanted` (`SpeculativeConfig.cuda_graphs`) is False, if the model cannot be
        captured, or without the kernels, which attention needs to read K/V by block tables.

        Raises:
            ValueError: if `wanted` is True for a model that cannot be captured.
        """
        if wanted is False or obstacle_to_graphs(model, wanted) is not None or not kernels_are_installed():
            return None
        return cls(model, pool)

    def renew(self, key: Any = None) -> None:
        """
        Drops graphs if weights have moved since their capture, or what else they depend on (`key`) has changed, and
        checks again whether graphs are possible.
        """
        can_work = not self._failed and obstacle_to_graphs(self.model, "auto") is None
        self.works = self._ranks.on_all(can_work)
        fingerprint = fingerprint_of(self.model), key
        if not self._ranks.on_all(fingerprint == self._fingerprint):
            self._graphs.clear()
            self._seen.clear()
            if self._pool is not None:
                self._pool.leave()
        self._fingerprint = fingerprint

    def run(self, forward: TreeForward, nodes: NodeInputs, context: TreeContext) -> ModelOutput | None:
        """Runs a forward by its graph, capturing it if due; None if the forward is to run without a graph."""
        batch, queries = nodes.tokens.shape
        can_run = (
            self.works
            and context.uses_kernel
            and forward.can_be_captured
            and (forward.cache.kernel_forward is not None or not forward.cache.state_layers)
            and (queries <= MOST_STEP_QUERIES or queries in self.prompt_widths)
            and batch <= SIZES[-1]
            and not isinstance(nodes.logits_to_keep, torch.Tensor)
            and (nodes.positions is None or nodes.positions.dim() == 2)
        )
        if not can_run:
            return None
        size = ForwardSize.of(forward, nodes, context)
        features = forward.features
        key = (forward.key, size, _key_of(nodes), None if features is None else features.boundaries)
        captured = self._graphs.get(key)
        if captured is None and self.relies_on_larger:
            captured = None if forward.cache.state_layers else self._larger(key, pads_queries=not _is_exact(nodes))
            if captured is None and queries in self.prompt_widths:
                return None
        if captured is None and (key not in self._seen or len(self._graphs) == MOST_GRAPHS):
            self._seen.add(key)
            return None
        inputs = context.over(context.num_slots, NODE_MULTIPLE).kernel_inputs
        if inputs is None:
            return None
        if captured is None:
            start = time.perf_counter()
            try:
                record = partial(RECORDERS[forward.device.type], pool=self._pool)
                with captured_together(self._ranks):
                    captured = PagedForward(forward, nodes, inputs, size, record)
            except RuntimeError as error:
                self._give_up(error)
                return None
            self._graphs[key] = captured
            rows, queries, *_ = size
            logger.info(
                f"Captured a forward of {type(self.model).__name__}, {rows} rows of {queries} tokens: "
                f"{time.perf_counter() - start:.2f} s."
            )
        return captured(forward.cache, nodes, inputs, features)

    def _larger(self, key: Any, pads_queries: bool) -> PagedForward | None:
        """The smallest graph that differs from a key in its size alone, with more room; None if there is none."""
        _, wanted, *alike = key
        found = [
            (size, graph)
            for (name, size, *others), graph in self._graphs.items()
            if name == key[0] and others == alike and all(map(operator.ge, size, wanted))
            if pads_queries or size[1] == wanted[1]
        ]
        return min(found, key=operator.itemgetter(0), default=(None, None))[1]

    def _give_up(self, error: Exception) -> None:
        self.works, self._failed = False, True
        self._graphs.clear()
        warn_of_failed_capture(self.model, error)


class ForwardSize(tuple[int, int, int, int]):
    """Size of a graph: rows, queries per row, nodes per row, blocks per block table."""

    @classmethod
    def of(cls, forward: TreeForward, nodes: NodeInputs, context: TreeContext) -> ForwardSize:
        """The smallest size that has room for a forward."""
        batch, queries = nodes.tokens.shape
        room = queries if _is_exact(nodes) else next_size(queries)
        num_nodes = -(-context.node_depths.shape[1] // NODE_MULTIPLE) * NODE_MULTIPLE
        window: Any = forward.cache.write_window
        blocks = -(-(window.end + num_nodes) // window.block_size)
        return cls((next_size(batch), room, num_nodes, max(FEWEST_BLOCKS, next_power_of_two(blocks))))


def _is_exact(nodes: NodeInputs) -> bool:
    """Whether no queries may be padded; with `logits_to_keep`, the last ones must be real ones."""
    return nodes.tokens.shape[1] > MOST_STEP_QUERIES or nodes.logits_to_keep not in (0, None)


def _key_of(nodes: NodeInputs) -> Any:
    """Properties of a forward's inputs, other than their size, that one graph can serve only if they are equal."""
    others = tuple(
        (name, (value.shape[2:], value.dtype) if isinstance(value, torch.Tensor) else value)
        for name, value in (nodes.others or {}).items()
    )
    return nodes.positions is None, nodes.logits_to_keep, others
