"""Single forwards of a step, and the matmuls that are their lower bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from hf_specdec.cache.blocks import ZERO_BLOCK, BlockPool, BlockTable
from hf_specdec.cache.device_paged_cache import DevicePagedCache
from hf_specdec.compiling.layers import MOST_SHAPES
from hf_specdec.engine.target import InFlightTarget
from hf_specdec.forwards.node_inputs import causal_chain
from hf_specdec.forwards.outputs import over_trees
from hf_specdec.graphs.sizes import FEWEST_BLOCKS, next_power_of_two
from hf_specdec.trees import TokenTree, Topology


BLOCK_SIZE = 32
"""Slots of a block, as in steps of `generate`."""


@contextmanager
def prompt_forward(
    model: PreTrainedModel, ids: torch.Tensor, more: int = 0
) -> Iterator[tuple[Callable[[], object], InFlightTarget, list[BlockTable]]]:
    """
    Yields the forward of a chunk of prompts, with its target and block tables. It may be repeated, because it commits
    nothing.

    Args:
        model (`PreTrainedModel`): the model.
        ids (`torch.Tensor` of shape `[rows, tokens]`, int64): the chunks.
        more (`int`): tokens of each row for which there is room after them.
    """
    rows, length = ids.shape
    blocks = -(-(length + more) // BLOCK_SIZE)
    pool, tables = BlockPool(rows * blocks, BLOCK_SIZE), [BlockTable() for _ in range(rows)]
    for table in tables:
        pool.reserve(table, length + more)
    target = InFlightTarget(model, pool, max_requests=rows, cuda_graphs="auto")
    chain = causal_chain(length, model.device)
    with (
        torch.no_grad(),
        over_trees(model),
        torch._dynamo.config.patch(recompile_limit=MOST_SHAPES),
    ):
        target.cache.seat(tables)
        yield lambda: target.forward(ids, *chain, logits_to_keep=1, counts=[length] * rows), target, tables


@contextmanager
def forward_after(
    model: PreTrainedModel,
    ids: torch.Tensor,
    tree: TokenTree | None,
    compiles: bool = False,
    fewest_blocks: int = FEWEST_BLOCKS,
) -> Iterator[Callable[[], object]]:
    """
    Yields the forward of the root and a tree's nodes after a context, as steps run it, with random tokens.

    The forward may be repeated, because it commits nothing.

    Args:
        model (`PreTrainedModel`): the model.
        ids (`torch.Tensor` of shape `[rows, tokens]`, int64): the contexts.
        tree (`TokenTree`, *optional*): the tree; None for the root alone.
        compiles (`bool`, *optional*, defaults to `False`): whether the forward is compiled.
        fewest_blocks (`int`, *optional*): blocks of a row for which the forward has room at least.
    """
    topology, length = Topology.of_tree(tree, model.device), ids.shape[1]
    nodes = topology.num_nodes + 1
    rows, blocks = len(ids), -(-(length + nodes) // BLOCK_SIZE)
    tokens = torch.randint(model.config.vocab_size, (rows, nodes), device=model.device)
    with prompt_forward(model, ids, nodes) as (read, target, tables):
        read()
        target.cache.keep_text([length] * rows)
        forward = target.forward
        if forward.has_kernel:
            width = max(fewest_blocks, next_power_of_two(blocks + 1))
            padded = [table.blocks + [ZERO_BLOCK] * (width - blocks) for table in tables]
            slots = torch.tensor(target.cache.note_states(tables), dtype=torch.long, device=model.device)
            cache = DevicePagedCache(target.cache, torch.tensor(padded, device=model.device), slots)
            cache.max_depth = topology.depth
            cache.write_tables = cache.writable_tables()
            cache.at(target.cache.lengths_tensor)
            zero = torch.zeros(rows, dtype=torch.long, device=model.device)
            forward = forward.over(cache, zero, zero)
            forward.compiles = compiles
            forward.compiles_layers = bool(target.cache.state_layers)  # as steps do
        yield lambda: forward(tokens, topology.ancestors, topology.depths)


def matmuls(model: PreTrainedModel, num_tokens: int) -> Callable[[], object]:
    """
    A function that multiplies random inputs for `num_tokens` tokens by every weight matrix of a model, the lm_head
    included, once each.
    """
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    weight = layers[0].weight
    inputs = {
        size: torch.randn(num_tokens, size, dtype=weight.dtype, device=weight.device)
        for size in {layer.in_features for layer in layers}
    }

    def run() -> None:
        with torch.no_grad():
            for layer in layers:
                torch.nn.functional.linear(inputs[layer.in_features], layer.weight)

    return run
