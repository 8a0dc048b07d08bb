"""Short causal convolutions over a tree, as state layers have them before their recurrence, or instead of one."""

from __future__ import annotations

import torch

from .._ops import ops, register
from ..checks import INTEGERS, check, check_shape
from ..pending import ACTIVATIONS, MOST_NODES, PendingPath, check_capacity, check_contiguous, check_rows
from .naive import commit_conv_naive, tree_conv_naive


__all__ = ["commit_conv", "commit_conv_naive", "conv_table", "tree_conv", "tree_conv_naive"]

MOST_TAPS = 16


def conv_table(parents: torch.Tensor, depths: torch.Tensor, taps: int) -> torch.Tensor:
    """
    The inputs of every node of a tree, for `tree_conv`. Reads nothing on the host; one table serves all layers.

    Args:
        parents, depths (`torch.Tensor` of shape `[rows, nodes]`, int64): of `tree_ancestors`; the root is its own
            parent.
        taps (`int`): size of the convolution.

    Returns:
        `torch.Tensor`: `[rows, nodes, taps]` int64: entry j of a node is its j-th ancestor, itself for 0; −1 is the
        last committed input, −2 the one before.
    """
    above, found = torch.arange(parents.shape[1], device=parents.device).expand_as(parents), []
    for generation in range(taps):
        found.append(torch.where(depths >= generation, above, depths - generation))
        above = parents.gather(1, above)
    return torch.stack(found, dim=2)


def tree_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: torch.Tensor,
    pending: torch.Tensor,
    table: torch.Tensor,
    rows: PendingPath,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """
    Commits what was kept of the step before to the windows, then convolves a tree: every node with its ancestors, and
    above the root with the window.

    One launch on CUDA. Products are summed in float32.

    Args:
        x (`torch.Tensor` of shape `[batch, nodes, channels]`): inputs of at most 64 nodes; bfloat16, float16 or
            float32.
        weight (`torch.Tensor` of shape `[channels, taps]`): the last tap is that of the node itself; at most 16 taps.
        windows (`torch.Tensor` of shape `[slots, channels, size]`): the last committed inputs, the newest last;
            `size >= taps - 1`; of the dtype of `x`. Changed in place.
        pending (`torch.Tensor` of shape `[slots, capacity, channels]`): inputs of the step before, of the dtype of
            `x`; replaced by those of this one. Need not be initialized.
        table (`torch.Tensor` of shape `[1 or batch, nodes, taps]`, int32 or int64): see `conv_table`. Inputs that it
            does not name are not read.
        rows ([`PendingPath`]): the slots of the rows, and the nodes that were kept. Its `turns` are not read.
        bias (`torch.Tensor` of shape `[channels]`, *optional*): added to the sums.
        activation (`str`, *optional*): `"silu"` (or `"swish"`).

    Returns:
        `torch.Tensor`: `[batch, nodes, channels]`, contiguous, of the dtype of `x`.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together, or for another activation.
    """
    _check(x, weight, windows, pending, table, rows, bias, activation)
    out = x.new_empty(x.shape)
    slots, _, path, counts = rows
    ops.tree_conv(x, weight, windows, pending, table, slots, path, counts, bias, activation is not None, out)
    return out


def commit_conv(windows: torch.Tensor, pending: torch.Tensor, rows: PendingPath) -> None:
    """
    Commits what was kept of the last step, as the next step would: for who reads the windows. Afterwards `rows.counts`
    of these rows must be 0.

    Args: see `tree_conv`.
    """
    _check_windows(windows, pending, rows, None)
    ops.commit_conv(windows, pending, rows.slots, rows.path, rows.counts)


register(tree_conv_naive, results=("out",), mutated=("windows", "pending"))
register(commit_conv_naive, mutated=("windows",))


def _check_windows(windows, pending, rows, batch) -> None:
    check_shape("windows", windows, None, None, None)
    check("windows", windows, windows.device, ACTIVATIONS, *windows.shape)
    check("pending", pending, windows.device, (windows.dtype,), len(windows), None, windows.shape[1])
    check_contiguous(windows=windows, pending=pending)
    check_rows(rows, len(windows), batch, windows.device)


def _check(x, weight, windows, pending, table, rows, bias, activation) -> None:
    check_shape("x", x, None, None, None)
    batch, nodes, channels = x.shape
    device = x.device
    if not 0 < nodes <= MOST_NODES:
        raise ValueError(f"There are {nodes} nodes; a step of a state layer has 1 to {MOST_NODES}.")
    check("x", x, device, ACTIVATIONS, *x.shape)
    check("weight", weight, device, ACTIVATIONS, channels, None)
    check("bias", bias, device, ACTIVATIONS, channels)
    taps = weight.shape[1]
    check_shape("windows", windows, None, channels, None)
    if not 0 < taps <= MOST_TAPS or windows.shape[2] < taps - 1:
        raise ValueError(
            f"`weight` has {taps} taps and `windows` keep {windows.shape[2]} inputs; there must be 1 to {MOST_TAPS} "
            f"taps, and windows of at least one input less."
        )
    check("windows", windows, device, (x.dtype,), *windows.shape)
    _check_windows(windows, pending, rows, batch)
    check_capacity("pending", pending.shape[1], nodes)
    check("table", table, device, INTEGERS, (1, batch), nodes, taps)
    if activation not in (None, "silu", "swish"):
        raise ValueError(f'`activation` is {activation!r}; pass "silu", or None and apply yours to the result.')
