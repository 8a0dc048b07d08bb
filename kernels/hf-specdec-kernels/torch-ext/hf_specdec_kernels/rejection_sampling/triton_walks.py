"""Kernels of the walks: one program for each row, from the root to the end of its walk."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kept import draw_kept, load_kept, next_child, test_kept
from .triton_nodes import child_with, prepared, sums_of_p
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


@triton.jit
def _is_end(end_tokens, num_end_tokens, token, BLOCK_ENDS: tl.constexpr):
    """Whether `token` is an end token, as 1 or 0."""
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


SIZES_OF_TREES = (
    *("num_nodes", "num_parents", "max_depth", "num_end_tokens"),
    *("tokens_stride_b", "parents_stride_b", "uniforms_stride_b", "index_stride_b"),
)
"""Arguments that differ between trees; kernels are not specialised on their values."""


@triton.jit(do_not_specialize=[name for name in SIZES_OF_TREES if name not in ("num_parents", "index_stride_b")])
def target_walk_kernel(
    logits, chosen, tokens, parents, uniforms, temperature, top_k, top_p, end_tokens, active, bins, sums, edges, kept,
    path, accepted, next_tokens, vocab, num_nodes, max_depth, num_end_tokens,
    logits_stride_b, logits_stride_n, tokens_stride_b, parents_stride_b, uniforms_stride_b,
    CHOSEN: tl.constexpr, SAMPLE: tl.constexpr, FILTERED: tl.constexpr, TEMPERED: tl.constexpr, ACTIVE: tl.constexpr,
    PREPARED: tl.constexpr, SHIFT: tl.constexpr, KEPT: tl.constexpr,
    BLOCK: tl.constexpr, BINS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_NODES: tl.constexpr, BLOCK_PATH: tl.constexpr, BLOCK_ENDS: tl.constexpr,
):  # fmt: skip
    """
    Program (row): at each node takes the target's argmax, with SAMPLE a draw, or with CHOSEN the token that was chosen
    there; descends to a child with it.
    """
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
        if CHOSEN:
            token = tl.load(chosen + row * num_nodes + node).to(tl.int32)
        elif SAMPLE:
            number = node * 0
            place = row * num_nodes + node
            uniform = tl.load(uniforms + row * uniforms_stride_b + node)
            if PREPARED:
                highest, total, threshold, first_tied, number = prepared(sums + 4 * place, edges + 3 * place, FILTERED)
            else:
                highest, total, threshold, first_tied = sums_of_p(
                    at_node, bins, top_k + row, top_p + row, vocab, heat, FILTERED, SHIFT, BLOCK, BINS, STAGES
                )
            if number > 0:
                at, p = load_kept(at_node, kept + place * KEPT, number, highest, heat, KEPT)
                token = draw_kept(at, p, tl.sum(p, axis=0), uniform, KEPT)
            else:
                token = draw(
                    at_node, at_node, vocab, highest, heat, threshold, first_tied, total, uniform,
                    False, FILTERED, SHIFT, BLOCK,
                )  # fmt: skip
        else:
            token = argmax(at_node, vocab, BLOCK)
        child = child_with(tokens, parents, node, token, num_nodes, BLOCK_NODES)
        if (child < num_nodes) & (depth < max_depth):
            depth += 1
            node = child
            nodes_of_path = tl.where(places == depth, node, nodes_of_path)
            walking = 1 - _is_end(end_tokens, num_end_tokens, token, BLOCK_ENDS)
        else:
            next_token = token
            walking = walking * 0
    _store_walk(path, accepted, next_tokens, row, nodes_of_path, depth, next_token, walks, max_depth, BLOCK_PATH)


@triton.jit(do_not_specialize=SIZES_OF_TREES)
def rejection_walk_kernel(
    logits, draft_logits, tokens, parents, uniforms, draft_index, draft_columns, draft_temperature,
    temperature, top_k, top_p, end_tokens, active, weights, scores, bins, sums, edges, kept,
    path, accepted, next_tokens, vocab, draft_vocab, num_nodes, num_parents, max_depth, num_end_tokens,
    logits_stride_b, logits_stride_n, draft_stride_b, draft_stride_n,
    tokens_stride_b, parents_stride_b, uniforms_stride_b, index_stride_b,
    FILTERED: tl.constexpr, TEMPERED: tl.constexpr, DRAFT_TEMPERED: tl.constexpr, ACTIVE: tl.constexpr,
    INDEXED: tl.constexpr, COLUMNS: tl.constexpr,
    PREPARED: tl.constexpr, SHIFT: tl.constexpr, KEPT: tl.constexpr,
    BLOCK: tl.constexpr, BINS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_NODES: tl.constexpr, BLOCK_PATH: tl.constexpr, BLOCK_ENDS: tl.constexpr,
):  # fmt: skip
    """
    Program (row): recursive rejection sampling. Until a child of a node is refused, p and q are computed from the
    logits, and only their sums are kept. From then on `weights` has two rows of float32 for p, the current one (not
    normalised) and one for the next residual; `scores` has log q, in which refused tokens are set to -inf. Where
    filters have kept few tokens, p stays in registers; see `test_kept`.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * logits_stride_b
    draft_logits += row.to(tl.int64) * draft_stride_b
    tokens += row * tokens_stride_b
    parents += row * parents_stride_b
    uniforms += row * uniforms_stride_b
    weights += row.to(tl.int64) * 2 * vocab
    scores += row.to(tl.int64) * tl.maximum(vocab, draft_vocab)
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
        here = row * num_nodes + node
        number = node * 0
        if PREPARED:
            highest, total, threshold, first_tied, number = prepared(sums + 4 * here, edges + 3 * here, FILTERED)
        else:
            highest, total, threshold, first_tied = sums_of_p(
                at_node, bins, top_k + row, top_p + row, vocab, heat, FILTERED, SHIFT, BLOCK, BINS, STAGES
            )

        child = node * 0 + num_nodes
        place = tl.load(draft_index + row * index_stride_b + node).to(tl.int32) if INDEXED else node
        draft = draft_logits + place.to(tl.int64) * draft_stride_n
        q_highest, q_total = highest, total
        if (place >= 0) & (place < num_parents) & (depth < max_depth):
            child = next_child(tokens, parents, node, node, num_nodes, BLOCK_NODES)
            if child < num_nodes:
                if PREPARED:
                    q_highest, q_total = tl.load(sums + 4 * here + 2), tl.load(sums + 4 * here + 3)
                else:
                    q_highest, q_total = softmax_sums(draft, draft_columns, vocab, draft_heat, COLUMNS, BLOCK, STAGES)

        found = node * 0
        refused = node * 0
        in_force = node * 0  # the row of `weights` with the current p
        drawn = node * 0
        if number > 0:
            child, drawn = test_kept(
                at_node, draft, draft_columns, scores, kept + here * KEPT, number, tokens, parents, uniforms,
                node, child, num_nodes, vocab, draft_vocab, highest, heat, q_highest, q_total, draft_heat,
                COLUMNS, KEPT, BLOCK, BLOCK_NODES,
            )  # fmt: skip
            found = (child < num_nodes).to(tl.int32)
        while (number == 0) & (child < num_nodes) & (found == 0):
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
                    # Where the residual is empty, p and q differ by rounding only, and p is kept.
                    tl.debug_barrier()  # all threads are done with the previous node's p and q
                    if refused == 0:
                        left, q_highest, q_total = write_first_residual(
                            at_node, draft, draft_columns, weights, scores, vocab, token,
                            highest, total, heat, threshold, first_tied, q_highest, q_total, draft_heat,
                            FILTERED, COLUMNS, SHIFT, BLOCK // 2, STAGES,
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
                            scores, vocab, token, total, q_highest, q_total, BLOCK // 2, STAGES,
                        )  # fmt: skip
                        tl.debug_barrier()  # all threads have read the score that is overwritten now
                        tl.store(scores + token, float("-inf"))
                        if left > 0.0:
                            in_force = 1 - in_force
                            total = left
                    tl.debug_barrier()
                    refused += 1
            if found == 0:
                child = next_child(tokens, parents, node, child, num_nodes, BLOCK_NODES)

        if found > 0:
            depth += 1
            node = child
            nodes_of_path = tl.where(places == depth, node, nodes_of_path)
            walking = 1 - _is_end(end_tokens, num_end_tokens, tl.load(tokens + child), BLOCK_ENDS)
        else:
            uniform = tl.load(uniforms)
            if number > 0:
                next_token = drawn
            elif refused > 0:
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
