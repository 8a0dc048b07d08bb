"""Ways to configure a call, and the longest texts that models have positions for."""

from __future__ import annotations

from typing import Any

import pytest
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR, assert_same_text, plain_text
from transformers import GenerationConfig, PreTrainedModel

import hf_specdec
from hf_specdec import DynamicTree, NgramDraft, SpeculativeConfig


PROMPT = 9
NEW_TOKENS = 18


@pytest.mark.parametrize(
    "speculation",
    [
        {"tree": IRREGULAR},
        {"tree": DynamicTree(depth=3, top_k=2, num_nodes=6)},
        {"speculative_config": SpeculativeConfig(tree=IRREGULAR)},
    ],
    ids=str,
)
def test_generation_config_objects(
    target: PreTrainedModel, draft: PreTrainedModel, speculation: dict[str, Any], tmp_path: Any
) -> None:
    inputs = prompts(2, PROMPT, padding=True)
    expected = plain_text(target, inputs, max_new_tokens=NEW_TOKENS)
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, **speculation)
    config.save_pretrained(tmp_path)
    for given in (config, GenerationConfig.from_pretrained(tmp_path)):
        before = given.to_dict()
        text = target.generate(**inputs, generation_config=given, assistant_model=draft)
        assert text.tolist() == expected.tolist()
        assert hf_specdec.last_metrics().num_accepted_tokens > 0
        assert given.to_dict() == before


def test_the_models_own_generation_config(draft: PreTrainedModel) -> None:
    model = tiny_model("llama", seed=5, attention_sharpness=3.0)
    inputs = prompts(1, PROMPT)
    expected = plain_text(model, inputs, max_new_tokens=NEW_TOKENS)
    model.generation_config.tree = IRREGULAR
    model.generation_config.max_new_tokens = NEW_TOKENS
    out = model.generate(**inputs, do_sample=False, assistant_model=draft)
    assert out.tolist() == expected.tolist()
    assert max(map(max, hf_specdec.last_metrics().accepted_per_step)) <= 4
    with pytest.raises(ValueError, match="`tree`=.*without a draft"):
        model.generate(**inputs, do_sample=False)


def test_a_call_does_not_mark_the_model(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    before = target.generation_config.to_dict(), draft.generation_config.to_dict()
    assert_same_text(target, prompts(1, PROMPT), draft, max_new_tokens=NEW_TOKENS)
    assert (target.generation_config.to_dict(), draft.generation_config.to_dict()) == before
    assert target.generation_config.tree is None


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("extra", [1, 2, 3, 7, 18])
@pytest.mark.some_cases(4)
def test_max_length(target: PreTrainedModel, draft: PreTrainedModel, batch_size: int, extra: int) -> None:
    inputs = prompts(batch_size, PROMPT, padding=True)
    expected = plain_text(target, inputs, max_new_tokens=NEW_TOKENS)[:, : PROMPT + extra]
    for assistant in (draft, target, NgramDraft()):
        text = target.generate(
            **inputs, max_length=PROMPT + extra, do_sample=False, assistant_model=assistant, tree=IRREGULAR
        )
        assert text.tolist() == expected.tolist()


def test_positions_up_to_the_models_last() -> None:
    """A tree near the last position that the models know: no node may lie beyond it."""
    model = tiny_model("gpt2", seed=0, attention_sharpness=3.0, max_position_embeddings=32)
    for batch_size in (1, 3):
        inputs = prompts(batch_size, PROMPT, padding=True)
        for assistant in (model, noisy_copy(model, 0.05), noisy_copy(model, 0.2), NgramDraft(min_ngram=1)):
            metrics = assert_same_text(model, inputs, assistant, max_length=32)
            assert metrics.num_drafts > 0


def test_a_draft_that_knows_fewer_positions() -> None:
    target = tiny_model("llama", seed=5, attention_sharpness=3.0)
    draft = tiny_model("gpt2", seed=4, attention_sharpness=3.0, max_position_embeddings=16)
    inputs = prompts(2, PROMPT, padding=True)
    expected = plain_text(target, inputs, max_new_tokens=40)
    out = target.generate(**inputs, max_new_tokens=40, do_sample=False, assistant_model=draft, tree=IRREGULAR)
    assert out.tolist() == expected.tolist()
