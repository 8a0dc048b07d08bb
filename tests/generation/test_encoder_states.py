"""Targets that attend to `encoder_hidden_states`, too, by cross-attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.graphs import install_stand_in
from support.models import VOCAB, noisy_copy, prompts, tiny_model
from support.parity import assert_same_text, plain_text
from transformers import BlipTextConfig, DynamicCache, PreTrainedModel
from transformers.models.blip.modeling_blip_text import BlipTextLMHeadModel

import hf_specdec
from hf_specdec.compat import CACHE


TREE = "[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]"
STATES = 9
OPTIONS = {"max_new_tokens": 24}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("gpt2", add_cross_attention=True)


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    return noisy_copy(target, 0.02)


def inputs_for(target: PreTrainedModel, rows: int) -> dict[str, Any]:
    """Prompts, padded if there are several, with encoder states, of which the last row has fewer."""
    generator = torch.Generator().manual_seed(1)
    states = 3 * torch.randn(rows, STATES, target.config.hidden_size, generator=generator, dtype=target.dtype)
    mask = torch.ones(rows, STATES, dtype=torch.long)
    mask[-1, 5:] = 0
    encoder = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
    return prompts(rows, 14, padding=rows > 1) | encoder


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.some_cases(1)
def test_greedy_texts(implementation: str, rows: int) -> None:
    dtype = torch.float32 if implementation == "eager" else torch.float64
    target = tiny_model("gpt2", add_cross_attention=True, attn_implementation=implementation, dtype=dtype)
    inputs = inputs_for(target, rows)
    expected = plain_text(target, inputs, **OPTIONS)
    assert not torch.equal(expected, plain_text(target, prompts(rows, 14, padding=rows > 1), **OPTIONS))
    assert_same_text(target, inputs, noisy_copy(target, 0.02), TREE, expected, **OPTIONS)
    assert_same_text(target, inputs, hf_specdec.NgramDraft(min_ngram=1), TREE, expected, **OPTIONS)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.some_cases(1)
def test_the_decoder_of_blip(rows: int) -> None:
    """Its `generate` is called by that of the whole model, with the features of the image."""
    sizes = {"hidden_size": 32, "encoder_hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "eos_token_id": None, "sep_token_id": None}
    torch.manual_seed(0)
    target = BlipTextLMHeadModel(BlipTextConfig(vocab_size=VOCAB, **sizes, **heads)).double().eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    inputs, others = inputs_for(target, rows), {"max_new_tokens": 24, "pad_token_id": 0}
    assert_same_text(target, inputs, hf_specdec.NgramDraft(min_ngram=1), TREE, **others)
    assert_same_text(target, inputs, noisy_copy(target, 0.02), TREE, **others)


@pytest.mark.parametrize("with_kernel", [False, True], ids=["masks", "kernel"])
def test_a_call_that_would_be_captured(
    target: PreTrainedModel, draft: PreTrainedModel, with_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's forwards are; the target's depend on states that no graph holds."""
    stand_in = install_stand_in(monkeypatch, with_kernel)
    assert_same_text(target, inputs_for(target, 2), draft, TREE, max_new_tokens=16)
    assert stand_in.replays > 0


def test_encoder_states_are_projected_once(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    projection, calls = target.transformer.h[0].crossattention.c_attn, []
    handle = projection.register_forward_hook(lambda module, args, output: calls.append(output.shape[1]))
    with pytest.warns(UserWarning, match="forward hooks"):
        target.generate(**inputs_for(target, 1), **OPTIONS, do_sample=False, assistant_model=draft, tree=TREE)
    handle.remove()
    assert calls == [STATES]


def test_a_prompt_in_chunks(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    inputs = inputs_for(target, 2)
    assert_same_text(
        target, inputs, draft, TREE, plain_text(target, inputs, **OPTIONS), prefill_chunk_size=5, **OPTIONS
    )


def test_a_cache_that_is_continued(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    inputs, cache = inputs_for(target, 1), DynamicCache()
    both = {"max_new_tokens": 12, "do_sample": False, "assistant_model": draft, "tree": TREE}
    first = target.generate(**inputs, **both, **{CACHE: cache})
    inputs |= {"input_ids": first, "attention_mask": torch.ones_like(first)}
    second = target.generate(**inputs, **both, **{CACHE: cache})
    assert torch.equal(second, plain_text(target, inputs_for(target, 1), max_new_tokens=24))


def test_requests_in_flight_have_none(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    inputs = {name: value for name, value in inputs_for(target, 1).items() if name.startswith("encoder")}
    for name in inputs:
        with pytest.raises(ValueError, match=f"(?s)`{name}=.*is not known here"):
            target.generate_batch([[3, 4, 5]], assistant_model=draft, tree=TREE, **{name: inputs[name]})


def test_others_are_refused() -> None:
    """RemBERT writes the K/V of the states into the cache of the text."""
    target = tiny_model("rembert", is_decoder=True, add_cross_attention=True)
    with pytest.raises(ValueError, match="`encoder_hidden_states` with `assistant_model`: the target RemBert"):
        target.generate(**inputs_for(target, 1), assistant_model=hf_specdec.NgramDraft(), **OPTIONS)
