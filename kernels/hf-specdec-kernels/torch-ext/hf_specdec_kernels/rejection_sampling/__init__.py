"""Walks down a tree of draft tokens, which decide what is kept."""

from __future__ import annotations

import torch

from .._ops import ops
from . import registration  # noqa: F401  (registers the operators)
from .checking import check_draft, check_rows, check_tree, check_uniforms
from .naive import greedy_walk_naive, rejection_walk_naive, target_walk_naive
from .walks import Walks


__all__ = [
    "Walks",
    "draft_columns",
    "greedy_walk",
    "greedy_walk_naive",
    "rejection_walk",
    "rejection_walk_naive",
    "target_walk",
    "target_walk_naive",
]


def greedy_walk(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    *,
    max_depth: int,
    end_tokens: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    out: Walks | None = None,
) -> Walks:
    """
    Walks every row down its tree along the target's argmax, the first of equals: a child that holds it is accepted,
    else the walk ends with that token. Only the logits of visited nodes are read. Nothing is read on the host, and the
    launch depends on shapes alone.

    Args:
        logits (`torch.Tensor` of shape `[batch, nodes, vocab]`): the target's, float32, float16 or bfloat16; node 0 is
            the root. The last stride is 1.
        tokens (`torch.Tensor` of shape `[batch, nodes]`, int64): the token of every node, -1 where it does not count;
            the root's does not matter.
        parents (`torch.Tensor` of shape `[1 or batch, nodes]`, int64): the parent of every node, a lower number; the
            root's is 0. Siblings are tried in the order of their numbers.
        max_depth (`int`): the deepest that a walk goes; nodes below are as if they were not there.
        end_tokens (`torch.Tensor` of shape `[ends]`, int64, *optional*): a walk ends, without another token, when it
            has accepted one of these.
        active (`torch.Tensor` of shape `[batch]`, bool, *optional*): rows that walk; the others rest.
        out (`Walks`, *optional*): where to write the result.

    Returns:
        `Walks`: `path` `[batch, max_depth + 1]`, `accepted` `[batch]` and `next_tokens` `[batch]`.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    check_tree(logits, tokens, parents, max_depth, end_tokens, active)
    out = _walks(logits, max_depth, out)
    ops.greedy_walk(logits, tokens, parents, max_depth, end_tokens, active, *out)
    return out


def target_walk(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    max_depth: int,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    end_tokens: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    out: Walks | None = None,
) -> Walks:
    """
    Walks every row down its tree along tokens drawn from p, the softmax of the target's logits after temperature,
    top-k and top-p (in this order, as in transformers): a child that holds the token drawn is accepted, else the walk
    ends with it. Exact whatever the children are, as long as they were not chosen by the same random numbers.

    The token at node i is the first one at which the running sum of p exceeds `uniforms[:, i]`.

    Args:
        logits, tokens, parents, max_depth, end_tokens, active, out: as in `greedy_walk`.
        uniforms (`torch.Tensor` of shape `[batch, nodes]`): random numbers in [0, 1), float64 or float32, drawn anew
            for every call, as by `torch.rand`.
        temperature (`torch.Tensor` of shape `[batch]`, float32, *optional*): logits are divided by it; positive.
        top_k (`torch.Tensor` of shape `[batch]`, int32 or int64, *optional*): only tokens as good as the k-th best are
            possible; 0: all.
        top_p (`torch.Tensor` of shape `[batch]`, float32, *optional*): of these only the fewest best ones whose
            probability reaches it; 1: all. Of equally good ones, those of a higher number, as a stable
            sort leaves them.

    Returns:
        `Walks`: as in `greedy_walk`.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    check_tree(logits, tokens, parents, max_depth, end_tokens, active)
    check_uniforms(logits, uniforms)
    check_rows(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    out = _walks(logits, max_depth, out)
    ops.target_walk(logits, tokens, parents, uniforms, max_depth, temperature, top_k, top_p, end_tokens, active, *out)
    return out


def rejection_walk(
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    max_depth: int,
    draft_index: torch.Tensor | None = None,
    draft_columns: torch.Tensor | None = None,
    draft_temperature: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    end_tokens: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    out: Walks | None = None,
) -> Walks:
    """
    Walks every row down its tree by recursive rejection sampling without replacement (arXiv 2402.14160, 2402.05406),
    for children that were drawn from the draft's q, the softmax of its logits, without replacement and stand in the
    order of the draws.

    At a node with p₀ = p and q₀ = q, the i-th child x is accepted with probability min(1, pᵢ(x) / qᵢ(x)). On a refusal
    pᵢ₊₁ = normalise(max(pᵢ − qᵢ, 0)), or pᵢ if that is numerically empty, and qᵢ₊₁ is qᵢ without x, renormalised. When
    no child is accepted, the next token is drawn from the last p. Child i is accepted if `uniforms[:, i] * q < p`; the
    draw at the end takes `uniforms[:, 0]`. Probabilities are float32, sums of them float32, the tests float64.

    Args:
        logits, tokens, parents, max_depth, end_tokens, active, out: as in `greedy_walk`.
        uniforms, temperature, top_k, top_p: as in `target_walk`.
        draft_logits (`torch.Tensor` of shape `[batch, distributions, vocab or draft vocab]`): what the children were
            drawn from, float32, float16 or bfloat16, -inf outside its support. The last stride is 1.
        draft_index (`torch.Tensor` of shape `[1 or batch, nodes]`, int64, *optional*): for every node, which of the
            distributions its children come from; -1 if none, and then they are not accepted. By default distribution i
            is node i's.
        draft_columns (`torch.Tensor` of shape `[vocab]`, int32 or int64, *optional*): for a draft of a smaller
            vocabulary, the column of every token of the target, -1 if it has none; see `draft_columns`.
        draft_temperature (`torch.Tensor` of shape `[batch]`, float32, *optional*): the draft's logits are divided by
            it.

    Returns:
        `Walks`: as in `greedy_walk`.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    check_tree(logits, tokens, parents, max_depth, end_tokens, active)
    check_uniforms(logits, uniforms)
    check_draft(logits, draft_logits, draft_index, draft_columns)
    check_rows(logits, temperature=temperature, top_k=top_k, top_p=top_p, draft_temperature=draft_temperature)
    out = _walks(logits, max_depth, out)
    ops.rejection_walk(
        logits,
        draft_logits,
        tokens,
        parents,
        uniforms,
        max_depth,
        draft_index,
        draft_columns,
        draft_temperature,
        temperature,
        top_k,
        top_p,
        end_tokens,
        active,
        *out,
    )
    return out


def draft_columns(vocabulary: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """
    The inverse of a draft's vocabulary.

    Args:
        vocabulary (`torch.Tensor` of shape `[draft vocab]`, int64): the target's token of every column.
        vocab_size (`int`): the target's.

    Returns:
        `torch.Tensor`: `[vocab_size]` int64, the column of every token, or -1.
    """
    columns = torch.full((vocab_size,), -1, dtype=torch.int64, device=vocabulary.device)
    return columns.scatter(0, vocabulary, torch.arange(len(vocabulary), device=vocabulary.device))


def _walks(logits: torch.Tensor, max_depth: int, out: Walks | None) -> Walks:
    """Room for the result, if none was given."""
    batch = logits.shape[0]
    shapes = ((batch, max_depth + 1), (batch,), (batch,))
    if out is None:
        return Walks(*(logits.new_empty(shape, dtype=torch.int64) for shape in shapes))
    for name, tensor, shape in zip(Walks._fields, out, shapes, strict=True):
        fits = tuple(tensor.shape) == shape and tensor.dtype == torch.int64 and tensor.device == logits.device
        if not fits or not tensor.is_contiguous():
            raise ValueError(
                f"`out.{name}` is a {tensor.dtype} tensor of shape {list(tensor.shape)} on {tensor.device}; it must "
                f"be a contiguous int64 tensor of shape {list(shape)} on {logits.device}."
            )
    return out
