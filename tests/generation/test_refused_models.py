"""Targets and drafts that cannot be served are refused by name, and left as they were."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.calls import TREE, assert_same_calls
from support.heads import tiny_head
from support.models import VOCAB, prompts, tiny_model
from support.refusals import assert_refused, left_untouched, named
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from hf_specdec import EagleHead, NgramDraft, TokenTree
from hf_specdec.compat import CACHE
from hf_specdec.models.structure import num_embeddings_of, num_logits_of


def test_a_draft_of_another_vocabulary(target: PreTrainedModel) -> None:
    options = {"assistant_model": tiny_model(vocab_size=67, eos_token_id=5), "tree": "[(0,)]"}
    assert_refused(target, options, "`assistant_model`", "67", str(VOCAB), "the target's tokenizer")


@pytest.mark.parametrize(
    "assistant",
    [3, object(), torch.nn.Linear(2, 2), [NgramDraft()], NgramDraft, TokenTree.chain(2)],
    ids=named,
)
def test_assistants_of_the_wrong_type(target: PreTrainedModel, assistant: Any) -> None:
    words = ("`assistant_model`", type(assistant).__name__, "a causal language model", "NgramDraft")
    assert_refused(target, {"assistant_model": assistant, "tree": "[(0,)]"}, *words, error=TypeError)


@pytest.mark.parametrize("options", [{}, {"tree": "chain:2"}], ids=str)
@pytest.mark.parametrize(
    "assistant, remedy",
    [
        (NgramDraft, "`NgramDraft()`"),
        (EagleHead, "Pass an instance"),
    ],
    ids=named,
)
def test_classes_instead_of_drafts(
    target: PreTrainedModel, assistant: Any, remedy: str, options: dict[str, Any]
) -> None:
    """With a tree and without one: transformers would fail on them with an `AttributeError`."""
    words = ("`assistant_model`", "must be a causal language model", type(assistant).__name__, remedy)
    assert_refused(target, {"assistant_model": assistant, **options}, *words, error=TypeError)
    with left_untouched(target), pytest.raises(TypeError, match=re.escape(remedy)):
        target.generate_batch(prompts(1, 6)["input_ids"].tolist(), assistant_model=assistant, **options)


@pytest.mark.parametrize(
    "values", [{"max_ngram": 0}, {"min_ngram": 0}, {"max_ngram": 2.0}, {"min_ngram": True}], ids=str
)
def test_ngram_sizes(values: dict[str, Any]) -> None:
    name, value = next(iter(values.items()))
    with pytest.raises(ValueError, match=rf"{name}={re.escape(repr(value))}.*positive integer"):
        NgramDraft(**values)
    with pytest.raises(ValueError, match="min_ngram=5.*`max_ngram`=3.*Swap"):
        NgramDraft(max_ngram=3, min_ngram=5)


def model_of(family: str, auto: Any = AutoModelForCausalLM, **values: Any) -> PreTrainedModel:
    common = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1}
    return auto.from_config(AutoConfig.for_model(family, **(common | {"eos_token_id": 2} | values))).eval()


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}


UNSERVED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "recurrent_gemma": (lambda: model_of("recurrent_gemma", **HEADS, lru_width=32), "recurrent or convolutional"),
    "rwkv": (lambda: model_of("rwkv", attention_hidden_size=32), "recurrent or convolutional"),
    "openai_gpt": (lambda: model_of("openai-gpt", n_embd=32, n_layer=2, n_head=4), CACHE),
}


@pytest.mark.parametrize("family", UNSERVED)
def test_models_that_cannot_hold_a_tree(target: PreTrainedModel, draft: PreTrainedModel, family: str) -> None:
    """Neither as the target, with any draft, nor as the draft."""
    make, why = UNSERVED[family]
    model = make()
    for assistant in (draft, NgramDraft()):
        words = ("`assistant_model`", "the target", type(model).__name__, why, "`generate` without")
        assert_refused(model, {"assistant_model": assistant, "tree": "[(0,)]"}, *words)
    words = ("`assistant_model`", "the draft", type(model).__name__, why)
    assert_refused(target, {"assistant_model": model, "tree": "[(0,)]"}, *words)


def test_targets_that_decode_in_their_own_way(draft: PreTrainedModel) -> None:
    """A model class with a loop of its own, or that says which modes it has."""
    target = tiny_model()

    class OwnLoop(type(target)):
        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("not reached")

    class OwnModes(type(target)):
        _supported_generation_modes = ("greedy_search", "sample")

    for kind in (OwnLoop, OwnModes):
        own = kind(target.config).to(torch.float64)
        own.generation_config = target.generation_config
        words = ("`assistant_model`", "the target", kind.__name__, "a decoding loop of its own", "`generate` without")
        assert_refused(own, {"assistant_model": draft, "tree": "[(0,)]"}, *words)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_change_with_the_length(draft: PreTrainedModel, kind: str) -> None:
    """They turn all tokens otherwise once the text passes a boundary. Texts that end before it are served."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 16, **factors}
    length = 32 if kind == "longrope" else 16
    target = tiny_model(rope_parameters=rope, max_position_embeddings=length)
    options = {"assistant_model": target, "tree": "[(0,), (0, 0)]"}
    words = ("`max_length`", "=18", repr(kind), "passes 16 tokens", "max_new_tokens=10", "`generate` without")
    assert_refused(target, options | {"max_new_tokens": 12}, *words)
    assert_same_calls(target, target, prompts(1, 6), {"max_new_tokens": 10})


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_learned_prompts(draft: PreTrainedModel, kind: str) -> None:
    """Prompt-tuned models need their virtual tokens in front of every forward; as a target and as a draft."""
    peft = pytest.importorskip("peft")
    values = {"encoder_hidden_size": 16} if kind == "PromptEncoderConfig" else {}
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3, **values)
    tuned = peft.get_peft_model(tiny_model(), config).eval()
    with left_untouched(tuned.get_base_model(), draft), pytest.raises(ValueError) as caught:
        tuned.generate(**prompts(1, 6), max_new_tokens=8, assistant_model=draft, tree="[(0,)]")
    for word in ("`assistant_model`", "the target", "learned prompt", "LoRA", "`generate` without"):
        assert word in str(caught.value)
    words = ("`assistant_model`", "the draft", "learned prompt", "LoRA")
    assert_refused(tiny_model(), {"assistant_model": tuned, "tree": "[(0,)]"}, *words)


