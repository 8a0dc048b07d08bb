"""Verification of draft trees: walks from the root that accept draft tokens and choose the next token."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .._ops import ops, register
from .checking import check_chosen, check_draft, check_logits, check_nodes, check_rows, check_tree, check_uniforms
from .filters import filter_logits_naive
from .naive import chosen_walk_naive, greedy_walk_naive, rejection_walk_naive, target_walk_naive
from .walks import Walks


__all__ = [
    "Walks",
    "chosen_walk",
    "chosen_walk_naive",
    "draft_columns",
    "filter_logits",
    "filter_logits_naive",
    "greedy_walk",
    "greedy_walk_naive",
    "rejection_walk",
    "rejection_walk_naive",
    "target_walk",
    "target_walk_naive",
]


for _walk in (greedy_walk_naive, chosen_walk_naive, target_walk_naive, rejection_walk_naive):
    register(_walk, results=Walks._fields)
register(filter_logits_naive, results=("filtered",))


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
    Verifies every row's tree greedily: walks from the root along the target's argmax (the lowest id among equals).

    A child with the argmax token is accepted; without such a child the walk ends with that token. Only the logits of
    visited nodes are read. On CUDA nothing is read on the host, and the launch depends on shapes only.

    Args:
        logits (`torch.Tensor` of shape `[batch, nodes, vocab]`): the target's logits, float32, float16 or bfloat16;
            node 0 is the root. The last stride is 1. What comes of NaN is not defined.
        tokens (`torch.Tensor` of shape `[batch, nodes]`, int64): the token of every node, -1 for a void node; the
            root's token is ignored.
        parents (`torch.Tensor` of shape `[1 or batch, nodes]`, int64): the parent of every node, a lower number; the
            root's is 0. Siblings are tried in the order of their numbers.
        max_depth (`int`): largest depth of a walk; deeper nodes are ignored.
        end_tokens (`torch.Tensor` of shape `[ends]`, int64, *optional*): tokens that end a walk, without a next token,
            once accepted.
        active (`torch.Tensor` of shape `[batch]`, bool, *optional*): rows that walk; all rows by default.
        out (`Walks`, *optional*): contiguous tensors for the result.

    Returns:
        `Walks`: `path` `[batch, max_depth + 1]`, `accepted` `[batch]` and `next_tokens` `[batch]`.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    check_logits(logits)
    return _walk_along(ops.greedy_walk, logits, tokens, parents, max_depth, end_tokens, active, out)


def chosen_walk(
    chosen: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    *,
    max_depth: int,
    end_tokens: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    out: Walks | None = None,
) -> Walks:
    """
    Verifies every row's tree by tokens that were chosen at each node beforehand: `greedy_walk` with these in place of
    the argmax. With tokens that `draw_children` has drawn from p, one for each node, by the noise of its position, the
    result is exact for children that were drawn by the same noise, too.

    Args:
        chosen (`torch.Tensor` of shape `[batch, nodes]`, int64): the target's next token at every node.
        tokens, parents, max_depth, end_tokens, active, out: see `greedy_walk`.

    Returns:
        `Walks`: `path` `[batch, max_depth + 1]`, `accepted` `[batch]` and `next_tokens` `[batch]`.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    check_chosen(chosen)
    return _walk_along(ops.chosen_walk, chosen, tokens, parents, max_depth, end_tokens, active, out)


