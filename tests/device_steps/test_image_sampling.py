"""Sampled calls with an image in the prompt, by whole steps, against the enumerated distribution."""

from __future__ import annotations

import pytest
import torch
from support.device_steps import Steps
from support.exact import SIGNIFICANCE, enumerate_tokens, fit
from support.models import noisy_copy, tiny_config
from support.sampling import LENGTH, METHODS, VOCAB
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

from hf_specdec import SpeculativeConfig, last_metrics


IMAGE = VOCAB
"""The token of an image's places, which no text holds."""


def the_target() -> PreTrainedModel:
    """With eight tokens that it may write, in float32."""
    torch.manual_seed(2)
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision, image_size=8, patch_size=4, projection_dim=16),
        text_config=tiny_config("llama", vocab_size=VOCAB + 1),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
    )
    model = LlavaForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
        head = torch.nn.Linear(model.lm_head.in_features, VOCAB + 1)
        head.weight.copy_(model.lm_head.weight * 3.0)
        head.bias.zero_()[IMAGE] = -1e4
    model.lm_head = head
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rejection, irregular", "target, best tokens"])
def test_samples(method: str, steps: Steps) -> None:
    target, tree = the_target(), METHODS[method]
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[5, IMAGE, IMAGE, IMAGE, IMAGE, 3, 7]])
    pixels = torch.randn(1, 3, 8, 8, generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    config = SpeculativeConfig(tree=tree.tree, draft_sampling=tree.draft_sampling, cuda_graphs=True)
    draft = noisy_copy(target, 0.05)
    repeated = {name: values.repeat_interleave(700, dim=0) for name, values in inputs.items()}
    call = {"do_sample": True, "top_k": 0, "max_new_tokens": LENGTH + 2}
    torch.manual_seed(0)
    text = target.generate(**repeated, **call, assistant_model=draft, speculative_config=config)
    tokens = text[:, ids.shape[1] :][:, :LENGTH]
    assert steps.replays > 0 and last_metrics().num_accepted_tokens > 0
    found = fit(tokens, enumerate_tokens(target, inputs, LENGTH, vocab=VOCAB))
    assert found.p_value > SIGNIFICANCE, found
    assert found.detectable < 0.25
