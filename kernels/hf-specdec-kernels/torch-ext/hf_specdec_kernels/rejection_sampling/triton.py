"""Walks down a tree in Triton: one program for each row, from the root to where its walk ends."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_filters import filters
from .triton_passes import (
    argmax,
    draw,
    kept_weights,
    load_scores,
    softmax_sums,
    write_first_residual,
    write_residual,
    write_weights,
)


# ---------------------------------------------------------------------------------------------------- along a tree


@triton.jit
def _child_with(tokens, parents, node, token, num_nodes, BLOCK_NODES: tl.constexpr):
    """The first child of a node that holds a token, or `num_nodes`."""
    nodes = tl.arange(0, BLOCK_NODES)
    inside = (nodes > 0) & (nodes < num_nodes)
    is_child = (tl.load(parents + nodes, mask=inside, other=-1) == node) & inside
    held = tl.load(tokens + nodes, mask=inside, other=-1)
    return tl.min(tl.where(is_child & (held == token), nodes, num_nodes), axis=0)


@triton.jit
def _next_child(tokens, parents, node, after, num_nodes, BLOCK_NODES: tl.constexpr):
    """The first child of a node behind another one that counts, or `num_nodes`."""
    nodes = tl.arange(0, BLOCK_NODES)
    inside = (nodes > after) & (nodes < num_nodes)
    is_child = (tl.load(parents + nodes, mask=inside, other=-1) == node) & inside
    counts = tl.load(tokens + nodes, mask=inside, other=-1) >= 0
    return tl.min(tl.where(is_child & counts, nodes, num_nodes), axis=0)


@triton.jit
def _is_end(end_tokens, num_end_tokens, token, BLOCK_ENDS: tl.constexpr):
    """1 if a token ends a text, else 0."""
    at = tl.arange(0, BLOCK_ENDS)
    ends = tl.load(end_tokens + at, mask=at < num_end_tokens, other=-1)
    return tl.max((ends == token).to(tl.int32), axis=0)


@triton.jit
def _store_walk(
    path, accepted, next_tokens, row, nodes_of_path, depth, next_token, walks, max_depth, BLOCK_PATH: tl.constexpr
):
    places = tl.arange(0, BLOCK_PATH)
    tl.store(path + row * (max_depth + 1) + places, nodes_of_path.to(tl.int64), mask=places <= max_depth)
    tl.store(accepted + row, tl.where(walks, depth, -1).to(tl.int64))
    tl.store(next_tokens + row, next_token.to(tl.int64))


# --------------------------------------------------------------------------------------------------------- the walks


@triton.jit(do_not_specialize=["num_nodes", "max_depth", "num_end_tokens"])
def _walk_along_target_kernel(
    logits, tokens, parents, uniforms, temperature, top_k, top_p, end_tokens, active, bins,
    path, accepted, next_tokens, vocab, num_nodes, max_depth, num_end_tokens,
    logits_stride_b, logits_stride_n, tokens_stride_b, parents_stride_b, uniforms_stride_b,
    SAMPLE: tl.constexpr, FILTERED: tl.constexpr, TEMPERED: tl.constexpr, ACTIVE: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr, BINS: tl.constexpr, STAGES: tl.constexpr, BLOCK_NODES: tl.constexpr, BLOCK_PATH: tl.constexpr,
    BLOCK_ENDS: tl.constexpr,
):  # fmt: skip
    """At every node the target's token, its argmax or drawn; down to the child that holds it."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * logits_stride_b
    tokens += row * tokens_stride_b
    parents += row * parents_stride_b
    bins += row * BINS
    places = tl.arange(0, BLOCK_PATH)
    nodes_of_path = places
    heat = tl.load(temperature + row).to(tl.float32) if TEMPERED else 1.0
    walks = (tl.load(active + row) != 0) if ACTIVE else row >= 0
    walking = walks.to(tl.int32)
    node = row * 0
    depth = row * 0
    next_token = row * 0 - 1
    while walking > 0:
        at_node = logits + node.to(tl.int64) * logits_stride_n
        if SAMPLE:
            highest, total = softmax_sums(at_node, at_node, vocab, heat, False, BLOCK, STAGES)
            threshold, first_tied = node, node
            if FILTERED:
                threshold, first_tied, total = filters(
                    at_node, bins, vocab, highest, total, heat, tl.load(top_k + row), tl.load(top_p + row),
                    SHIFT, BLOCK, BINS, STAGES,
                )  # fmt: skip
            token = draw(
                at_node, at_node, vocab, highest, heat, threshold, first_tied, total,
                tl.load(uniforms + row * uniforms_stride_b + node), False, FILTERED, SHIFT, BLOCK,
            )  # fmt: skip
        else:
            token = argmax(at_node, vocab, BLOCK)
        child = _child_with(tokens, parents, node, token, num_nodes, BLOCK_NODES)
        if (child < num_nodes) & (depth < max_depth):
            depth += 1
            node = child
            nodes_of_path = tl.where(places == depth, node, nodes_of_path)
            walking = 1 - _is_end(end_tokens, num_end_tokens, token, BLOCK_ENDS)
        else:
            next_token = token
            walking = walking * 0
    _store_walk(path, accepted, next_tokens, row, nodes_of_path, depth, next_token, walks, max_depth, BLOCK_PATH)


