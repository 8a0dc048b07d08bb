"""Fixtures of the tests of calls to `generate`."""

from __future__ import annotations

import pytest
import torch
from support.calls import new_tokens
from support.tokenizer import tiny_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def text_of(target: PreTrainedModel, inputs_of: dict[int, dict[str, torch.Tensor]]) -> dict[int, list[list[int]]]:
    """24 tokens that plain `generate` writes if nothing stops it, `[batch][24]`, by batch size."""
    return {batch_size: new_tokens(target, inputs, 24) for batch_size, inputs in inputs_of.items()}
