"""Fixtures of the tests of verification."""

from __future__ import annotations

import pytest
import torch
from support.calls import new_tokens
from transformers import PreTrainedModel


@pytest.fixture(scope="module")
def text_of(
    request: pytest.FixtureRequest, target: PreTrainedModel, inputs_of: dict[int, dict[str, torch.Tensor]]
) -> dict[int, list[list[int]]]:
    """`NEW_TOKENS` tokens that plain `generate` writes if no option changes them, `[batch][tokens]`, by batch size."""
    number = request.module.NEW_TOKENS
    return {batch_size: new_tokens(target, inputs, number) for batch_size, inputs in inputs_of.items()}
