"""The delta rule over a tree in plain PyTorch: node after node, each with a state of its own."""

from __future__ import annotations

import torch

from ..pending import parents_of


EPSILON = 1e-6
"""Added under the root of the L2 norm of queries and keys."""


def tree_delta_rule_naive(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    keys: torch.Tensor,
    deltas: torch.Tensor,
    decays: torch.Tensor,
    ancestors: torch.Tensor,
    slots: torch.Tensor,
    turns: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
    normalize: bool,
    scale: float,
    max_depth: int = 64,
) -> torch.Tensor:
    """See `hf_specdec_kernels.tree_delta_rule`; computes in the states' dtype and reads values on the host."""
    commit_delta_rule_naive(states, keys, deltas, decays, slots, turns, path, counts, normalize)
    heads, group = states.shape[1], states.shape[1] // key.shape[2]
    parents = parents_of(ancestors.expand(len(query), -1, -1))
    query, key, value, decay, beta = (finite(tensor) for tensor in (query, key, value, decay, beta))
    channels = decay if decay.dim() == 4 else decay[..., None]  # [batch, nodes, heads, key_dim or 1]
    out = torch.zeros_like(value, dtype=states.dtype)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        half = 1 - int(turns[slot]) % 2
        of_nodes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {
            -1: (states[slot], torch.zeros_like(channels[row, 0], dtype=states.dtype))
        }
        for node, parent in enumerate(parents[row]):
            state, total = of_nodes[parent]
            own_key = normalized(key[row, node].to(states), normalize).repeat_interleave(group, dim=0)
            own_query = normalized(query[row, node].to(states), normalize).repeat_interleave(group, dim=0)
            state = state * channels[row, node].to(states).exp()[..., None]
            known = torch.einsum("hkv,hk->hv", state, own_key)
            delta = beta[row, node].to(states)[:, None] * (value[row, node].to(states) - known)
            state = state + own_key[..., None] * delta[:, None]
            of_nodes[node] = state, total + channels[row, node].to(states)
            out[row, node] = scale * torch.einsum("hkv,hk->hv", state, own_query)
            keys[half, slot, node], deltas[slot, node] = key[row, node], delta
            decays[half, slot, node] = of_nodes[node][1].view(heads, *decays.shape[4:])
    return out


def commit_delta_rule_naive(
    states: torch.Tensor,
    keys: torch.Tensor,
    deltas: torch.Tensor,
    decays: torch.Tensor,
    slots: torch.Tensor,
    turns: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
    normalize: bool,
) -> None:
    """See `hf_specdec_kernels.commit_delta_rule`."""
    group = states.shape[1] // keys.shape[3]
    for row, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
        if slot < 0:
            continue
        half, before = int(turns[slot]) % 2, torch.zeros(())
        for node in path[row, : max(count, 0)].tolist():
            total = decays[half, slot, node].to(states).view(len(states[slot]), -1)
            own_key = normalized(keys[half, slot, node].to(states), normalize).repeat_interleave(group, dim=0)
            states[slot] *= (total - before.to(total)).exp()[..., None]
            states[slot] += own_key[..., None] * deltas[slot, node].to(states)[:, None]
            before = total


def normalized(vectors: torch.Tensor, normalize: bool) -> torch.Tensor:
    """The vectors, divided by their L2 norm if `normalize`."""
    return vectors * (vectors.square().sum(-1, keepdim=True) + EPSILON).rsqrt() if normalize else vectors


def finite(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, 0 where it is not finite: a void node must reach no other one."""
    return tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
