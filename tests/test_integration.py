"""
With what surrounds a `generate` call: trained weights, pipelines, adapters, compiled and vision-language models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.goldens import TINY_TARGET, trained_prompts, trained_target, trained_tokenizer
from support.heads import trained_head, trained_medusa_heads
from support.models import noisy_copy, padded_otherwise, prompts, tiny_model
from support.parity import IRREGULAR, assert_same_text, plain_text
from support.vision import VISION_MODELS, padded, ragged_image_prompts
from transformers import PreTrainedModel, pipeline

import hf_specdec
from hf_specdec import DynamicTree, NgramDraft, SpeculativeConfig, TokenTree
from hf_specdec.metrics import set_last_metrics


PROMPT = 9
NEW_TOKENS = 18


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("llama", seed=5, attention_sharpness=3.0)


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    return noisy_copy(target)


# ----------------------------------------------------------------------------------------------------- trained weights


@pytest.fixture(scope="module")
def trained_draft() -> PreTrainedModel:
    return noisy_copy(trained_target(), noise=0.2)


TRAINED_TREES = [TokenTree.chain(5), IRREGULAR, DynamicTree(depth=5, top_k=3, num_nodes=16)]


@pytest.mark.parametrize("tree", TRAINED_TREES, ids=["chain", "irregular", "dynamic"])
@pytest.mark.some_cases(1)
def test_trained_model_prompt_by_prompt(trained_draft: PreTrainedModel, tree: Any) -> None:
    """In float32 and against greedy texts that were written by plain `generate` elsewhere."""
    target, goldens = trained_target(), trained_prompts()
    for ids, expected in list(zip(goldens["prompts"], goldens["greedy_64"], strict=True))[:2]:
        out = target.generate(
            torch.tensor([ids]), max_new_tokens=64, do_sample=False, assistant_model=trained_draft, tree=tree
        )
        assert out.tolist() == [ids + expected]
        assert hf_specdec.last_metrics().num_accepted_tokens > 0


@pytest.mark.parametrize("tree", TRAINED_TREES, ids=["chain", "irregular", "dynamic"])
@pytest.mark.parametrize("kind", ["model", "ngram"])
@pytest.mark.some_cases(1)
def test_trained_model_in_a_batch(trained_draft: PreTrainedModel, kind: str, tree: Any) -> None:
    """All prompts at once, of lengths from 8 to 57."""
    target, goldens = trained_target(), trained_prompts()
    inputs = trained_tokenizer().pad({"input_ids": goldens["prompts"]}, return_tensors="pt")
    assert (inputs["attention_mask"][:, 0] == 0).any()
    out = target.generate(
        **inputs,
        max_new_tokens=64,
        do_sample=False,
        assistant_model=trained_draft if kind == "model" else NgramDraft(),
        tree=tree,
    )
    assert out[:, inputs["input_ids"].shape[1] :].tolist() == goldens["greedy_64"]
    metrics = hf_specdec.last_metrics()
    assert metrics.num_accepted_tokens > 0
    if kind == "model":
        assert metrics.mean_acceptance_length > 2


# ----------------------------------------------------------------------------------------------------------- pipelines


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return trained_tokenizer().batch_decode(trained_prompts()["prompts"][:5])


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.some_cases(1)
def test_pipeline_with_an_assistant(trained_draft: PreTrainedModel, texts: list[str], batch_size: int) -> None:
    target, tokenizer = trained_target(), trained_tokenizer()
    options = {"max_new_tokens": 24, "do_sample": False, "batch_size": batch_size}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    speculative = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=trained_draft)
    expected = plain(texts, **options)
    set_last_metrics(None)
    assert speculative(texts, **options, tree=IRREGULAR) == expected
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    assert speculative(texts, **options, speculative_config=SpeculativeConfig(tree=TokenTree.chain(3))) == expected
    set_last_metrics(None)
    assert speculative(texts[0], max_new_tokens=24, do_sample=False, tree=IRREGULAR) == expected[0]
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


@pytest.mark.parametrize("kind", ["eagle", "medusa", "ngram"])
@pytest.mark.some_cases(1)
def test_pipeline_with_a_draft_of_ours(texts: list[str], kind: str) -> None:
    """It is given to the pipeline, or to the call."""
    drafts = {"eagle": trained_head, "medusa": trained_medusa_heads, "ngram": lambda: NgramDraft(min_ngram=1)}
    draft = drafts[kind]()
    plain = pipeline("text-generation", model=trained_target(), tokenizer=trained_tokenizer())
    speculative = pipeline(
        "text-generation", model=trained_target(), tokenizer=trained_tokenizer(), assistant_model=draft
    )
    texts = texts[:3]
    options = {"max_new_tokens": 12, "do_sample": False, "batch_size": 2}
    expected = plain(texts, **options)
    for call, more in ((speculative, {}), (speculative, {"tree": "chain:2"}), (plain, {"assistant_model": draft})):
        set_last_metrics(None)
        assert call(texts, **options, **more) == expected
        assert hf_specdec.last_metrics().num_drafts > 0


@pytest.mark.parametrize("size", [500, 530], ids=["smaller", "larger"])
@pytest.mark.parametrize("by_name", [False, True], ids=["model", "folder"])
@pytest.mark.some_cases(1)
def test_pipeline_with_another_padding(
    trained_draft: PreTrainedModel, texts: list[str], size: int, by_name: bool, tmp_path: Path
) -> None:
    target, tokenizer = trained_target(), trained_tokenizer()
    draft: Any = padded_otherwise(trained_draft, size)
    if by_name:
        draft.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        draft = str(tmp_path)
    speculative = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft)
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    options = {"max_new_tokens": 24, "do_sample": False}
    set_last_metrics(None)
    assert speculative(texts[:2], **options, tree=IRREGULAR) == plain(texts[:2], **options)
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


def test_pipelines_take_no_classes() -> None:
    with pytest.raises(TypeError, match=r"`assistant_model`.*`NgramDraft\(\)`"):
        pipeline("text-generation", model=trained_target(), tokenizer=trained_tokenizer(), assistant_model=NgramDraft)


def test_assistants_named_by_their_folder(texts: list[str]) -> None:
    speculative = pipeline(
        "text-generation", model=trained_target(), tokenizer=trained_tokenizer(), assistant_model=str(TINY_TARGET)
    )
    speculative(texts[0], max_new_tokens=16, do_sample=False, tree="[(0,), (0, 0)]")
    assert hf_specdec.last_metrics().accepted_per_step == [[2] * 5]


# ------------------------------------------------------------------------------------------------------------ adapters


def with_lora(model: PreTrainedModel, seed: int) -> Any:
    """The model with an adapter of random weights (a fresh one changes nothing)."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(copy.deepcopy(model), config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted


