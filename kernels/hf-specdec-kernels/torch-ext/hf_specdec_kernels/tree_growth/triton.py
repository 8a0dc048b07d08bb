"""
Growth of trees in Triton. One program for each row takes paths from a heap, which it holds in registers: a node's
place there is taken by its next sibling, and its first child gets a new place. Ancestors: one program for each node.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..compilation import launcher
from ..triton_ranking import key_of, nothing, pack, place_of


@triton.jit(do_not_specialize=["levels", "lists", "ranks", "num_nodes"])
def _best_paths_kernel(
    tokens, log_q, following, nodes, parents, levels, lists, ranks, num_nodes,
    HAS_LISTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row)."""
    row = tl.program_id(0)
    entries = row.to(tl.int64) * levels * lists * ranks
    tokens += entries
    log_q += entries
    nodes += row.to(tl.int64) * num_nodes
    parents += row.to(tl.int64) * (num_nodes + 1)
    tl.store(parents, 0)
    places = tl.arange(0, BLOCK)
    first = tl.load(log_q)
    first = tl.where(first == first, first, float("-inf"))
    sums = tl.where(places == 0, first, float("-inf"))
    # Of every place: the sum up to the parent, level, rank and parent, and the list that it is of, over all levels.
    before = tl.zeros([BLOCK], tl.float32)
    level = tl.zeros([BLOCK], tl.int32)
    rank = tl.zeros([BLOCK], tl.int32)
    parent = tl.zeros([BLOCK], tl.int32)
    of_list = tl.zeros([BLOCK], tl.int32)
    for node in range(1, num_nodes + 1):
        winner = tl.max(pack(sums, tl.where(places < node, places, 0x7FFFFFFE)), axis=0)
        is_winner = places == place_of(winner)
        own_sum = key_of(winner)
        own_before = tl.sum(tl.where(is_winner, before, 0.0), axis=0)
        own_level = tl.sum(tl.where(is_winner, level, 0), axis=0)
        own_rank = tl.sum(tl.where(is_winner, rank, 0), axis=0)
        own_parent = tl.sum(tl.where(is_winner, parent, 0), axis=0)
        own_list = tl.sum(tl.where(is_winner, of_list, 0), axis=0)
        entry = own_list * ranks + tl.minimum(own_rank, ranks - 1)
        tl.store(nodes + node - 1, tl.load(tokens + entry))
        tl.store(parents + node, own_parent.to(tl.int64))
        has_sibling = own_rank + 1 < ranks
        sibling = tl.load(log_q + own_list * ranks + own_rank + 1, mask=has_sibling, other=float("-inf"))
        has_child = own_level + 1 < levels
        below = tl.minimum(own_level + 1, levels - 1) * lists
        if HAS_LISTS:
            below += tl.load(following + entries + entry).to(tl.int32)
        child = tl.load(log_q + below * ranks, mask=has_child, other=float("-inf"))
        sibling = own_before + tl.where(sibling == sibling, sibling, float("-inf"))
        child = own_sum + tl.where(child == child, child, float("-inf"))
        is_new = places == node
        sums = tl.where(is_winner, sibling, tl.where(is_new, child, sums))
        before = tl.where(is_new, own_sum, before)
        level = tl.where(is_new, tl.minimum(own_level + 1, levels - 1), level)
        rank = tl.where(is_winner, own_rank + 1, rank)
        parent = tl.where(is_new, node, parent)
        of_list = tl.where(is_new, below, of_list)


