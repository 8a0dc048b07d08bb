"""The selective scan of Mamba-1 (arXiv 2312.00752) over a tree."""

from __future__ import annotations

import torch

from .._ops import ops, register
from ..checks import check, check_shape
from ..pending import (
    ACTIVATIONS,
    SINGLE,
    PendingPath,
    ScanPending,
    check_ancestors,
    check_capacity,
    check_contiguous,
    check_heads,
    check_rows,
)
from .naive import commit_selective_scan_naive, tree_selective_scan_naive


__all__ = [
    "commit_selective_scan",
    "commit_selective_scan_naive",
    "tree_selective_scan",
    "tree_selective_scan_naive",
]

LARGEST_STATE = 64


def tree_selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803, the paper's name, as below
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    states: torch.Tensor,
    pending: ScanPending,
    ancestors: torch.Tensor,
    rows: PendingPath,
    *,
    D: torch.Tensor | None = None,  # noqa: N803
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
) -> torch.Tensor:
    """
    Commits what was kept of the step before to the states, then computes the outputs of a tree's nodes.

    At every node, from the state of its parent, S ← e^(A dt) S + dt x B for every channel, and the output is
    S C + D x, times silu(z). One launch on CUDA; the states of the nodes are in memory only while it runs,
    `batch * nodes * channels * state_size` float32 numbers.

    Args:
        x, dt (`torch.Tensor` of shape `[batch, nodes, channels]`): inputs and step sizes of at most 64 nodes, each
            after its parent. Values of a node that are not finite count as 0, here and below.
        A (`torch.Tensor` of shape `[channels, state_size]`, float32): negative; `state_size` at most 64.
        B, C (`torch.Tensor` of shape `[batch, nodes, groups, state_size]`): of the dtype of `x`; neighbouring channels
            share a group.
        states (`torch.Tensor` of shape `[slots, channels, state_size]`, float32): changed in place.
        pending ([`ScanPending`]): what is pending of the step before; replaced by the nodes of this one. Need not be
            initialized.
        ancestors (`torch.Tensor` of shape `[1 or batch, nodes, 1]`, int64): `pack_ancestors` of the tree; a node is
            among its own ancestors.
        rows ([`PendingPath`]): the slots of the rows, and the nodes that were kept.
        D (`torch.Tensor` of shape `[channels]`, *optional*): weight of the inputs in the outputs.
        z (`torch.Tensor` of shape `[batch, nodes, channels]`, *optional*): gate.
        dt_bias (`torch.Tensor` of shape `[channels]`, *optional*): added to `dt`.
        dt_softplus (`bool`): whether step sizes are the softplus of that.

    Returns:
        `torch.Tensor`: `[batch, nodes, channels]`, of the dtype of `x`.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    check_shape("x", x, None, None, None)
    batch, nodes, channels = x.shape
    device = x.device
    check("x", x, device, ACTIVATIONS, *x.shape)
    check("dt", dt, device, ACTIVATIONS, *x.shape)
    check("z", z, device, ACTIVATIONS, *x.shape)
    check("B", B, device, (x.dtype,), batch, nodes, None, None)
    check("C", C, device, (x.dtype,), *B.shape)
    check("D", D, device, ACTIVATIONS, channels)
    check("dt_bias", dt_bias, device, ACTIVATIONS, channels)
    check_shape("states", states, None, channels, B.shape[3])
    _check_pending(states, pending, A, rows, batch)
    check("pending.keys", pending.keys, device, (x.dtype,), 2, len(states), None, *B.shape[2:])
    check("pending.inputs", pending.inputs, device, (x.dtype,), *pending.inputs.shape)
    check_capacity("pending", pending.inputs.shape[1], nodes)
    check_ancestors(ancestors, batch, nodes, device)
    out = x.new_empty(x.shape)
    ops.tree_selective_scan(
        x, dt, A, B, C, states, *pending, ancestors, *rows, D, z, dt_bias, dt_softplus, out
    )  # fmt: skip
    return out


def commit_selective_scan(
    states: torch.Tensor,
    pending: ScanPending,
    A: torch.Tensor,  # noqa: N803
    rows: PendingPath,
) -> None:
    """
    Commits what was kept of the last step, as the next step would: for who reads the states. Afterwards `rows.counts`
    of these rows must be 0.

    Args: see `tree_selective_scan`.
    """
    _check_pending(states, pending, A, rows, None)
    ops.commit_selective_scan(states, *pending, A, *rows)


register(tree_selective_scan_naive, results=("out",), mutated=("states", "inputs", "steps", "keys"))
register(commit_selective_scan_naive, mutated=("states",))


def _check_pending(states, pending, rates, rows, batch) -> None:
    check_shape("states", states, None, None, None)
    num_slots, channels, state_size = states.shape
    device = states.device
    check("states", states, device, SINGLE, *states.shape)
    if not 0 < state_size <= LARGEST_STATE:
        raise ValueError(f"`states` has a last dimension of {state_size}; supported are 1 to {LARGEST_STATE}.")
    check("A", rates, device, SINGLE, channels, state_size)
    check("pending.inputs", pending.inputs, device, ACTIVATIONS, num_slots, None, channels)
    capacity = pending.inputs.shape[1]
    check("pending.steps", pending.steps, device, SINGLE, num_slots, capacity, channels)
    check("pending.keys", pending.keys, device, (pending.inputs.dtype,), 2, num_slots, capacity, None, state_size)
    check_heads(channels, pending.keys.shape[3], "pending.keys")
    check_contiguous(states=states, **{f"pending.{name}": tensor for name, tensor in pending._asdict().items()})
    check_rows(rows, num_slots, batch, device)
