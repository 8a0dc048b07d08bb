"""Verification walks in Triton: launches and their sizes."""

from __future__ import annotations

from typing import Any

import torch
import triton

from ..compilation import launcher
from .triton_nodes import filter_kernel, prepare_kernel
from .triton_walks import rejection_walk_kernel, target_walk_kernel


LARGEST_BLOCK = 16384
BINS = 4096
SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Number of low bits of float32 that values of each dtype do not use."""
STAGES = {torch.bfloat16: 3, torch.float16: 3, torch.float32: 2}
"""Pipeline stages by dtype: blocks in flight, the one in work included; more do not fit into shared memory."""
FEWEST_NODES, FEWEST_DEPTHS = 64, 16
"""Smallest block sizes over nodes and path, so that trees of usual sizes share kernels, which are slow to compile."""
KEPT = 1024
"""Most tokens kept by filters with which a walk works in registers."""
PREPARED_NODES = 264
"""Most nodes of a batch for which parallel programs compute the sums of all nodes before the walks."""


def launch_greedy_walk(logits, tokens, parents, max_depth, end_tokens, active, path, accepted, next_tokens) -> None:
    """See `hf_specdec_kernels.greedy_walk`; writes to the last three."""
    results = (path, accepted, next_tokens)
    launch_target_walk(logits, tokens, parents, None, max_depth, None, None, None, end_tokens, active, *results)


def launch_chosen_walk(chosen, tokens, parents, max_depth, end_tokens, active, path, accepted, next_tokens) -> None:
    """See `hf_specdec_kernels.chosen_walk`; writes to the last three."""
    if chosen.shape[0] == 0:
        return
    launcher(target_walk_kernel, (chosen.shape[0],))(
        **_no_target(tokens),
        **_tree(tokens, parents, active),
        **_walk(tokens, max_depth, end_tokens),
        chosen=chosen.contiguous(),
        path=path,
        accepted=accepted,
        next_tokens=next_tokens,
        CHOSEN=True,
        SAMPLE=False,
    )


def launch_target_walk(
    logits, tokens, parents, uniforms, max_depth, temperature, top_k, top_p, end_tokens, active,
    path, accepted, next_tokens,
) -> None:  # fmt: skip
    """See `hf_specdec_kernels.target_walk`; writes to the last three. Greedy without `uniforms`."""
    if logits.shape[0] == 0:
        return
    samples = uniforms is not None
    target = _target(logits, tokens, parents, temperature, top_k, top_p, active)
    nodes = _prepare(target, _no_draft(tokens)) if samples else _unprepared(target, 0)
    launcher(target_walk_kernel, (logits.shape[0],))(
        **target,
        **nodes,
        **_walk(tokens if uniforms is None else uniforms, max_depth, end_tokens),
        chosen=tokens,
        path=path,
        accepted=accepted,
        next_tokens=next_tokens,
        CHOSEN=False,
        SAMPLE=samples,
    )


def launch_rejection_walk(
    logits, draft_logits, tokens, parents, uniforms, max_depth, draft_index, draft_columns, draft_temperature,
    temperature, top_k, top_p, end_tokens, active, path, accepted, next_tokens,
) -> None:  # fmt: skip
    """See `hf_specdec_kernels.rejection_walk`; writes to the last three."""
    batch, _, vocab = logits.shape
    if batch == 0:
        return
    target = _target(logits, tokens, parents, temperature, top_k, top_p, active)
    draft = {
        "draft_logits": draft_logits,
        "draft_index": tokens if draft_index is None else draft_index,
        "draft_columns": tokens if draft_columns is None else draft_columns.contiguous(),
        "draft_temperature": tokens if draft_temperature is None else draft_temperature.contiguous(),
        "draft_vocab": draft_logits.shape[2],
        "num_parents": draft_logits.shape[1],
        "draft_stride_b": draft_logits.stride(0),
        "draft_stride_n": draft_logits.stride(1),
        "index_stride_b": 0 if draft_index is None else _row_stride(draft_index),
        "DRAFT_TEMPERED": draft_temperature is not None,
        "INDEXED": draft_index is not None,
        "COLUMNS": draft_columns is not None,
    }
    launcher(rejection_walk_kernel, (batch,))(
        **target,
        **draft,
        **_prepare(target, draft | {"DRAFTED": True}),
        **_walk(uniforms, max_depth, end_tokens),
        weights=logits.new_empty(batch, 2, vocab, dtype=torch.float32),
        scores=logits.new_empty(batch, max(vocab, draft_logits.shape[2]), dtype=torch.float32),
        path=path,
        accepted=accepted,
        next_tokens=next_tokens,
    )


def launch_filter_logits(logits, temperature, top_k, top_p, filtered) -> None:
    """See `hf_specdec_kernels.filter_logits`; writes to the last one, which is contiguous."""
    batch, queries, vocab = logits.shape
    if batch * queries == 0:
        return
    top_k, top_p = _filters(logits, top_k, top_p)
    launcher(filter_kernel, (batch * queries,))(
        logits, filtered, logits.new_empty(batch * queries, BINS, dtype=torch.int64),
        logits if temperature is None else temperature.contiguous(), top_k, top_p,
        vocab, queries, *logits.stride()[:2], TEMPERED=temperature is not None, **_sizes(logits),
    )  # fmt: skip


def _filters(logits, top_k, top_p) -> tuple[torch.Tensor, torch.Tensor]:
    """Both filters of every row, if one is given: what is absent keeps all tokens."""
    batch = logits.shape[0]
    top_k = logits.new_zeros(batch, dtype=torch.int32) if top_k is None else top_k.contiguous()
    return top_k, logits.new_ones(batch, dtype=torch.float32) if top_p is None else top_p.contiguous()


def _sizes(logits: torch.Tensor) -> dict[str, int]:
    """Sizes of the passes of one program over a vocabulary."""
    block = min(max(triton.next_power_of_2(logits.shape[-1]), 64), LARGEST_BLOCK)
    return {
        "SHIFT": SHIFTS[logits.dtype],
        "BLOCK": block,  # a larger block has more loads in flight
        "BINS": BINS,
        "STAGES": STAGES[logits.dtype],
        "num_warps": min(32, max(4, block // 512)),
    }


def _target(logits, tokens, parents, temperature, top_k, top_p, active) -> dict[str, Any]:
    """The arguments of tree and target that all kernels take, by name; placeholders for absent ones are never read."""
    filtered = top_k is not None or top_p is not None
    top_k, top_p = _filters(logits, top_k, top_p) if filtered else (tokens, tokens)
    return {
        "logits": logits,
        "temperature": tokens if temperature is None else temperature.contiguous(),
        "top_k": top_k,
        "top_p": top_p,
        "vocab": logits.shape[2],
        "logits_stride_b": logits.stride(0),
        "logits_stride_n": logits.stride(1),
        "FILTERED": filtered,
        "TEMPERED": temperature is not None,
        **_tree(tokens, parents, active),
        **_sizes(logits),
    }


def _tree(tokens, parents, active) -> dict[str, Any]:
    num_nodes = tokens.shape[1]
    return {
        "tokens": tokens,
        "parents": parents,
        "active": tokens if active is None else active.contiguous(),
        "num_nodes": num_nodes,
        "tokens_stride_b": tokens.stride(0),
        "parents_stride_b": _row_stride(parents),
        "ACTIVE": active is not None,
        "BLOCK_NODES": max(FEWEST_NODES, triton.next_power_of_2(num_nodes)),
    }


def _no_target(tokens: torch.Tensor) -> dict[str, Any]:
    """The arguments of logits, in a walk that reads none: one warp is enough for it."""
    tensors = dict.fromkeys(("logits", "temperature", "top_k", "top_p", "bins", "sums", "edges", "kept"), tokens)
    numbers = dict.fromkeys(("vocab", "logits_stride_b", "logits_stride_n", "SHIFT", "KEPT", "BINS", "STAGES"), 0)
    flags = dict.fromkeys(("FILTERED", "TEMPERED", "PREPARED"), False)
    return tensors | numbers | flags | {"BLOCK": 1, "num_warps": 1}


def _no_draft(tokens: torch.Tensor) -> dict[str, Any]:
    tensors = dict.fromkeys(("draft_logits", "draft_index", "draft_columns", "draft_temperature"), tokens)
    numbers = dict.fromkeys(("draft_vocab", "num_parents", "draft_stride_b", "draft_stride_n", "index_stride_b"), 0)
    flags = dict.fromkeys(("DRAFTED", "DRAFT_TEMPERED", "INDEXED", "COLUMNS"), False)
    return tensors | numbers | flags


def _prepare(target: dict[str, Any], draft: dict[str, Any]) -> dict[str, Any]:
    """The walks' arguments for sums of p and q, computed here if the nodes are few, and for the filters' bins."""
    logits, num_nodes = target["logits"], target["num_nodes"]
    batch = logits.shape[0]
    if batch * num_nodes > PREPARED_NODES:
        return _unprepared(target, batch)
    nodes = _unprepared(target, batch * num_nodes) | {
        "sums": logits.new_empty(batch, num_nodes, 4, dtype=torch.float32),
        "edges": logits.new_empty(batch, num_nodes, 3, dtype=torch.int32),
        "PREPARED": True,
    }
    if target["FILTERED"]:
        nodes["kept"] = logits.new_empty(batch, num_nodes, KEPT, dtype=torch.int32)
    launcher(prepare_kernel, (num_nodes, batch))(
        **target, **draft, **{name: nodes[name] for name in ("bins", "sums", "edges", "kept", "KEPT")}
    )
    return nodes


def _unprepared(target: dict[str, Any], searches: int) -> dict[str, Any]:
    """The walks' arguments without sums computed beforehand, with bins for `searches` filter searches at once."""
    logits = target["logits"]
    bins = logits.new_empty(searches, BINS, dtype=torch.int64) if target["FILTERED"] else logits
    kept = logits.new_empty(0, dtype=torch.int32)
    return {"bins": bins, "sums": logits, "edges": logits, "kept": kept, "KEPT": KEPT, "PREPARED": False}


def _walk(uniforms: torch.Tensor, max_depth: int, end_tokens: torch.Tensor | None) -> dict[str, Any]:
    """The walks' arguments for random numbers, depth and end tokens."""
    return {
        "uniforms": uniforms,
        "uniforms_stride_b": uniforms.stride(0),
        "end_tokens": uniforms if end_tokens is None else end_tokens,
        "max_depth": max_depth,
        "num_end_tokens": 0 if end_tokens is None else len(end_tokens),
        "BLOCK_PATH": max(FEWEST_DEPTHS, triton.next_power_of_2(max_depth + 1)),
        "BLOCK_ENDS": 1 if end_tokens is None else triton.next_power_of_2(len(end_tokens)),
    }


def _row_stride(tensor: torch.Tensor) -> int:
    """The stride along rows; 0 for a tensor that all rows share."""
    return 0 if tensor.shape[0] == 1 else tensor.stride(0)