@triton.jit(do_not_specialize=["num_nodes", "num_parents", "max_depth", "num_end_tokens"])
def _rejection_walk_kernel(
    logits, draft_logits, tokens, parents, uniforms, draft_index, draft_columns, draft_temperature,
    temperature, top_k, top_p, end_tokens, active, weights, scores, bins,
    path, accepted, next_tokens, vocab, num_nodes, num_parents, max_depth, num_end_tokens,
    logits_stride_b, logits_stride_n, draft_stride_b, draft_stride_n,
    tokens_stride_b, parents_stride_b, uniforms_stride_b, index_stride_b,
    FILTERED: tl.constexpr, TEMPERED: tl.constexpr, DRAFT_TEMPERED: tl.constexpr, ACTIVE: tl.constexpr,
    INDEXED: tl.constexpr, COLUMNS: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr, BINS: tl.constexpr, STAGES: tl.constexpr, BLOCK_NODES: tl.constexpr, BLOCK_PATH: tl.constexpr,
    BLOCK_ENDS: tl.constexpr,
):  # fmt: skip
    """
    Recursive rejection. Until a child of a node is refused, p and q are those of the logits, and only their sums are
    computed. Then `weights` has two rows of float32 for p: the one in force, not normalised, and the one that the next
    residual goes to; `scores` has one for log q, from which refused tokens are struck.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * logits_stride_b
    draft_logits += row.to(tl.int64) * draft_stride_b
    tokens += row * tokens_stride_b
    parents += row * parents_stride_b
    uniforms += row * uniforms_stride_b
    weights += row.to(tl.int64) * 2 * vocab
    scores += row.to(tl.int64) * vocab
    bins += row * BINS
    places = tl.arange(0, BLOCK_PATH)
    nodes_of_path = places
    heat = tl.load(temperature + row).to(tl.float32) if TEMPERED else 1.0
    draft_heat = tl.load(draft_temperature + row).to(tl.float32) if DRAFT_TEMPERED else 1.0
    walks = (tl.load(active + row) != 0) if ACTIVE else row >= 0
    walking = walks.to(tl.int32)
    node = row * 0
    depth = row * 0
    next_token = row * 0 - 1
    while walking > 0:
        at_node = logits + node.to(tl.int64) * logits_stride_n
        highest, total = softmax_sums(at_node, at_node, vocab, heat, False, BLOCK, STAGES)
        threshold, first_tied = node, node
        if FILTERED:
            threshold, first_tied, total = filters(
                at_node, bins, vocab, highest, total, heat, tl.load(top_k + row), tl.load(top_p + row),
                SHIFT, BLOCK, BINS, STAGES,
            )  # fmt: skip

        child = node * 0 + num_nodes
        place = tl.load(draft_index + row * index_stride_b + node).to(tl.int32) if INDEXED else node
        draft = draft_logits + place.to(tl.int64) * draft_stride_n
        q_highest, q_total = highest, total
        if (place >= 0) & (place < num_parents) & (depth < max_depth):
            child = _next_child(tokens, parents, node, node, num_nodes, BLOCK_NODES)
            if child < num_nodes:
                q_highest, q_total = softmax_sums(draft, draft_columns, vocab, draft_heat, COLUMNS, BLOCK, STAGES)

        found = node * 0
        refused = node * 0
        in_force = node * 0  # which of the two rows of weights
        while (child < num_nodes) & (found == 0):
            token = tl.load(tokens + child)
            if q_highest > float("-inf"):
                if refused == 0:
                    p = kept_weights(
                        tl.load(at_node + token).to(tl.float32), token, vocab, highest, heat, threshold, first_tied,
                        FILTERED, SHIFT,
                    )  # fmt: skip
                    score = load_scores(draft, draft_columns, token, vocab, COLUMNS)
                    q = tl.exp((score - q_highest) / draft_heat)
                else:
                    p = tl.load(weights + in_force.to(tl.int64) * vocab + token)
                    q = tl.exp(tl.load(scores + token) - q_highest)
                uniform = tl.load(uniforms + child).to(tl.float64)
                if uniform * (q / q_total).to(tl.float64) < (p / total).to(tl.float64):
                    found = found + 1
                else:
                    # Where nothing is left, p and q differ by rounding alone, and p it is.
                    tl.debug_barrier()  # nobody reads the last node's p and q any more
                    if refused == 0:
                        left, q_highest, q_total = write_first_residual(
                            at_node, draft, draft_columns, weights, scores, vocab, token,
                            highest, total, heat, threshold, first_tied, q_highest, q_total, draft_heat,
                            FILTERED, COLUMNS, SHIFT, BLOCK,
                        )  # fmt: skip
                        tl.debug_barrier()
                        if left > 0.0:
                            total = left
                        else:
                            write_weights(
                                at_node, weights, vocab, highest, heat, threshold, first_tied, FILTERED, SHIFT, BLOCK
                            )
                    else:
                        left, q_highest, q_total = write_residual(
                            weights + in_force.to(tl.int64) * vocab, weights + (1 - in_force).to(tl.int64) * vocab,
                            scores, vocab, token, total, q_highest, q_total, BLOCK,
                        )  # fmt: skip
                        tl.debug_barrier()  # all have read the score that is struck now
                        tl.store(scores + token, float("-inf"))
                        if left > 0.0:
                            in_force = 1 - in_force
                            total = left
                    tl.debug_barrier()
                    refused += 1
            if found == 0:
                child = _next_child(tokens, parents, node, child, num_nodes, BLOCK_NODES)

        if found > 0:
            depth += 1
            node = child
            nodes_of_path = tl.where(places == depth, node, nodes_of_path)
            walking = 1 - _is_end(end_tokens, num_end_tokens, tl.load(tokens + child), BLOCK_ENDS)
        else:
            uniform = tl.load(uniforms)
            if refused > 0:
                next_token = draw(
                    at_node, weights + in_force.to(tl.int64) * vocab, vocab, highest, heat, threshold, first_tied,
                    total, uniform, True, FILTERED, SHIFT, BLOCK,
                )  # fmt: skip
            else:
                next_token = draw(
                    at_node, weights, vocab, highest, heat, threshold, first_tied, total, uniform,
                    False, FILTERED, SHIFT, BLOCK,
                )  # fmt: skip
            walking = walking * 0
    _store_walk(path, accepted, next_tokens, row, nodes_of_path, depth, next_token, walks, max_depth, BLOCK_PATH)


# ------------------------------------------------------------------------------------------------------- the launches


LARGEST_BLOCK = 16384
BINS = 4096
SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Low bits of float32 that values of these dtypes do not use."""
STAGES = {torch.bfloat16: 3, torch.float16: 3, torch.float32: 2}
"""Blocks under way at once, the one in work included; more do not fit into shared memory."""


