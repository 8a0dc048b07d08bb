"""Writes of the keys and values of new nodes into the blocks of a paged cache."""

from __future__ import annotations

import torch

from .._ops import register, run
from ..checks import check
from .naive import write_kv_naive


__all__ = ["unchecked", "write_kv", "write_kv_naive"]


def write_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """
    Writes keys and values of one layer's new nodes into its blocks, in place. Of nodes in one slot, any is kept.

    Args:
        keys (`torch.Tensor` of shape `[num_blocks, kv_heads, block_size, key_dim]`), values (`torch.Tensor` of shape
            `[num_blocks, kv_heads, block_size, value_dim]`): the cache.
        key_states (`torch.Tensor` of shape `[batch, kv_heads, nodes, key_dim]`), value_states (`torch.Tensor` of shape
            `[batch, kv_heads, nodes, value_dim]`): of the cache's dtype.
        blocks, offsets (`torch.Tensor` of shape `[batch, nodes]`, int64): block of each node, and its slot in it.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    device, (batch, heads, nodes, _) = keys.device, key_states.shape
    check("keys", keys, device, None, None, heads, None, None)
    for name, cache, states in (("key", keys, key_states), ("value", values, value_states)):
        check(f"{name}s", cache, device, None, keys.shape[0], heads, keys.shape[2], None)
        check(f"{name}_states", states, device, (cache.dtype,), batch, heads, nodes, cache.shape[3])
    check("blocks", blocks, device, (torch.int64,), batch, nodes)
    check("offsets", offsets, device, (torch.int64,), batch, nodes)
    unchecked(keys, values, key_states, value_states, blocks, offsets)


_operator = register(write_kv_naive, mutated=("keys", "values"))


def unchecked(*arguments: torch.Tensor) -> None:
    """`write_kv`, which does not check its arguments."""
    run(_operator, *arguments)
