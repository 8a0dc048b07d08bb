"""The recurrence of Mamba-2 over a tree (state space duality, arXiv 2405.21060)."""

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
from .naive import commit_ssd_naive, tree_ssd_naive


__all__ = ["commit_ssd", "commit_ssd_naive", "tree_ssd", "tree_ssd_naive"]


def tree_ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803, the paper's name, as below
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    states: torch.Tensor,
    pending: DeltaPending,
    ancestors: torch.Tensor,
    rows: PendingPath,
    *,
    D: torch.Tensor | None = None,  # noqa: N803
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> torch.Tensor:
    """
    Commits what was kept of the step before to the states, then computes the outputs of a tree's nodes.

    At every node, from the state of its parent, S ← e^(A dt) S + dt x Bᵀ, and the output is S C + D x. No node's state
    is in memory. One launch on CUDA, which reads a state once and writes it once; where nothing was kept, it is only
    read.

    Args:
        x (`torch.Tensor` of shape `[batch, nodes, heads, head_dim]`): at most 64 nodes, each after its parent. Values
            of a node that are not finite count as 0, here and below.
        dt (`torch.Tensor` of shape `[batch, nodes, heads]`): step sizes, of any floating dtype, computed in float32.
        A (`torch.Tensor` of shape `[heads]`, float32): negative.
        B, C (`torch.Tensor` of shape `[batch, nodes, groups, state_size]`): of the dtype of `x`; `groups` divides
            `heads`, neighbours share a group; `state_size` at most 256.
        states (`torch.Tensor` of shape `[slots, heads, head_dim, state_size]`, float32): changed in place.
        pending ([`DeltaPending`]): what is pending of the step before; replaced by the nodes of this one. `keys` are
            the B, of shape `[2, slots, capacity, groups, state_size]`, `deltas` the dt x. Need not be initialized.
        ancestors (`torch.Tensor` of shape `[1 or batch, nodes, 1]`, int64): `pack_ancestors` of the tree; a node is
            among its own ancestors.
        rows ([`PendingPath`]): the slots of the rows, and the nodes that were kept.
        D (`torch.Tensor` of shape `[heads]`, *optional*): weight of the inputs in the outputs.
        dt_bias (`torch.Tensor` of shape `[heads]`, *optional*): added to `dt`.
        dt_softplus (`bool`): whether step sizes are the softplus of that.
        dt_limit (`tuple[float, float]`): least and largest step size.

    Returns:
        `torch.Tensor`: `[batch, nodes, heads, head_dim]`, of the dtype of `x`.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    check_shape("x", x, None, None, None, None)
    batch, nodes, heads, head_dim = x.shape
    device = x.device
    check("x", x, device, ACTIVATIONS, *x.shape)
    check("dt", dt, device, ACTIVATIONS, batch, nodes, heads)
    check("A", A, device, SINGLE, heads)
    check("B", B, device, (x.dtype,), batch, nodes, None, None)
    check("C", C, device, (x.dtype,), *B.shape)
    check_heads(heads, B.shape[2], "B")
    check("D", D, device, ACTIVATIONS, heads)
    check("dt_bias", dt_bias, device, ACTIVATIONS, heads)
    check_shape("states", states, None, heads, head_dim, B.shape[3])
    check("states", states, device, SINGLE, *states.shape)
    _check_pending(pending, states)
    check("pending.keys", pending.keys, device, (x.dtype,), 2, len(states), None, *B.shape[2:])
    check_capacity("pending", pending.keys.shape[2], nodes)
    check_ancestors(ancestors, batch, nodes, device)
    check_rows(rows, len(states), batch, device)
    out = x.new_empty(x.shape)
    limits = map(float, dt_limit)
    ops.tree_ssd(
        x, dt, A, B, C, states, *pending, ancestors, *rows, D, dt_bias, dt_softplus, *limits, out
    )  # fmt: skip
    return out


def commit_ssd(states: torch.Tensor, pending: DeltaPending, rows: PendingPath) -> None:
    """
    Commits what was kept of the last step, as the next step would: for who reads the states. Afterwards `rows.counts`
    of these rows must be 0.

    Args: see `tree_ssd`.
    """
    check_shape("states", states, None, None, None, None)
    check("states", states, states.device, SINGLE, *states.shape)
    _check_pending(pending, states)
    check_rows(rows, len(states), None, states.device)
    ops.commit_ssd(states, *pending, *rows)


register(tree_ssd_naive, results=("out",), mutated=("states", "keys", "deltas", "decays"))
register(commit_ssd_naive, mutated=("states",))


def _check_pending(pending, states) -> None:
    check_pending(pending, states, states.shape[1], states.shape[3], states.shape[2])
    check_shape("pending.decays", pending.decays, None, None, None, states.shape[1])