def launch_target_walk(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    uniforms: torch.Tensor | None,
    max_depth: int,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    end_tokens: torch.Tensor | None,
    active: torch.Tensor | None,
    path: torch.Tensor,
    accepted: torch.Tensor,
    next_tokens: torch.Tensor,
) -> None:
    """
    Writes to `path`, `accepted` and `next_tokens`; the arguments are those of `hf_specdec_kernels.target_walk`, and
    without `uniforms` those of `greedy_walk`.
    """
    batch, num_nodes, vocab = logits.shape
    if batch == 0:
        return
    sample = uniforms is not None
    top_k, top_p, bins = _filter_arguments(logits, top_k, top_p)
    _walk_along_target_kernel[(batch,)](
        logits, tokens, parents, tokens if uniforms is None else uniforms,
        tokens if temperature is None else temperature.contiguous(), top_k, top_p,
        tokens if end_tokens is None else end_tokens, tokens if active is None else active.contiguous(), bins,
        path, accepted, next_tokens, vocab, num_nodes, max_depth, 0 if end_tokens is None else len(end_tokens),
        *logits.stride()[:2], tokens.stride(0), _row_stride(parents), 0 if uniforms is None else uniforms.stride(0),
        SAMPLE=sample, FILTERED=bins is not logits, TEMPERED=temperature is not None, ACTIVE=active is not None,
        SHIFT=SHIFTS[logits.dtype], STAGES=STAGES[logits.dtype], **_blocks(vocab, num_nodes, max_depth, end_tokens),
    )  # fmt: skip


