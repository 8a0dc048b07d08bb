"""
The gated delta rule over a tree: Gated DeltaNet (arXiv 2412.06464), and Kimi Delta Attention (arXiv 2510.26692), whose
decay is per key channel.
"""

from __future__ import annotations

import torch

from .._ops import ops, register
from ..checks import check, check_shape
from ..pending import (
    ACTIVATIONS,
    SINGLE,
    DeltaPending,
    PendingPath,
    check_ancestors,
    check_capacity,
    check_heads,
    check_pending,
    check_rows,
)
from .naive import commit_delta_rule_naive, tree_delta_rule_naive


__all__ = ["commit_delta_rule", "commit_delta_rule_naive", "tree_delta_rule", "tree_delta_rule_naive"]


def tree_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    pending: DeltaPending,
    ancestors: torch.Tensor,
    rows: PendingPath,
    *,
    normalize: bool = True,
    scale: float | None = None,
    max_depth: int | None = None,
) -> torch.Tensor:
    """
    Commits what was kept of the step before to the states, then computes the outputs of a tree's nodes.

    At every node, from the state of its parent, S ← e^g S, u = β (v − Sᵀk), S ← S + k uᵀ, and the output is
    scale · Sᵀq. No node's state is in memory: with G_i the sum of g over node i and its ancestors, and
    L_ij = β_i (k_i·k_j) e^(G_i − G_j) for ancestors j of i, u = (I + L)⁻¹ β (v − e^G Sᵀk). On CUDA one launch
    for 32 nodes, the first of which reads a state once and writes it once; where nothing was kept, it is only read.

    Args:
        query, key (`torch.Tensor` of shape `[batch, nodes, key_heads, key_dim]`): at most 64 nodes, each after its
            parent; `key_dim` at most 256. Values of a node that are not finite count as 0, here and below.
        value (`torch.Tensor` of shape `[batch, nodes, heads, value_dim]`): of the dtype of `query`; `key_heads`
            divides `heads`, neighbours share a head of keys.
        decay (`torch.Tensor` of shape `[batch, nodes, heads]` or `[batch, nodes, heads, key_dim]`, float32): g, at
            most 0.
        beta (`torch.Tensor` of shape `[batch, nodes, heads]`): β, of any floating dtype.
        states (`torch.Tensor` of shape `[slots, heads, key_dim, value_dim]`, float32): changed in place.
        pending ([`DeltaPending`]): what is pending of the step before; replaced by the nodes of this one. Its keys are
            those given here. Its memory need not be initialized.
        ancestors (`torch.Tensor` of shape `[1 or batch, nodes, 1]`, int64): `pack_ancestors` of the tree; a node is
            among its own ancestors.
        rows ([`PendingPath`]): the slots of the rows, and the nodes that were kept.
        normalize (`bool`): whether queries and keys are divided by their L2 norms.
        scale (`float`, *optional*): 1/√key_dim by default.
        max_depth (`int`, *optional*): most ancestors that a node has beside itself, to save work. Where it is too low,
            outputs are wrong. Any number by default.

    Returns:
        `torch.Tensor`: `[batch, nodes, heads, value_dim]`, of the dtype of `value`.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    _check(query, key, value, decay, beta, states, pending, ancestors, rows)
    out = value.new_empty(value.shape)
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    ops.tree_delta_rule(
        query,
        key,
        value,
        decay,
        beta,
        states,
        *pending,
        ancestors,
        *rows,
        normalize,
        float(scale),
        key.shape[1] - 1 if max_depth is None else max_depth,
        out,
    )
    return out


def commit_delta_rule(
    states: torch.Tensor, pending: DeltaPending, rows: PendingPath, *, normalize: bool = True
) -> None:
    """
    Commits what was kept of the last step, as the next step would: for who reads the states. Afterwards `rows.counts`
    of these rows must be 0.

    Args: see `tree_delta_rule`.
    """
    check_shape("states", states, None, None, None, None)
    check("states", states, states.device, SINGLE, *states.shape)
    check_pending(pending, states, *states.shape[1:])
    check_rows(rows, len(states), None, states.device)
    ops.commit_delta_rule(states, *pending, *rows, normalize)


register(
    tree_delta_rule_naive,
    results=("out",),
    mutated=("states", "keys", "deltas", "decays"),
)
register(commit_delta_rule_naive, mutated=("states",))


def _check(query, key, value, decay, beta, states, pending, ancestors, rows) -> None:
    check_shape("key", key, None, None, None, None)
    batch, nodes, key_heads, key_dim = key.shape
    check_shape("value", value, batch, nodes, None, None)
    heads, value_dim = value.shape[2:]
    device = key.device
    check_heads(heads, key_heads, "key")
    check("key", key, device, ACTIVATIONS, *key.shape)
    check("query", query, device, (key.dtype,), *key.shape)
    check("value", value, device, (key.dtype,), *value.shape)
    check("decay", decay, device, SINGLE, batch, nodes, heads, *(() if decay.dim() == 3 else (key_dim,)))
    check("beta", beta, device, ACTIVATIONS, batch, nodes, heads)
    check_shape("states", states, None, heads, key_dim, value_dim)
    check("states", states, device, SINGLE, *states.shape)
    check_pending(pending, states, heads, key_dim, value_dim)
    check("pending.keys", pending.keys, device, (key.dtype,), 2, len(states), None, key_heads, key_dim)
    check_shape("pending.decays", pending.decays, None, None, None, *decay.shape[2:])
    check_capacity("pending", pending.keys.shape[2], nodes)
    check_ancestors(ancestors, batch, nodes, device)
    check_rows(rows, len(states), batch, device)