def launch_best_paths(tokens, log_q, num_nodes, following, nodes, parents) -> None:
    """See `hf_specdec_kernels.best_paths`; writes to contiguous `nodes` and `parents`."""
    batch, levels, ranks = len(log_q), log_q.shape[1], log_q.shape[-1]
    if batch == 0:
        return
    lists = 1 if following is None else log_q.shape[2]
    block = triton.next_power_of_2(num_nodes + 1)
    launcher(_best_paths_kernel, (batch,))(
        tokens.contiguous(), log_q.contiguous(), None if following is None else following.contiguous(),
        nodes, parents, levels, lists, ranks, num_nodes,
        HAS_LISTS=following is not None, BLOCK=block, num_warps=max(1, min(8, block // 128)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["above", "ranks", "nodes", "count"])
def _choose_nodes_kernel(
    tokens, log_q, path_log_q, ancestors,
    sums, places, chosen_sums, chosen_tokens, parents, chosen_ancestors,
    above, ranks, nodes, count, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (row): see `ChosenNodes`."""
    row = tl.program_id(0).to(tl.int64)
    candidate, column = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    inside = candidate < above * ranks
    first = row * above * ranks
    path = tl.load(path_log_q + row * above + candidate // ranks, mask=inside, other=float("-inf"))
    own = path + tl.load(log_q + first + candidate, mask=inside, other=float("-inf"))
    tl.store(sums + first + candidate, own, mask=inside)
    keys = tl.where(own == own, own, float("-inf"))
    packed = pack(keys, tl.where(inside, candidate, 0x7FFFFFFE))
    width = nodes + count
    for number in range(count):
        winner = tl.max(packed, axis=0)
        place = place_of(winner)
        is_winner = candidate == place
        packed = tl.where(is_winner, nothing(), packed)
        parent, at = place // ranks, row * count + number
        tl.store(places + at, place.to(tl.int64))
        tl.store(chosen_sums + at, tl.load(path_log_q + row * above + parent) + tl.load(log_q + first + place))
        tl.store(chosen_tokens + at, tl.load(tokens + first + place))
        tl.store(parents + at, parent.to(tl.int64))
        inherited = tl.load(ancestors + (row * above + parent) * nodes + column, mask=column < nodes, other=0)
        seen = tl.where(column < nodes, inherited, (column == nodes + number).to(tl.int8))
        tl.store(chosen_ancestors + at * width + column, seen, mask=column < width)


def launch_choose_nodes(tokens, log_q, path_log_q, ancestors, count, *results) -> None:
    """See `hf_specdec_kernels.choose_nodes`; writes to contiguous `results`, the fields of `ChosenNodes`."""
    batch, above, ranks = log_q.shape
    if batch == 0:
        return
    nodes = ancestors.shape[2]
    block = triton.next_power_of_2(above * ranks)
    inputs = [tensor.contiguous() for tensor in (tokens, log_q, path_log_q, ancestors)]
    everything = (tensor.view(torch.int8) if tensor.dtype == torch.bool else tensor for tensor in (*inputs, *results))
    launcher(_choose_nodes_kernel, (batch,))(
        *everything, above, ranks, nodes, count,
        BLOCK=block, WIDTH=triton.next_power_of_2(nodes + count), num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["nodes"])
def _tree_ancestors_kernel(parents, depths, ancestors, nodes, BLOCK: tl.constexpr):
    """Program (node, row)."""
    node, row = tl.program_id(0), tl.program_id(1)
    parents += row.to(tl.int64) * nodes
    places = tl.arange(0, BLOCK)
    is_above = (places == node) | (places == 0)
    depth, above = node * 0, node
    while above > 0:
        above = tl.load(parents + above).to(tl.int32)
        is_above = is_above | (places == above)
        depth += 1
    at = row.to(tl.int64) * nodes + node
    tl.store(depths + at, depth.to(tl.int64))
    tl.store(ancestors + at * nodes + places, is_above.to(tl.int8), mask=places < nodes)


def launch_tree_ancestors(parents, depth, depths, ancestors) -> None:
    """See `hf_specdec_kernels.tree_ancestors`; writes to contiguous `depths` and `ancestors`."""
    rows, nodes = parents.shape
    if rows == 0:
        return
    launcher(_tree_ancestors_kernel, (nodes, rows))(
        parents.contiguous(), depths, ancestors.view(torch.int8), nodes,
        BLOCK=triton.next_power_of_2(nodes), num_warps=1,
    )  # fmt: skip
