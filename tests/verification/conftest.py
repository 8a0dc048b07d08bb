"""Fixtures of the tests of verification."""

from __future__ import annotations

import pytest
import torch
from support.calls import new_tokens
from transformers import PreTrainedModel


@pytest.fixture(scope="module")
def text_of(target: PreTrainedModel, inputs_of: dict[int, dict[str, torch.Tensor]]) -> dict[int, list[list[int]]]:
    """18 tokens that plain `generate` writes if no option changes them, `[batch][24]`, by batch size."""
    return {batch_size: new_tokens(target, inputs, 18) for batch_size, inputs in inputs_of.items()}