@pytest.mark.parametrize("batch_size", [1, 3])
def test_lora_target(target: PreTrainedModel, draft: PreTrainedModel, batch_size: int) -> None:
    adapted = with_lora(target, seed=1)
    inputs = prompts(batch_size, PROMPT, padding=batch_size > 1)
    expected = plain_text(adapted, inputs, max_new_tokens=NEW_TOKENS)
    assert expected.tolist() != plain_text(target, inputs, max_new_tokens=NEW_TOKENS).tolist()
    assert_same_text(adapted, inputs, draft, expected=expected, max_new_tokens=NEW_TOKENS)
    expected = plain_text(target, inputs, max_new_tokens=NEW_TOKENS)
    with adapted.disable_adapter():
        assert_same_text(adapted, inputs, draft, expected=expected, max_new_tokens=NEW_TOKENS)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.some_cases(1)
def test_lora_draft(target: PreTrainedModel, batch_size: int) -> None:
    """A draft with an adapter is what it would be with the adapter merged into its weights."""
    adapted = with_lora(noisy_copy(target), seed=1)
    inputs = prompts(batch_size, PROMPT, padding=batch_size > 1)
    metrics = [
        assert_same_text(target, inputs, assistant, TokenTree.chain(4), max_new_tokens=40)
        for assistant in (adapted, copy.deepcopy(adapted).merge_and_unload(), noisy_copy(target))
    ]
    steps = [run.accepted_per_step for run in metrics]
    assert steps[0] == steps[1] != steps[2]


def test_lora_target_that_drafts_for_itself(target: PreTrainedModel) -> None:
    adapted = with_lora(target, seed=1)
    metrics = assert_same_text(adapted, prompts(2, PROMPT), adapted, TokenTree.chain(4), max_new_tokens=21)
    assert metrics.accepted_per_step == [[4] * 4] * 2