def test_adapters_are_served(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """What the refusal above recommends: LoRA, as a target and as a draft."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(tiny_model(), config).eval()
    assert_same_calls(tuned, tiny_model(), prompts(3, 8, padding=True), {"max_new_tokens": 16})
    assert_same_calls(target, tuned, prompts(3, 8, padding=True), {"max_new_tokens": 16})


WRAPPED: dict[str, dict[str, Any]] = {
    "embeddings and lm_head": {"target_modules": ["embed_tokens", "lm_head"], "init_lora_weights": False},
    "some tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]},
    "whole modules": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_adapters_of_embeddings_are_served(kind: str) -> None:
    """Wherever an adapter has put the weights: their number of rows, with a draft model and with a head."""
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(tiny_model(), peft.LoraConfig(task_type="CAUSAL_LM", **WRAPPED[kind])).eval()
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "trainable_tokens" in name or "modules_to_save" in name:
                parameter.add_(torch.arange(parameter.numel()).view_as(parameter).sin())
    model, inputs = tuned.get_base_model(), prompts(1, 8)
    assert (num_embeddings_of(model), num_logits_of(model)) == (61, 61)
    plain = tuned.generate(**inputs, max_new_tokens=12, do_sample=False)
    head = tiny_head(model, eagle_version=3, has_embeddings=False, has_lm_head=False)
    for draft in (tiny_model(seed=1), head):
        options = {"assistant_model": draft, "tree": "[(0,), (1,), (0, 0)]", "max_new_tokens": 12}
        assert torch.equal(tuned.generate(**inputs, do_sample=False, **options), plain)
        (output,) = model.generate_batch(inputs["input_ids"].tolist(), **options).values()
        assert output.generated_tokens == plain[0, 8:].tolist()


@pytest.mark.parametrize("role", ["target", "draft"])
def test_training_with_gradient_checkpointing(target: PreTrainedModel, draft: PreTrainedModel, role: str) -> None:
    """It drops the cache in training mode, of which transformers only warns; in evaluation mode it does nothing."""
    model = copy.deepcopy(target if role == "target" else draft)
    model.gradient_checkpointing_enable()
    pair = (model, draft) if role == "target" else (target, model)
    assert_same_calls(*pair, prompts(2, 12), {"max_new_tokens": 16}, TREE)
    model.train()
    options = {"assistant_model": pair[1], "tree": TREE}
    assert_refused(pair[0], options, "`assistant_model`", role, "LlamaForCausalLM", "training mode", "`eval()`")


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_drafts_without_a_language_model_head(target: PreTrainedModel, kind: Any) -> None:
    draft = kind.from_config(target.config, dtype=target.dtype).eval()
    options = {"assistant_model": draft, "tree": TREE}
    assert_refused(target, options, "`assistant_model`", type(draft).__name__, "no language model head", "CausalLM")