def _walk_along(
    operator: Callable[..., None],
    of_nodes: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    max_depth: int,
    end_tokens: torch.Tensor | None,
    active: torch.Tensor | None,
    out: Walks | None,
) -> Walks:
    """Walks by one tensor `of_nodes` (`[batch, nodes, …]`, checked) alone, from which `operator` takes the tokens."""
    check_nodes(of_nodes, tokens, parents, max_depth, end_tokens, active)
    out = _walks(of_nodes, max_depth, out)
    operator(of_nodes, tokens, parents, max_depth, end_tokens, active, *out)
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
    Verifies every row's tree with tokens drawn from p, the softmax of the target's logits after temperature, top-k and
    top-p (in this order, as in transformers).

    A child with the drawn token is accepted; without such a child the walk ends with that token. The result is exact
    for any children, as long as they were not chosen with the same random numbers. The token drawn at node i is the
    first one at which the running sum of p exceeds `uniforms[:, i]`.

    Args:
        logits, tokens, parents, max_depth, end_tokens, active, out: see `greedy_walk`.
        uniforms (`torch.Tensor` of shape `[batch, nodes]`): random numbers in [0, 1), float64 or float32, drawn anew
            for every call, as by `torch.rand`.
        temperature (`torch.Tensor` of shape `[batch]`, float32, *optional*): positive divisor of the logits.
        top_k (`torch.Tensor` of shape `[batch]`, int32 or int64, *optional*): k; only tokens at least as likely as the
            k-th best are possible; 0 for all.
        top_p (`torch.Tensor` of shape `[batch]`, float32, *optional*): only the fewest best tokens after top-k whose
            probability reaches this value are possible; 1 for all. Among equally likely tokens, higher ids are kept,
            as with a stable sort.

    Returns:
        `Walks`: `path` `[batch, max_depth + 1]`, `accepted` `[batch]` and `next_tokens` `[batch]`.

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
    Verifies every row's tree by recursive rejection sampling without replacement (arXiv 2402.14160, 2402.12374).

    The children of a node must have been drawn without replacement from q, the softmax of the draft's logits, and be
    numbered in the order of the draws.

    At a node with p₀ = p and q₀ = q, the i-th child x is accepted with probability min(1, pᵢ(x) / qᵢ(x)). On a refusal
    pᵢ₊₁ = normalise(max(pᵢ − qᵢ, 0)), or pᵢ if this residual is numerically empty, and qᵢ₊₁ is qᵢ without x,
    renormalised. When no child is accepted, the next token is drawn from the last p. Node i is accepted if
    `uniforms[:, i] * q < p`; the final draw uses `uniforms[:, 0]`. On CUDA, probabilities and their sums are float32
    and the tests float64; on a CPU all are float64.

    Args:
        logits, tokens, parents, max_depth, end_tokens, active, out: see `greedy_walk`.
        uniforms, temperature, top_k, top_p: see `target_walk`.
        draft_logits (`torch.Tensor` of shape `[batch, distributions, vocab or draft vocab]`): the draft's logits from
            which the children were drawn, float32, float16 or bfloat16, -inf outside the support. The last stride is
            1.
        draft_index (`torch.Tensor` of shape `[1 or batch, nodes]`, int64, *optional*): for every node, the number of
            the distribution of its children; -1 if there is none, and then the children are not accepted. By default
            distribution i belongs to node i.
        draft_columns (`torch.Tensor` of shape `[vocab]`, int32 or int64, *optional*): for a smaller draft vocabulary,
            the draft's column of every target token, -1 if there is none; see the function `draft_columns`.
        draft_temperature (`torch.Tensor` of shape `[batch]`, float32, *optional*): positive divisor of the draft's
            logits.

    Returns:
        `Walks`: `path` `[batch, max_depth + 1]`, `accepted` `[batch]` and `next_tokens` `[batch]`.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    check_tree(logits, tokens, parents, max_depth, end_tokens, active)
    check_uniforms(logits, uniforms)
    check_draft(logits, draft_logits, draft_index, draft_columns)
    check_rows(logits, temperature=temperature, top_k=top_k, top_p=top_p, draft_temperature=draft_temperature)
    out = _walks(logits, max_depth, out)
    ops.rejection_walk(
        logits, draft_logits, tokens, parents, uniforms, max_depth, draft_index, draft_columns, draft_temperature,
        temperature, top_k, top_p, end_tokens, active, *out,
    )  # fmt: skip
    return out


def filter_logits(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Hides the tokens that temperature, top-k and top-p (in this order, as in transformers) leave out: the logits of the
    others as they are, not divided by the temperature.

    On CUDA this is one launch, which finds thresholds by a radix search and sorts nothing. The kept tokens are those
    of transformers' `TopKLogitsWarper` (all equal to the k-th best stay) and `TopPLogitsWarper`; which of equally
    likely tokens top-p keeps depends on the sort there, and here it is those of higher ids, as with a stable sort. A
    row with NaN or +inf keeps them.

    Args:
        logits (`torch.Tensor` of shape `[batch, queries, vocab]`): float32, float16 or bfloat16. The last stride is 1.
        temperature, top_k, top_p: values of every row; see `target_walk`.

    Returns:
        `torch.Tensor`: `[batch, queries, vocab]`, of the logits' dtype, -inf for hidden tokens.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    check_logits(logits)
    check_rows(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    filtered = logits.new_empty(logits.shape)
    ops.filter_logits(logits, temperature, top_k, top_p, filtered)
    return filtered


def draft_columns(vocabulary: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """
    The inverse of a draft vocabulary: the draft's column of every target token.

    Args:
        vocabulary (`torch.Tensor` of shape `[draft vocab]`, int64): the target's token id of every column.
        vocab_size (`int`): size of the target's vocabulary.

    Returns:
        `torch.Tensor`: `[vocab_size]` int64, the column of every token, or -1.
    """
    columns = torch.full((vocab_size,), -1, dtype=torch.int64, device=vocabulary.device)
    return columns.scatter(0, vocabulary, torch.arange(len(vocabulary), device=vocabulary.device))


def _walks(logits: torch.Tensor, max_depth: int, out: Walks | None) -> Walks:
    """The tensors for the result: `out` after checks, or new ones."""
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
