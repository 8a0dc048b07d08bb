"""Fixtures of the tests of verification."""

from __future__ import annotations

import pytest
import torch
from support.calls import telling_prompts
from transformers import PreTrainedModel


@pytest.fixture(scope="module")
def inputs_of(target: PreTrainedModel) -> dict[int, dict[str, torch.Tensor]]:
    """Prompts by batch size; without padding for one sequence."""
    return {batch_size: telling_prompts(target, batch_size, 12) for batch_size in (1, 3)}
