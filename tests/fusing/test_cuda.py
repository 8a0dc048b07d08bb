"""Fused layers on a GPU: texts in float32, and logits in bfloat16 beside those of the model's own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.batches import limits
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR, assert_same_text

from hf_specdec import SpeculativeConfig
from hf_specdec.forwards import model_call
from hf_specdec.fusing import fused_layers


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "olmo2", "glm"])


def on_gpu(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cuda() for name, value in inputs.items()}


@FAMILIES
def test_texts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps of `generate`, its prompts, and requests in flight."""
    target, used = tiny_model(family, dtype=torch.float32).cuda(), []
    draft = noisy_copy(target, 0.05)
    monkeypatch.setattr(model_call, "fused_layers", lambda model: used.append(model) or fused_layers(model))
    inputs = on_gpu(prompts(2, 9))
    expected = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert_same_text(target, inputs, draft, expected=expected, max_new_tokens=24)
    call: dict[str, Any] = {"assistant_model": draft, "speculative_config": SpeculativeConfig(tree=IRREGULAR)}
    outputs = target.generate_batch(
        inputs["input_ids"].tolist(), max_new_tokens=24, continuous_batching_config=limits(), do_sample=False, **call
    )
    assert [one.prompt_ids + one.generated_tokens for one in outputs.values()] == expected.tolist()
    assert used


@FAMILIES
def test_logits(family: str) -> None:
    """Numbers that are rounded the other way change little; after the context all bits are as before."""
    model, inputs = tiny_model(family, dtype=torch.bfloat16).cuda(), on_gpu(prompts(2, 40))
    with torch.inference_mode():
        expected = model(**inputs).logits
        with fused_layers(model):
            found = model(**inputs).logits
        assert torch.equal(model(**inputs).logits, expected)
    torch.testing.assert_close(found, expected, atol=5e-2, rtol=5e-2)
