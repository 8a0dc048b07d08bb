"""Logits processors of rows as a captured step has them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specdec.engine.captured.biases import RowBiases
from hf_specdec.engine.captured.processing import Processing
from hf_specdec.verification.device_warpers import NONE, Warpers


def as_loaded(
    rows: list[list[LogitsProcessor]], lengths: torch.Tensor | None = None, texts: torch.Tensor | None = None
) -> Processing:
    """The rows' processors as a step's tensors."""
    warpers: Any = [Warpers.of(LogitsProcessorList(one)) for one in rows]
    values = {name: torch.tensor([one.values.get(name, without) for one in warpers]) for name, without in NONE.items()}
    kinds = frozenset().union(*(one.kinds for one in warpers))
    biases = RowBiases.for_kinds(len(rows), kinds, torch.device("cpu"))
    biases.load([one.biases for one in warpers])
    return Processing(values, kinds, lengths, biases, texts)
