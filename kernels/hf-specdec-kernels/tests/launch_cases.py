"""Launches of tree attention as planned for an H200."""

from __future__ import annotations

from typing import Any

import torch

from hf_specdec_kernels.tree_attention.tiles import Launch, plan_launch


def plan(pairs: int, rows: int, slots: int, **options: Any) -> Launch:
    """The launch on an H200, for head dimension 128 and bfloat16."""
    on_h200 = {"head_dim": 128, "dtype": torch.bfloat16, "multiprocessors": 132, "shared_memory": 227 * 1024}
    return plan_launch(pairs, rows, slots, **on_h200 | {"num_nodes": 33} | options)
