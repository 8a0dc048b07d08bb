"""Encoder-decoder targets: trees where the decoder takes positions, else a chain in one row."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from support.models import noisy_copy
from transformers import PreTrainedModel

from hf_specdec import NgramDraft, last_metrics
from hf_specdec.attention import branches
from hf_specdec.compat import CACHE

from .building import tiny_model
from .encoders import encoder_inputs
from .modes import NEW_TOKENS, PROMPT, Runner
from .registry import Pair


CLASSES = {
    "bart": "BartForConditionalGeneration",
    "moonshine": "MoonshineForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "t5gemma": "T5GemmaForConditionalGeneration",
}


def model_of(family: str, **changes: int) -> PreTrainedModel:
    return tiny_model(Pair(family, CLASSES[family]), **changes)


@lru_cache
def runner_of(family: str, **changes: int) -> Runner:
    model = model_of(family, **changes)
    return Runner(model, encoder_inputs(model))


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.some_cases(2)
def test_texts(family: str) -> None:
    outcomes = {mode: runner_of(family).outcome(mode) for mode in ("chain", "n-grams", "tree", "padded batch")}
    assert outcomes["chain"].kind == outcomes["n-grams"].kind == "exact"
    others = [outcomes["tree"], outcomes["padded batch"]]
    takes_trees = family in ("bart", "moonshine", "t5gemma")
    assert {one.kind for one in others} == {"exact" if takes_trees else "refused"}
    assert takes_trees or all("takes no `position_ids`" in one.detail for one in others)


@pytest.mark.parametrize("family", ["t5"])
def test_branches_would_be_wrong(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nodes get no positions, these are those of their slots."""
    monkeypatch.setattr(branches, "_obstacle", lambda model: None)
    model = model_of(family)
    assert Runner(model, encoder_inputs(model)).outcome("tree").kind == "wrong"


def test_one_function_for_text_and_encoder() -> None:
    """T5Gemma attends to both by the same function, as a draft, too, which has an encoder of its own."""
    runner = runner_of("t5gemma")
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    plain = runner.model.generate(**runner.inputs(3), **options)
    found = runner.model.generate(
        **runner.inputs(3), **options, assistant_model=noisy_copy(runner.model, 0.05), tree="[(0,), (1,), (0, 0)]"
    )
    assert torch.equal(found, plain) and last_metrics().num_accepted_tokens > 0


def test_a_text_to_the_last_position() -> None:
    """No node is behind the decoder's table."""
    runner = runner_of("bart", max_position_embeddings=PROMPT + NEW_TOKENS - 1)
    assert runner.outcome("chain").kind == "exact"


def test_padding_before_the_text() -> None:
    """Plain `generate` counts its positions, too."""
    model = runner_of("moonshine").model
    inputs = runner_of("moonshine").inputs(2)
    mask = torch.ones_like(inputs["decoder_input_ids"])
    mask[1, :3] = 0
    padded = Runner(
        model,
        lambda rows: {name: one[:rows] for name, one in inputs.items()} | {"decoder_attention_mask": mask[:rows]},
    )
    assert padded.outcome("padded batch").kind == "exact"


def test_the_cache_that_is_returned() -> None:
    runner = runner_of("bart")
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    plain = runner.model.generate(**runner.inputs(1), **options)[CACHE]
    found = runner.model.generate(
        **runner.inputs(1), **options, assistant_model=NgramDraft(min_ngram=1), tree="chain:3"
    )[CACHE]
    for ours, expected in zip(found.self_attention_cache.layers, plain.self_attention_cache.layers, strict=True):
        torch.testing.assert_close(ours.keys, expected.keys)
    for ours, expected in zip(found.cross_attention_cache.layers, plain.cross_attention_cache.layers, strict=True):
        torch.testing.assert_close(ours.values, expected.values)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="is an encoder-decoder model"):
        runner_of("t5").model.generate_batch([[3]], assistant_model=NgramDraft())
