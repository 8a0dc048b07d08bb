"""A text read by a recurrence, block by block, as the nodes of a chain."""

from __future__ import annotations

from typing import Any

import torch

from .groups import MOST_BYTES, advance_in_groups, score_in_groups
from .recurrence import Recurrence
from .topology import NodeTopology


def read_text(
    recurrence: Recurrence,
    state: torch.Tensor,
    inputs: dict[str, Any],
    counts: list[int],
    prompt_counts: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Outputs over a text, `[batch, tokens, …]`, and the state behind the first `counts` tokens of every row. The first
    `prompt_counts` of these are of the prompt; all, if None.
    """
    places = torch.arange(next(iter(inputs.values())).shape[1], device=state.device)
    is_on, is_prompt = (
        places < torch.tensor(ends, device=state.device)[:, None] for ends in (counts, prompt_counts or counts)
    )
    length, inputs = len(places), recurrence.of_prompt(inputs, is_prompt)
    # Block by block takes fewer operations, and more launches.
    if recurrence.reads_at_once and state.device.type != "cpu":
        return read_at_once(recurrence, state, inputs, is_on)
    constants = {name: inputs[name] for name in recurrence.constants}
    outputs, dtype = [], state.dtype
    for start in range(0, length, recurrence.block):
        end = min(start + recurrence.block, length)
        block = {name: values[:, start:end] for name, values in inputs.items() if name not in constants} | constants
        found, kept = score_in_groups(recurrence, state, block, None, NodeTopology.chain(end - start, state.device))
        outputs.append(found)
        moved = is_on[:, start].view(-1, *[1] * (state.dim() - 1))
        new = advance_in_groups(recurrence, state, kept | constants, is_on[:, start:end])
        state = torch.where(moved, new.to(dtype), state)
    return torch.cat(outputs, dim=1), state


def read_at_once(
    recurrence: Recurrence, state: torch.Tensor, inputs: dict[str, Any], is_on: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Recurrence.read`, for as many tokens at once as there is memory for meanwhile; see `groups.MOST_BYTES`."""
    per_token = recurrence.bytes_of_reading(tuple(state.shape[1:])) * len(state)
    most = max(MOST_BYTES // (per_token * recurrence.block_at_once), 1) * recurrence.block_at_once
    constants, outputs = {name: inputs[name] for name in recurrence.constants}, []
    for start in range(0, is_on.shape[1], most):
        part = {name: values[:, start : start + most] for name, values in inputs.items() if name not in constants}
        found, state = recurrence.read(state, part | constants, is_on[:, start : start + most])
        outputs.append(found)
    return torch.cat(outputs, dim=1), state
