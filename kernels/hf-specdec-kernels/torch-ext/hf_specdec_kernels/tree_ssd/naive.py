"""The recurrence of Mamba-2 over a tree in plain PyTorch: node after node, each with a state of its own."""

from __future__ import annotations

import torch

from ..pending import parents_of
from ..tree_delta_rule.naive import commit_delta_rule_naive, finite


def tree_ssd_naive(
    x: torch.Tensor,
    dt: torch.Tensor,
    rates: torch.Tensor,
    input_keys: torch.Tensor,
    queries: torch.Tensor,
    states: torch.Tensor,
    keys: torch.Tensor,
    deltas: torch.Tensor,
    decays: torch.Tensor,
    ancestors: torch.Tensor,
    slots: torch.Tensor,
    turns: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
    skip: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    dt_least: float,
    dt_most: float,
) -> torch.Tensor:
    """See `hf_specdec_kernels.tree_ssd`; computes in the states' dtype and reads values on the host."""
    commit_ssd_naive(states, keys, deltas, decays, slots, turns, path, counts)
    group = states.shape[1] // input_keys.shape[2]
    parents = parents_of(ancestors.expand(len(x), -1, -1))
    dt = steps_of(dt.to(states), dt_bias, dt_softplus).clamp(dt_least, dt_most)
    x, input_keys = finite(x.to(states)), finite(input_keys)
    out = torch.zeros_like(x)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        half = 1 - int(turns[slot]) % 2
        of_nodes = {-1: (states[slot], torch.zeros_like(dt[row, 0]))}
        for node, parent in enumerate(parents[row]):
            state, total = of_nodes[parent]
            decay, delta = rates.to(states) * dt[row, node], dt[row, node, :, None] * x[row, node]
            own_key = input_keys[row, node].to(states).repeat_interleave(group, dim=0)
            own_query = queries[row, node].to(states).repeat_interleave(group, dim=0)
            state = state * decay.exp()[:, None, None] + delta[..., None] * own_key[:, None]
            of_nodes[node] = state, total + decay
            out[row, node] = torch.einsum("hpn,hn->hp", state, own_query)
            if skip is not None:
                out[row, node] += skip.to(states)[:, None] * x[row, node]
            keys[half, slot, node], deltas[slot, node] = input_keys[row, node], delta
            decays[half, slot, node] = total + decay
    return out


def commit_ssd_naive(
    states: torch.Tensor,
    keys: torch.Tensor,
    deltas: torch.Tensor,
    decays: torch.Tensor,
    slots: torch.Tensor,
    turns: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """See `hf_specdec_kernels.commit_ssd`."""
    commit_delta_rule_naive(states.mT, keys, deltas, decays, slots, turns, path, counts, False)


def steps_of(dt: torch.Tensor, dt_bias: torch.Tensor | None, dt_softplus: bool) -> torch.Tensor:
    """The step sizes of nodes, `[batch, nodes, heads or channels]`; 0 of void nodes."""
    dt = dt if dt_bias is None else dt + dt_bias.to(dt)
    return finite(torch.nn.functional.softplus(dt) if dt_softplus else dt)
