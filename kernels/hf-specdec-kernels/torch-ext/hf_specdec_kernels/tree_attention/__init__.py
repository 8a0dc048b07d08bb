"""Attention of tree nodes over cached keys and values."""

from __future__ import annotations

import torch

from .._ops import register, run
from ..checks import INTEGERS, check, check_device, check_dtype, check_shape
from .masks import NODES_PER_WORD, pack_ancestors
from .naive import tree_attention_naive


__all__ = ["pack_ancestors", "tree_attention", "tree_attention_naive", "unchecked"]

LARGEST_HEAD_DIM = 512
"""The largest head dimension for which the Triton kernel is compiled; larger ones run in plain PyTorch."""


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    ancestors: torch.Tensor,
    *,
    num_nodes: int | None = None,
    first_slots: torch.Tensor | None = None,
    query_depths: torch.Tensor | None = None,
    node_depths: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Attention of a tree's nodes over the committed slots of their row and over their ancestors in the tree.

    Slots `first_slots[b]` to `lengths[b] - 1` of row b hold committed tokens, slots `lengths[b]` to
    `lengths[b] + num_nodes - 1` the tree's nodes, whose keys and values must have been written before.

    On CUDA, keys and values are split over programs as in Flash-Decoding
    (https://pytorch.org/blog/flash-decoding/), with the online softmax of arXiv 2205.14135 in float32; the nodes and
    the query heads of one K/V head share a program, so that K/V are read once and never repeated. No value is read on
    the host, and the launch depends on shapes only: the call can be captured in a CUDA graph (after a first call that
    compiles it). Heads of more than `LARGEST_HEAD_DIM` dimensions run in plain PyTorch, and can be captured, too.

    Args:
        query (`torch.Tensor` of shape `[batch, heads, queries, head_dim]`): float32, float16 or bfloat16 (float64 on
            the CPU), any strides.
        key (`torch.Tensor` of shape `[batch, kv_heads, capacity, head_dim]`): keys in the dtype of `query`, any
            strides; with `block_tables`, `[num_blocks, kv_heads, block_size, head_dim]`.
        value (`torch.Tensor` of shape `[batch, kv_heads, capacity, value_dim]`): values in the dtype of `query`, any
            strides; with `block_tables`, `[num_blocks, kv_heads, block_size, value_dim]`.
        lengths (`torch.Tensor` of shape `[batch]`, int32 or int64): committed slots, padding included.
        ancestors (`torch.Tensor` of shape `[1 or batch, queries, ceil(num_nodes / 64)]`, int64): packed mask of
            `pack_ancestors`; bit j % 64 of word j // 64 says whether a query attends to node j. The output of a query
            that attends to nothing is zero.
        num_nodes (`int`, *optional*, defaults to `queries`): nodes after the committed slots; more than the queries
            if earlier levels of a growing tree are in the cache already. Nodes past the cache's last slot, or past the
            last column of `block_tables`, have no keys.
        first_slots (`torch.Tensor` of shape `[batch]`, int32 or int64, *optional*): the first slot that holds a token,
            where rows are padded on the left; 0 by default.
        query_depths (`torch.Tensor` of shape `[1 or batch, queries]`, int32 or int64, *optional*): depth of every
            query, 0 for the position right after the committed slots. Needed with a `window`.
        node_depths (`torch.Tensor` of shape `[1 or batch, num_nodes]`, int32 or int64, *optional*, defaults to
            `query_depths`): depth of every node.
        block_tables (`torch.Tensor` of shape `[batch, max_blocks]`, int32 or int64, *optional*): block table of a
            paged cache; entry i of a row is the block with its slots from `i * block_size` on.
        sinks (`torch.Tensor` of shape `[heads]`, *optional*): attention sinks, scores without a value that take part
            in the softmax (as in gpt-oss).
        scale (`float`, *optional*, defaults to `head_dim ** -0.5`): factor of the scores, positive.
        window (`int`, *optional*): a query attends to keys less than this many positions before it. A node's position
            is the first uncommitted slot's position plus the node's depth.
        softcap (`float`, *optional*): scores become `softcap * tanh(score / softcap)` (Gemma 2).
        num_splits (`int`, *optional*): programs that share the keys of one row and K/V head; by default chosen from
            the shapes, `window` and the number of multiprocessors.
        out (`torch.Tensor` of shape `[batch, queries, heads, value_dim]`, *optional*): tensor for the result.

    Returns:
        `torch.Tensor`: `[batch, queries, heads, value_dim]` in the dtype of `query`.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    num_nodes = query.shape[2] if num_nodes is None else num_nodes
    _check(query, key, value, lengths, ancestors, num_nodes, first_slots, block_tables, sinks, scale, window, softcap)
    node_depths = query_depths if node_depths is None else node_depths
    _check_depths(query, num_nodes, query_depths, node_depths, window)
    batch, heads, queries, head_dim = query.shape
    shape = (batch, queries, heads, value.shape[3])
    if out is None:
        out = query.new_empty(shape)
    check("out", out, query.device, (query.dtype,), *shape)
    scale = head_dim**-0.5 if scale is None else float(scale)
    run(
        operator, query, key, value, lengths, ancestors, num_nodes, first_slots, query_depths, node_depths,
        block_tables, sinks, scale, window, None if softcap is None else float(softcap), num_splits, out,
    )  # fmt: skip
    return out


operator = register(
    tree_attention_naive,
    results=("out",),
    suits=lambda query, key, value, *others: max(query.shape[3], value.shape[3]) <= LARGEST_HEAD_DIM,
)


def unchecked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    ancestors: torch.Tensor,
    *,
    first_slots: torch.Tensor,
    query_depths: torch.Tensor,
    node_depths: torch.Tensor,
    block_tables: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """`tree_attention` over as many nodes as have depths, which does not check its arguments."""
    batch, heads, queries, head_dim = query.shape
    out = query.new_empty(batch, queries, heads, value.shape[3])
    scale = head_dim**-0.5 if scale is None else scale
    run(
        operator, query, key, value, lengths, ancestors, node_depths.shape[1], first_slots, query_depths, node_depths,
        block_tables, sinks, scale, window, softcap, None, out,
    )  # fmt: skip
    return out


def _check(
    query, key, value, lengths, ancestors, num_nodes, first_slots, block_tables, sinks, scale, window, softcap
) -> None:
    check_shape("query", query, None, None, None, None)
    batch, heads, queries, head_dim = query.shape
    floats = (torch.bfloat16, torch.float16, torch.float32) + ((torch.float64,) if query.device.type == "cpu" else ())
    check_dtype("query", query, floats)
    rows = batch if block_tables is None else None
    check_shape("key", key, rows, None, None, head_dim)
    check_shape("value", value, key.shape[0], key.shape[1], key.shape[2], None)
    if key.shape[1] == 0 or heads % key.shape[1]:
        raise ValueError(f"`key` has {key.shape[1]} heads; {heads} query heads must be a multiple of it.")
    if num_nodes < 1 <= queries:
        raise ValueError(f"`num_nodes` is {num_nodes}; it must be positive. Queries are nodes themselves.")
    for name, tensor in (("key", key), ("value", value)):
        check_dtype(name, tensor, (query.dtype,))
        check_device(name, tensor, query.device)
    check("lengths", lengths, query.device, INTEGERS, batch)
    words = -(-num_nodes // NODES_PER_WORD)
    check("ancestors", ancestors, query.device, (torch.int64,), (1, batch), queries, words)
    check("first_slots", first_slots, query.device, INTEGERS, batch)
    check("block_tables", block_tables, query.device, INTEGERS, batch, None)
    check("sinks", sinks, query.device, None, heads)
    for name, number in (("scale", scale), ("window", window), ("softcap", softcap)):
        if number is not None and number <= 0:
            raise ValueError(f"`{name}` is {number}; pass a positive number, or None.")


def _check_depths(query, num_nodes, query_depths, node_depths, window) -> None:
    batch, queries = query.shape[0], query.shape[2]
    if window is not None and query_depths is None:
        raise ValueError("`query_depths` is None, but a `window` needs positions; pass the depths of the nodes.")
    check("query_depths", query_depths, query.device, INTEGERS, (1, batch), queries)
    check("node_depths", node_depths, query.device, INTEGERS, (1, batch), num_nodes)
