"""Prompts with images on a GPU: real CUDA graphs, in `generate` and in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import vision
from support.batches import limits
from support.heads import tiny_head
from support.models import noisy_copy
from support.parity import IRREGULAR
from transformers import PreTrainedModel

from hf_specdec import last_metrics


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CALL = {"max_new_tokens": 20, "do_sample": False}


def of_family(name: str) -> tuple[PreTrainedModel, list[dict[str, torch.Tensor]]]:
    model = vision.VISION_MODELS[name][0]().float().cuda()
    prompts = [{key: value.cuda() for key, value in one.items()} for one in vision.ragged_image_prompts(name)[:3]]
    return model, [one | {"pixel_values": one["pixel_values"].float()} for one in prompts]


@pytest.mark.parametrize("kind", ["draft", "head"])
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_images(name: str, kind: str) -> None:
    model, prompts = of_family(name)
    assistant: Any = noisy_copy(model).cuda() if kind == "draft" else tiny_head(model).cuda()
    call = CALL | {"assistant_model": assistant, "tree": IRREGULAR}
    for inputs in (prompts[0], vision.padded(prompts)):
        text = model.generate(**inputs, **CALL)
        assert model.generate(**inputs, **call).tolist() == text.tolist()
        assert "steps" in last_metrics().seconds, "not by whole steps"
    texts = [model.generate(**inputs, **CALL)[0].tolist() for inputs in prompts]
    outputs = model.generate_batch(prompts, continuous_batching_config=limits(), **call)
    assert [output.prompt_ids + output.generated_tokens for output in outputs.values()] == texts


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_new_images_behind_a_shared_text(name: str) -> None:
    """The text is read in chunks or found, and the images behind it."""
    model, _ = of_family(name)
    (one,) = vision.ragged_image_prompts(name, ((40, 5),))
    one = {key: (value.float() if value.is_floating_point() else value).cuda() for key, value in one.items()}
    prompts = [one, one | {"pixel_values": -3 * one["pixel_values"].flip(-1)}]
    texts = [model.generate(**inputs, **CALL)[0, one["input_ids"].shape[1] :].tolist() for inputs in prompts]
    assert texts[0] != texts[1]
    with model.continuous_batching_context_manager(
        assistant_model=tiny_head(model).cuda(), tree=IRREGULAR, continuous_batching_config=limits()
    ) as manager:
        for inputs, text in zip(prompts, texts, strict=True):
            request = manager.add_request(inputs, **CALL)
            assert manager.get_result(request).generated_tokens == text
        assert manager.state.num_prefix_hits >= 32