def test_learned_prompts_are_refused(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(copy.deepcopy(target), config)
    with pytest.raises(ValueError, match="`assistant_model`: the target is tuned with .*PROMPT_TUNING"):
        tuned.generate(**prompts(1, PROMPT), max_new_tokens=4, assistant_model=draft, tree=IRREGULAR)
    with pytest.raises(ValueError, match="`assistant_model`: the draft is tuned with .*PROMPT_TUNING"):
        target.generate(**prompts(1, PROMPT), max_new_tokens=4, assistant_model=tuned, tree=IRREGULAR)


# ----------------------------------------------------------------------------------------------------- compiled models


def test_compiled_target(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """`torch.compile(model).generate` is the model's own."""
    compiled = torch.compile(target, backend="eager")
    assert_same_text(compiled, prompts(2, PROMPT, padding=True), draft, max_new_tokens=NEW_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["target", "draft"])
def test_compiled_forward(target: PreTrainedModel, draft: PreTrainedModel, role: str) -> None:
    inputs = prompts(2, PROMPT, padding=True)
    expected = assert_same_text(target, inputs, draft, TokenTree.chain(3), max_new_tokens=NEW_TOKENS)
    if role == "target":
        target = copy.deepcopy(target)
        target.compile(backend="eager")
    else:
        draft = torch.compile(copy.deepcopy(draft), backend="eager")
    metrics = assert_same_text(target, inputs, draft, TokenTree.chain(3), max_new_tokens=NEW_TOKENS)
    assert metrics.accepted_per_step == expected.accepted_per_step


# ---------------------------------------------------------------------------------------------- vision-language models


@pytest.fixture(scope="module", params=VISION_MODELS)
def vision(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, Callable[[int, bool], dict[str, torch.Tensor]]]:
    make, inputs = VISION_MODELS[request.param]
    return make(), inputs


@pytest.mark.parametrize("batch_size, padding", [(1, False), (3, True)])
@pytest.mark.parametrize("kind", ["text model", "self", "ngram"])
@pytest.mark.some_cases(3)
def test_prompts_with_an_image(vision: Any, kind: str, batch_size: int, padding: bool) -> None:
    model, inputs_of = vision
    inputs = inputs_of(batch_size, padding)
    expected = plain_text(model, inputs, max_new_tokens=24)
    other_image = inputs | {"pixel_values": inputs["pixel_values"].flip(-1)}
    assert expected.tolist() != model.generate(**other_image, max_new_tokens=24, do_sample=False).tolist()
    assistant = {"text model": tiny_model("llama", seed=3), "self": model, "ngram": NgramDraft(min_ngram=1)}[kind]
    # A wide tree, for a draft that has not seen the image.
    tree = TokenTree.from_branching((12, 2)) if kind == "text model" else IRREGULAR
    assert_same_text(model, inputs, assistant, tree, expected=expected, max_new_tokens=24)


@pytest.mark.parametrize("pieces", [((9,), (20,), (4, 5)), ((3, 4, 2), (12,), (1, 8))])
@pytest.mark.parametrize("name", VISION_MODELS)
@pytest.mark.some_cases(2)
def test_images_in_some_rows(name: str, pieces: tuple[tuple[int, ...], ...]) -> None:
    """In the last row alone, and several in one row."""
    model, inputs = VISION_MODELS[name][0](), padded(ragged_image_prompts(name, pieces))
    assert_same_text(model, inputs, noisy_copy(model), IRREGULAR, max_new_tokens=16)


def test_prompts_without_an_image(vision: Any) -> None:
    """The model drafts for itself and knows all there is: everything is accepted."""
    model, _ = vision
    metrics = assert_same_text(model, prompts(1, PROMPT, seed=4), model, TokenTree.chain(4), max_new_tokens=21)
    assert metrics.accepted_per_step == [[4] * 4]


@pytest.mark.some_cases(2)
def test_turns_behind_an_image(vision: Any) -> None:
    """The second turn has its image in the cache only."""
    model, inputs_of = vision
    texts = []
    for options in ({}, {"assistant_model": model, "tree": IRREGULAR}):
        inputs = inputs_of(1, False)
        first = model.generate(
            **inputs, max_new_tokens=10, do_sample=False, return_dict_in_generate=True, use_cache=True, **options
        )
        ids = torch.cat([first.sequences, torch.tensor([[7, 8, 9]])], dim=1)
        second = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=first.past_key_values,
            max_new_tokens=10,
            do_sample=False,
            **options,
        )
        texts.append(second.tolist())
    assert texts[0] == texts[1]
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
