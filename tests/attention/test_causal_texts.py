"""Chunks of prompts that begin with the first token attend without a mask, as plain `generate` reads prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.batches import limits
from support.models import prompts, tiny_model
from torch.nn import functional

import hf_specdec


CASES: dict[str, tuple[str, list[int], int]] = {
    "one row": ("llama", [9], 2),
    "rows": ("llama", [9, 9, 9], 2),
    "padding at the end": ("llama", [9, 5], 2),
    "shorter than a window": ("mistral", [12], 2),
    "longer than a window": ("mistral", [13], 0),
    "some layers with windows": ("gemma3_text", [13], 1),
    "two chunks": ("llama", [40], 2),
}


@pytest.mark.parametrize("family, lengths, number", CASES.values(), ids=CASES)
@pytest.mark.some_cases(3)
def test_prompts(family: str, lengths: list[int], number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, attend = tiny_model(family, attn_implementation="sdpa"), functional.scaled_dot_product_attention
    texts = [prompts(1, length, seed=length)["input_ids"] for length in lengths]
    call: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    expected = [model.generate(text, **call)[0].tolist() for text in texts]
    causal: list[Any] = []

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        causal.append(options.get("is_causal"))
        return attend(*args, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    call |= {"assistant_model": hf_specdec.NgramDraft(), "tree": "chain:2"}

    def written() -> list[list[int]]:
        options = limits(max_batch_tokens=30)
        found = model.generate_batch([text[0].tolist() for text in texts], continuous_batching_config=options, **call)
        return [one.prompt_ids + one.generated_tokens for one in found.values()]

    assert written() == expected
    assert causal.count(True) == number
    if lengths == [9]:  # attention to later tokens shows
        blind = {"is_causal": False}
        monkeypatch.setattr(
            functional, "scaled_dot_product_attention", lambda *args, **options: attend(*args, **options | blind)
        )
        assert written() != expected
