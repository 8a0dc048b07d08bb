"""The selective scan of Mamba-1 over a tree in plain PyTorch: node after node, each with a state of its own."""

from __future__ import annotations

import torch

from ..pending import parents_of
from ..tree_delta_rule.naive import finite
from ..tree_ssd.naive import steps_of


def tree_selective_scan_naive(
    x: torch.Tensor,
    dt: torch.Tensor,
    rates: torch.Tensor,
    input_keys: torch.Tensor,
    queries: torch.Tensor,
    states: torch.Tensor,
    inputs: torch.Tensor,
    steps: torch.Tensor,
    keys: torch.Tensor,
    ancestors: torch.Tensor,
    slots: torch.Tensor,
    turns: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
    skip: torch.Tensor | None,
    gate: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
) -> torch.Tensor:
    """See `hf_specdec_kernels.tree_selective_scan`; computes in the states' dtype and reads values on the host."""
    commit_selective_scan_naive(states, inputs, steps, keys, rates, slots, turns, path, counts)
    group = x.shape[2] // input_keys.shape[2]
    parents = parents_of(ancestors.expand(len(x), -1, -1))
    dt = steps_of(dt.to(states), dt_bias, dt_softplus)
    x, input_keys = finite(x), finite(input_keys)
    out = torch.zeros_like(dt)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        half = 1 - int(turns[slot]) % 2
        of_nodes = {-1: states[slot]}
        for node, parent in enumerate(parents[row]):
            own, own_dt = x[row, node].to(states), dt[row, node]
            own_keys = input_keys[row, node].to(states).repeat_interleave(group, dim=0)
            own_queries = queries[row, node].to(states).repeat_interleave(group, dim=0)
            state = of_nodes[parent] * (rates.to(states) * own_dt[:, None]).exp()
            of_nodes[node] = state = state + (own_dt * own)[:, None] * own_keys
            out[row, node] = (state * own_queries).sum(dim=1)
            if skip is not None:
                out[row, node] += skip.to(states) * own
            inputs[slot, node], steps[slot, node], keys[half, slot, node] = own, own_dt, input_keys[row, node]
    return out if gate is None else out * torch.nn.functional.silu(gate.to(states))


def commit_selective_scan_naive(
    states: torch.Tensor,
    inputs: torch.Tensor,
    steps: torch.Tensor,
    keys: torch.Tensor,
    rates: torch.Tensor,
    slots: torch.Tensor,
    turns: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """See `hf_specdec_kernels.commit_selective_scan`."""
    group = states.shape[1] // keys.shape[3]
    for row, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
        if slot < 0:
            continue
        for node in path[row, : max(count, 0)].tolist():
            own_keys = keys[int(turns[slot]) % 2, slot, node].to(states).repeat_interleave(group, dim=0)
            step = steps[slot, node].to(states)
            states[slot] *= (rates.to(states) * step[:, None]).exp()
            states[slot] += (step * inputs[slot, node].to(states))[:, None] * own_keys