def launch_rejection_walk(
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    uniforms: torch.Tensor,
    max_depth: int,
    draft_index: torch.Tensor | None,
    draft_columns: torch.Tensor | None,
    draft_temperature: torch.Tensor | None,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    end_tokens: torch.Tensor | None,
    active: torch.Tensor | None,
    path: torch.Tensor,
    accepted: torch.Tensor,
    next_tokens: torch.Tensor,
) -> None:
    """
    Writes to `path`, `accepted` and `next_tokens`; the arguments are those of `hf_specdec_kernels.rejection_walk`.
    """
    batch, num_nodes, vocab = logits.shape
    if batch == 0:
        return
    weights = logits.new_empty(batch, 2, vocab, dtype=torch.float32)
    scores = logits.new_empty(batch, vocab, dtype=torch.float32)
    top_k, top_p, bins = _filter_arguments(logits, top_k, top_p)
    _rejection_walk_kernel[(batch,)](
        logits, draft_logits, tokens, parents, uniforms, tokens if draft_index is None else draft_index,
        tokens if draft_columns is None else draft_columns.contiguous(),
        tokens if draft_temperature is None else draft_temperature.contiguous(),
        tokens if temperature is None else temperature.contiguous(), top_k, top_p,
        tokens if end_tokens is None else end_tokens, tokens if active is None else active.contiguous(),
        weights, scores, bins, path, accepted, next_tokens,
        vocab, num_nodes, draft_logits.shape[1], max_depth, 0 if end_tokens is None else len(end_tokens),
        *logits.stride()[:2], *draft_logits.stride()[:2],
        tokens.stride(0), _row_stride(parents), uniforms.stride(0),
        0 if draft_index is None else _row_stride(draft_index),
        FILTERED=bins is not logits, TEMPERED=temperature is not None, DRAFT_TEMPERED=draft_temperature is not None,
        ACTIVE=active is not None, INDEXED=draft_index is not None, COLUMNS=draft_columns is not None,
        SHIFT=SHIFTS[logits.dtype], STAGES=STAGES[logits.dtype], **_blocks(vocab, num_nodes, max_depth, end_tokens),
    )  # fmt: skip


def _row_stride(tensor: torch.Tensor) -> int:
    """0 for what all rows share."""
    return 0 if tensor.shape[0] == 1 else tensor.stride(0)


def _filter_arguments(
    logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both as tensors, and room to count in; `logits` three times if there is nothing to filter."""
    batch = logits.shape[0]
    if top_k is None and top_p is None:
        return logits, logits, logits
    top_k = logits.new_zeros(batch, dtype=torch.int32) if top_k is None else top_k.contiguous()
    top_p = logits.new_ones(batch, dtype=torch.float32) if top_p is None else top_p.contiguous()
    return top_k, top_p, logits.new_empty(batch, BINS, dtype=torch.int64)


def _blocks(vocab: int, num_nodes: int, max_depth: int, end_tokens: torch.Tensor | None) -> dict[str, int]:
    """Sizes of a launch: the larger a block, the more loads are under way at once."""
    block = min(max(triton.next_power_of_2(vocab), 64), LARGEST_BLOCK)
    return {
        "BLOCK": block,
        "BINS": BINS,
        "BLOCK_NODES": triton.next_power_of_2(num_nodes),
        "BLOCK_PATH": triton.next_power_of_2(max_depth + 1),
        "BLOCK_ENDS": 1 if end_tokens is None else triton.next_power_of_2(len(end_tokens)),
        "num_warps": min(32, max(4, block // 512)),
    }
