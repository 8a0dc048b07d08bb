"""
What a step of a state layer leaves behind: its nodes are pending until the next step says which of them were kept.

A state layer reads and writes its state once a step: a step first commits the path that was kept of the step before,
then scores its own nodes and keeps of them what their commit will need.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .checks import INTEGERS, check, check_shape


MOST_NODES = 64
"""Nodes of a step: their ancestors are the bits of a word."""
LARGEST_DIM = 256
"""Largest dimension of keys: a program holds whole columns of a state."""
ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
SINGLE = (torch.float32,)


class PendingPath(NamedTuple):
    """
    The rows of a step, and what was kept of the step before of their slots. All layers take the same.

    Args:
        slots (`torch.Tensor` of shape `[batch]`, int32 or int64): the slot of every row, a different one for each;
            below 0: a row without a slot, which reads and writes no state, and whose output is 0.
        turns (`torch.Tensor` of shape `[num_slots]`, int32 or int64): the last bit tells in which half of the pending
            keys those of the step before are; the other half is written. The caller adds 1 for the rows of a step
            after all layers of it.
        path (`torch.Tensor` of shape `[batch, depth + 1]`, int32 or int64): nodes of the step before that were kept,
            the root first. Entries after `counts` are ignored.
        counts (`torch.Tensor` of shape `[batch]`, int32 or int64): how many were kept, with the root; 0 keeps the
            state as it is.
    """

    slots: torch.Tensor
    turns: torch.Tensor
    path: torch.Tensor
    counts: torch.Tensor


class DeltaPending(NamedTuple):
    """
    Pending nodes of a matrix state: node j adds the outer product of `keys[j]` and `deltas[j]` to it.

    Args:
        keys (`torch.Tensor` of shape `[2, slots, capacity, key_heads, key_dim]`): two halves, one of them read, one
            written; of the activations' dtype.
        deltas (`torch.Tensor` of shape `[slots, capacity, heads, value_dim]`, float32): u.
        decays (`torch.Tensor` of shape `[2, slots, capacity, heads]` or `[…, heads, key_dim]`, float32): logarithms of
            the decay from above the root to after the node.
    """

    keys: torch.Tensor
    deltas: torch.Tensor
    decays: torch.Tensor


class ScanPending(NamedTuple):
    """
    Pending nodes of the selective scan.

    Args:
        inputs (`torch.Tensor` of shape `[slots, capacity, channels]`): x, of the activations' dtype.
        steps (`torch.Tensor` of shape `[slots, capacity, channels]`, float32): step sizes.
        keys (`torch.Tensor` of shape `[2, slots, capacity, groups, state_size]`): B, in two halves, one of them read,
            one written; of the activations' dtype.
    """

    inputs: torch.Tensor
    steps: torch.Tensor
    keys: torch.Tensor


def check_rows(rows: PendingPath, num_slots: int, batch: int | None, device: torch.device) -> None:
    """Checks a step's rows; `batch` is None where only they have rows."""
    batch = len(rows.slots) if batch is None else batch
    check("rows.slots", rows.slots, device, INTEGERS, batch)
    check("rows.turns", rows.turns, device, INTEGERS, num_slots)
    check("rows.path", rows.path, device, INTEGERS, batch, None)
    check("rows.counts", rows.counts, device, INTEGERS, batch)


def check_ancestors(ancestors: torch.Tensor, batch: int, nodes: int, device: torch.device) -> None:
    """
    Raises:
        ValueError, TypeError: if there are not 1 to 64 nodes, or if these are not their packed ancestors.
    """
    if not 0 < nodes <= MOST_NODES:
        raise ValueError(f"There are {nodes} nodes; a step of a state layer has 1 to {MOST_NODES}.")
    check("ancestors", ancestors, device, (torch.int64,), (1, batch), nodes, 1)


def check_capacity(name: str, capacity: int, nodes: int) -> None:
    """
    Raises:
        ValueError: if the pending nodes have less room than there are nodes.
    """
    if capacity < nodes:
        raise ValueError(f"`{name}` has room for {capacity} nodes, the step has {nodes}; allocate more.")


def check_contiguous(**tensors: torch.Tensor) -> None:
    """
    Raises:
        ValueError: if a tensor that is changed in place is not contiguous.
    """
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"`{name}` has strides {tensor.stride()}; pass a contiguous tensor.")


def check_heads(heads: int, shared: int, name: str) -> None:
    """
    Raises:
        ValueError: if `shared` heads of keys do not divide the heads.
    """
    if shared == 0 or heads % shared:
        raise ValueError(f"{shared} heads of `{name}` do not divide the {heads} heads of the state.")


def check_key_dim(name: str, size: int) -> None:
    """
    Raises:
        ValueError: if keys are larger than a program can hold.
    """
    if not 0 < size <= LARGEST_DIM:
        raise ValueError(f"`{name}` has a last dimension of {size}; supported are 1 to {LARGEST_DIM}.")


def check_pending(pending: DeltaPending, states: torch.Tensor, heads: int, key_dim: int, value_dim: int) -> None:
    """Checks pending nodes against states of `[slots, heads, …]`."""
    device, num_slots = states.device, len(states)
    check_shape("pending.keys", pending.keys, 2, num_slots, None, None, key_dim)
    check("pending.keys", pending.keys, device, ACTIVATIONS, *pending.keys.shape)
    capacity, key_heads = pending.keys.shape[2:4]
    check_heads(heads, key_heads, "pending.keys")
    check_key_dim("pending.keys", key_dim)
    check("pending.deltas", pending.deltas, device, SINGLE, num_slots, capacity, heads, value_dim)
    channels = () if pending.decays.dim() == 4 else (key_dim,)
    check("pending.decays", pending.decays, device, SINGLE, 2, num_slots, capacity, heads, *channels)
    check_contiguous(states=states, **{f"pending.{name}": tensor for name, tensor in pending._asdict().items()})


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if its last dimension is not contiguous."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def parents_of(ancestors: torch.Tensor) -> list[list[int]]:
    """The parent of every node of packed ancestors, `[rows, nodes, 1]`; -1 for a root. Reads them on the host."""
    own = [
        [(word & (2**64 - 1)) & ~(1 << node) for node, word in enumerate(row)] for row in ancestors[..., 0].tolist()
    ]
    return [[strict.bit_length() - 1 for strict in row] for row in own]
