"""Sums of p and q and thresholds of p's filters at a node, which a walk needs before it tests children."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_filters import filters, sort_keys
from .triton_kept import next_child, write_kept
from .triton_passes import softmax_sums


@triton.jit
def child_with(tokens, parents, node, token, num_nodes, BLOCK_NODES: tl.constexpr):
    """The first child of `node` with a given token, or `num_nodes`."""
    nodes = tl.arange(0, BLOCK_NODES)
    inside = (nodes > 0) & (nodes < num_nodes)
    is_child = (tl.load(parents + nodes, mask=inside, other=-1) == node) & inside
    held = tl.load(tokens + nodes, mask=inside, other=-1)
    return tl.min(tl.where(is_child & (held == token), nodes, num_nodes), axis=0)


@triton.jit
def sums_of_p(
    logits, bins, top_k, top_p, vocab, temperature,
    FILTERED: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The largest logit, the sum of the weights that the filters keep, and the filters' threshold and first tie."""
    highest, total = softmax_sums(logits, logits, vocab, temperature, False, BLOCK, STAGES)
    threshold, first_tied = vocab * 0, vocab * 0
    if FILTERED:
        threshold, first_tied, total = filters(
            logits, bins, vocab, highest, total, temperature, tl.load(top_k), tl.load(top_p),
            SHIFT, BLOCK, BINS, STAGES,
        )  # fmt: skip
    return highest, total, threshold, first_tied


@triton.jit(do_not_specialize=["num_nodes", "num_parents", "tokens_stride_b", "parents_stride_b", "index_stride_b"])
def prepare_kernel(
    logits, draft_logits, tokens, parents, draft_index, draft_columns, draft_temperature,
    temperature, top_k, top_p, active, bins, sums, edges, kept, vocab, draft_vocab, num_nodes, num_parents,
    logits_stride_b, logits_stride_n, draft_stride_b, draft_stride_n,
    tokens_stride_b, parents_stride_b, index_stride_b,
    DRAFTED: tl.constexpr, FILTERED: tl.constexpr, TEMPERED: tl.constexpr, DRAFT_TEMPERED: tl.constexpr,
    ACTIVE: tl.constexpr, INDEXED: tl.constexpr, COLUMNS: tl.constexpr, SHIFT: tl.constexpr, KEPT: tl.constexpr,
    BLOCK: tl.constexpr, BINS: tl.constexpr, STAGES: tl.constexpr, BLOCK_NODES: tl.constexpr,
):  # fmt: skip
    """
    Program (node, row): writes a node's `sums` (the highest score and the total of p and of q), its `edges` (p's
    threshold and first tie, and the number of tokens that are `kept`), and the tokens that filters have `kept`; see
    `write_kept`. Writes nothing for nodes that no walk can reach.
    """
    node = tl.program_id(0)
    row = tl.program_id(1)
    tokens += row * tokens_stride_b
    comes = (node == 0) | (tl.load(tokens + node) >= 0)
    if ACTIVE:
        comes = comes & (tl.load(active + row) != 0)
    if comes:
        place = row * num_nodes + node
        heat = tl.load(temperature + row).to(tl.float32) if TEMPERED else 1.0
        at_node = logits + row.to(tl.int64) * logits_stride_b + node.to(tl.int64) * logits_stride_n
        highest, total, threshold, first_tied = sums_of_p(
            at_node, bins + place.to(tl.int64) * BINS, top_k + row, top_p + row, vocab, heat,
            FILTERED, SHIFT, BLOCK, BINS, STAGES,
        )  # fmt: skip
        tl.store(sums + 4 * place, highest)
        tl.store(sums + 4 * place + 1, total)
        tl.store(edges + 3 * place, threshold)
        tl.store(edges + 3 * place + 1, first_tied)
        if FILTERED:
            number = place * 0
            k = tl.load(top_k + row)
            if ((k > 0) & (k < vocab)) | (tl.load(top_p + row) < 1.0):
                number = write_kept(at_node, kept + place * KEPT, vocab, threshold, first_tied, SHIFT, KEPT, BLOCK)
            tl.store(edges + 3 * place + 2, number)
        if DRAFTED:
            parent = tl.load(draft_index + row * index_stride_b + node).to(tl.int32) if INDEXED else node
            child = next_child(tokens, parents + row * parents_stride_b, node, node, num_nodes, BLOCK_NODES)
            if (parent >= 0) & (parent < num_parents) & (child < num_nodes):
                draft_heat = tl.load(draft_temperature + row).to(tl.float32) if DRAFT_TEMPERED else 1.0
                draft = draft_logits + row.to(tl.int64) * draft_stride_b + parent.to(tl.int64) * draft_stride_n
                q_highest, q_total = softmax_sums(draft, draft, draft_vocab, draft_heat, False, BLOCK, STAGES)
                tl.store(sums + 4 * place + 2, q_highest)
                tl.store(sums + 4 * place + 3, q_total)


@triton.jit
def prepared(sums, edges, FILTERED: tl.constexpr):
    """The highest score, total, threshold, first tie and number of kept tokens that `prepare_kernel` wrote."""
    threshold = tl.load(edges)
    number = threshold * 0
    if FILTERED:
        number = tl.load(edges + 2)
    return tl.load(sums), tl.load(sums + 1), threshold, tl.load(edges + 1), number


@triton.jit(do_not_specialize=["queries"])
def filter_kernel(
    logits, filtered, bins, temperature, top_k, top_p, vocab, queries, logits_stride_b, logits_stride_q,
    TEMPERED: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (query of a row): copies logits, with -inf for tokens that the filters hide."""
    query = tl.program_id(0).to(tl.int64)
    row = query // queries
    logits += row * logits_stride_b + (query % queries) * logits_stride_q
    heat = tl.load(temperature + row) if TEMPERED else 1.0
    _, _, threshold, first_tied = sums_of_p(
        logits, bins + query * BINS, top_k + row, top_p + row, vocab, heat, True, SHIFT, BLOCK, BINS, STAGES
    )
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found = tl.load(logits + at, mask=at < vocab, other=0.0)
        keys = sort_keys(found.to(tl.float32), SHIFT)
        kept = (keys > threshold) | ((keys == threshold) & (at >= first_tied)) | (found != found)
        tl.store(filtered + query * vocab + at, tl.where(kept, found, float("-inf")), mask=at < vocab)
