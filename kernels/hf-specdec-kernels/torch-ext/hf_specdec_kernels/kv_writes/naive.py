"""Writes of keys and values into blocks, in plain PyTorch."""

from __future__ import annotations

import torch


def write_kv_naive(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """See `hf_specdec_kernels.write_kv`."""
    keys[blocks, :, offsets] = key_states.transpose(1, 2)
    values[blocks, :, offsets] = value_states.transpose(1, 2)
