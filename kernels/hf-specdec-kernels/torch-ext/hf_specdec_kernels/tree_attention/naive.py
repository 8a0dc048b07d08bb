"""Tree attention in plain PyTorch: dense scores, dense masks."""

from __future__ import annotations

import torch

from .masks import unpack_ancestors


def tree_attention_naive(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    ancestors: torch.Tensor,
    num_nodes: int,
    first_slots: torch.Tensor | None = None,
    query_depths: torch.Tensor | None = None,
    node_depths: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    scale: float = 1.0,
    window: int | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """See `hf_specdec_kernels.tree_attention`; in float32 (float64 for a float64 query), without splits."""
    if block_tables is not None:
        key, value = in_slot_order(key, block_tables), in_slot_order(value, block_tables)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    capacity = key.shape[2]
    allowed = visible_slots(capacity, lengths, ancestors, num_nodes, first_slots, query_depths, node_depths, window)
    # Slots that no query attends to may hold anything, NaN included.
    used = allowed.any(dim=1).view(batch, 1, -1, 1)
    key, value = (torch.where(used, states.to(dtype), 0) for states in (key, value))
    grouped = query.to(dtype).reshape(batch, kv_heads, heads // kv_heads * queries, head_dim)
    scores = (grouped @ key.transpose(2, 3)).view(batch, heads, queries, capacity) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(dtype).view(1, -1, 1, 1).expand(batch, -1, queries, 1)], dim=3)
    # By `softmax`: `exp` of as many infinities takes ten times as long as of numbers. Of nothing but those it is NaN.
    weights = scores.softmax(dim=3)[..., :capacity].masked_fill(~allowed.any(dim=2)[:, None, :, None], 0.0)
    attended = weights.reshape(batch, kv_heads, heads // kv_heads * queries, capacity) @ value
    return attended.view(batch, heads, queries, value.shape[3]).transpose(1, 2).to(query.dtype)


def visible_slots(
    capacity: int,
    lengths: torch.Tensor,
    ancestors: torch.Tensor,
    num_nodes: int,
    first_slots: torch.Tensor | None,
    query_depths: torch.Tensor | None,
    node_depths: torch.Tensor | None,
    window: int | None,
) -> torch.Tensor:
    """The mask of the slots that every query attends to, `[batch, queries, capacity]` bool."""
    batch, queries = len(lengths), ancestors.shape[1]
    slots = torch.arange(capacity, device=lengths.device)
    nodes = slots - lengths[:, None].long()  # negative: committed
    places = nodes.clamp(0, max(num_nodes - 1, 0))
    in_tree = unpack_ancestors(ancestors, num_nodes).expand(batch, -1, -1)
    in_tree = in_tree.gather(2, places[:, None].expand(-1, queries, -1))
    first = 0 if first_slots is None else first_slots[:, None]
    committed = (nodes < 0) & (slots >= first)
    allowed = committed[:, None] | (in_tree & ((nodes >= 0) & (nodes < num_nodes))[:, None])
    if window is not None and query_depths is not None and node_depths is not None:
        depths = node_depths.long().expand(batch, -1).gather(1, places)
        from_first_node = torch.where(nodes < 0, nodes, depths)
        allowed = allowed & (query_depths[:, :, None] - from_first_node[:, None] < window)
    return allowed


def in_slot_order(pages: torch.Tensor, block_tables: torch.Tensor) -> torch.Tensor:
    """A paged cache `[num_blocks, kv_heads, block_size, dim]` as `[batch, kv_heads, slots, dim]`."""
    blocks = pages[block_tables.long().clamp(min=0)]
    return blocks.transpose(1, 2).flatten(2, 3)
