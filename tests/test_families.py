"""Every model family: greedy text equal to plain `generate`; what cannot hold a tree is refused."""

from __future__ import annotations

import copy
import sys
from functools import lru_cache
from typing import Any

import pytest
import torch
from support.heads import WIDE, RecordingDrafter, assert_drafts_as_from_scratch, pads_of, tiny_head
from support.models import FAMILIES, KV_SHARING, attention_of, noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR, assert_same_text, plain_text
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    OpenAIGPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RecurrentGemmaConfig,
    T5Config,
)
from transformers.masking_utils import eager_mask

from hf_specdec import DynamicTree, NgramDraft, SpeculativeConfig, TokenTree, last_metrics
from hf_specdec.compat import CACHE


NEW_TOKENS = 26  # with prompts of 10 tokens, rows pass a window of 12 on the way
TREES = {
    "chain": TokenTree.chain(4),
    "irregular": IRREGULAR,
    "dynamic": DynamicTree(depth=4, top_k=3, num_nodes=10),
}
# Seeds whose texts vary.
SEEDS = {
    "llama": 5,
    "gpt2": 4,
    "gemma2": 1,
    "gemma3_text": 1,
    "mixtral": 1,
    "phi": 2,
    "qwen2_moe": 1,
    "gpt_oss": 3,
    "gptj": 4,
    "falcon": 1,
}
SMOKE = ("llama", "sdpa")


def with_every_family(calls: list[tuple[Any, ...]]) -> list[Any]:
    """Every call with every family, each with one of its attention implementations in turn."""
    found = []
    for place, family in enumerate(FAMILIES):
        implementations = attention_of(family)
        for number, call in enumerate(calls):
            target = (family, implementations[(place + number) % len(implementations)])
            found.append(pytest.param(*target, *call, marks=pytest.mark.smoke if target == SMOKE else ()))
    return found


@lru_cache
def target_of(family: str, implementation: str) -> PreTrainedModel:
    attn_implementation = None if implementation == "default" else implementation
    return tiny_model(family, SEEDS.get(family, 0), attn_implementation=attn_implementation, attention_sharpness=3.0)


@lru_cache
def draft_of(family: str, implementation: str, kind: str) -> Any:
    target = target_of(family, implementation)
    if kind == "ngram":
        return NgramDraft(min_ngram=1)
    return noisy_copy(target) if kind == "model" else target


@lru_cache
def inputs_of(batch_size: int) -> dict[str, torch.Tensor]:
    return prompts(batch_size, 10, padding=batch_size > 1)


@lru_cache
def text_of(family: str, implementation: str, batch_size: int) -> torch.Tensor:
    return plain_text(target_of(family, implementation), inputs_of(batch_size), max_new_tokens=NEW_TOKENS)


# Every two of a kind of draft, a number of rows and a tree come together.
CALLS = [
    (kind, (1, 3)[(place + number) % 2], tree)
    for place, kind in enumerate(("model", "self", "ngram"))
    for number, tree in enumerate(TREES)
]


@pytest.mark.parametrize("family, implementation, kind, batch_size, tree", with_every_family(CALLS))
def test_greedy_equality(family: str, implementation: str, kind: str, batch_size: int, tree: str) -> None:
    metrics = assert_same_text(
        target_of(family, implementation),
        inputs_of(batch_size),
        draft_of(family, implementation, kind),
        TREES[tree],
        expected=text_of(family, implementation, batch_size),
        max_new_tokens=NEW_TOKENS,
    )
    if kind == "self" and tree != "dynamic":
        # One token from the prefill, then steps of 4 + 1: a draft that went wrong somewhere would show as a refusal.
        assert metrics.accepted_per_step == [[4] * 5] * batch_size


SAMPLED_TREES = {
    "chain": TokenTree.chain(4),
    "branching": TokenTree.from_branching((3, 2, 1)),
    "dynamic": DynamicTree(depth=3, top_k=3, num_nodes=8),
}


SAMPLED = [(1, "chain"), (3, "branching"), (1, "dynamic"), (3, "dynamic")]


@pytest.mark.parametrize("family, implementation, batch_size, tree", with_every_family(SAMPLED))
def test_sampling(family: str, implementation: str, batch_size: int, tree: str) -> None:
    """
    Tokens that the model has drawn for itself are all accepted, since p is q at every node: a draft or a tree forward
    that went wrong somewhere would show as a refusal. (What is done with p and q that differ is tested elsewhere.)
    """
    target = target_of(family, implementation)
    config = SpeculativeConfig(tree=SAMPLED_TREES[tree], draft_temperature=1.0)
    torch.manual_seed(0)
    target.generate(
        **inputs_of(batch_size),
        assistant_model=target,
        speculative_config=config,
        do_sample=True,
        temperature=2.0,
        max_new_tokens=NEW_TOKENS,
    )
    steps = last_metrics().accepted_per_step
    depth = SAMPLED_TREES[tree].depth
    if tree == "dynamic":
        assert all(len(of_row) <= NEW_TOKENS / 2 for of_row in steps)
        assert all(accepted >= 1 for of_row in steps for accepted in of_row[:-1])
    else:
        assert all(set(of_row[:-1]) == {depth} for of_row in steps), steps


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "mistral", "qwen2_moe", "gpt_oss"])
@pytest.mark.parametrize("tree", TREES)
def test_prompts_far_beyond_the_sliding_window(family: str, tree: str) -> None:
    target = target_of(family, "eager" if family in ("gemma2", "gpt_oss") else "sdpa")
    inputs = prompts(2, 50, seed=3, padding=True)
    assert_same_text(target, inputs, noisy_copy(target), TREES[tree], max_new_tokens=NEW_TOKENS)


@pytest.mark.parametrize("family", ["gemma2", "mistral", "qwen2_moe"])
def test_window_matters(family: str) -> None:
    """The texts above depend on the window: without one they are others."""
    implementation = "eager" if family == "gemma2" else "sdpa"
    wide = tiny_model(
        family, SEEDS.get(family, 0), attn_implementation=implementation, attention_sharpness=3.0, sliding_window=200
    )
    text = wide.generate(**inputs_of(3), max_new_tokens=NEW_TOKENS, do_sample=False)
    assert text.tolist() != text_of(family, implementation, 3).tolist()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_implementations_of_others(family: str) -> None:
    """
    A kernel from the Hub (whose name is that of its repository) does the prefill; trees need one that takes their
    mask.
    """
    module = sys.modules[type(target_of(family, "eager")).__module__]
    queries = []

    def attention(layer: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        queries.append(query.shape[2])
        return module.eager_attention_forward(layer, query, *args, **kwargs)

    AttentionInterface.register("somebodys/kernel", attention)
    AttentionMaskInterface.register("somebodys/kernel", eager_mask)
    target = copy.deepcopy(target_of(family, "eager"))
    target.config._attn_implementation_internal = "somebodys/kernel"  # its setter would look on the Hub
    inputs = inputs_of(3)
    expected = text_of(family, "eager", 3)
    queries.clear()
    assert_same_text(target, inputs, noisy_copy(target), expected=expected, max_new_tokens=NEW_TOKENS)
    assert set(queries) == {10}, "the prompts alone"
    assert target.config._attn_implementation == "somebodys/kernel"


@pytest.mark.parametrize("role", ["target", "draft"])
def test_attention_functions_of_a_users_own_are_refused(role: str) -> None:
    """Over a tree another implementation would take its place, and it may compute something else."""

    def attention(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a forward ran before the refusal")

    AttentionInterface.register("somebodys", attention)
    AttentionMaskInterface.register("somebodys", eager_mask)
    target, model = target_of("llama", "sdpa"), tiny_model("llama", attn_implementation="somebodys")
    target, draft = (model, NgramDraft()) if role == "target" else (target, model)
    with pytest.raises(ValueError, match=f"`attn_implementation`='somebodys' of the {role} .*'sdpa' or 'eager'"):
        target.generate(**inputs_of(1), max_new_tokens=4, assistant_model=draft, tree="[(0,)]")


def test_draft_of_another_family() -> None:
    target, draft = target_of("llama", "sdpa"), tiny_model("gpt2", seed=5)
    inputs = inputs_of(3)
    text = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, assistant_model=draft, tree=IRREGULAR)
    assert text.tolist() == text_of("llama", "sdpa", 3).tolist()


@pytest.mark.parametrize("role, batch_size", [("target", 1), ("draft", 3)])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_router_logits(family: str, role: str, batch_size: int) -> None:
    """A config that asks for them, as after training, asks for an auxiliary loss, too, which takes no 4D mask."""
    implementation = attention_of(family)[-1]
    target = copy.deepcopy(target_of(family, implementation))
    draft = noisy_copy(target)
    (target if role == "target" else draft).config.output_router_logits = True
    expected = text_of(family, implementation, batch_size)
    for assistant in (draft, NgramDraft(min_ngram=1)):
        assert_same_text(target, inputs_of(batch_size), assistant, expected=expected, max_new_tokens=NEW_TOKENS)


@lru_cache
def kv_sharing_target() -> PreTrainedModel:
    return tiny_model("gemma4_text", attention_sharpness=3.0, **KV_SHARING)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", ["model", "EAGLE-1", "EAGLE-3", "ngram"])
def test_layers_that_share_keys_and_values(kind: str, batch_size: int) -> None:
    """Its last layers run at all positions that a draft or a head needs, and not only where logits are asked for."""
    target, inputs = kv_sharing_target(), prompts(batch_size, 16, padding=batch_size > 1)
    drafts = {
        "model": lambda: noisy_copy(target),
        "EAGLE-1": lambda: RecordingDrafter(tiny_head(target, eagle_version=1)),
        "EAGLE-3": lambda: RecordingDrafter(tiny_head(target, aux_layer_ids=[0, 1, 4])),
        "ngram": lambda: NgramDraft(min_ngram=1),
    }
    draft, options = drafts[kind](), {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    plain = plain_text(target, inputs, max_new_tokens=NEW_TOKENS)
    text = target.generate(**inputs, **options, assistant_model=draft, tree=WIDE)
    assert text.tolist() == plain.tolist()
    if isinstance(draft, RecordingDrafter):
        assert_drafts_as_from_scratch(draft, target, text, pads_of(inputs))


def test_chunked_prefill_of_a_windowed_family() -> None:
    target = target_of("mistral", "sdpa")
    assert_same_text(
        target, prompts(2, 30, padding=True), noisy_copy(target), max_new_tokens=NEW_TOKENS, prefill_chunk_size=7
    )


# ------------------------------------------------------------------------------------------------------------ refusals

_SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "recurrent_gemma": (
        RecurrentGemmaConfig(**_SMALL, intermediate_size=48, lru_width=32, num_key_value_heads=1),
        "recurrent",
    ),
    "openai-gpt": (OpenAIGPTConfig(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64), CACHE),
}


def small_causal_lm(config: PreTrainedConfig) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.pad_token_id = 0
    return model


def forbid_forwards(model: PreTrainedModel) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("a forward ran before the refusal")

    model.register_forward_pre_hook(fail)


@pytest.mark.parametrize("family", REFUSED)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_models_that_cannot_hold_a_tree_are_refused(family: str, role: str) -> None:
    config, reason = REFUSED[family]
    model = small_causal_lm(config)
    target, draft = (model, NgramDraft()) if role == "target" else (tiny_model("llama"), model)
    forbid_forwards(target)
    forbid_forwards(model)
    with pytest.raises(ValueError, match=rf"(?s)`assistant_model`.*{role}.*{reason}"):
        target.generate(**inputs_of(1), max_new_tokens=4, assistant_model=draft, tree="[(0,)]")


def test_encoder_decoders_do_not_draft_for_decoders() -> None:
    config = T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    )
    model, target = AutoModelForSeq2SeqLM.from_config(config).eval(), tiny_model("llama")
    forbid_forwards(target)
    with pytest.raises(ValueError, match="`assistant_model`.*encoder-decoder"):
        target.generate(**inputs_of(1), max_new_tokens=4, assistant_model=model, tree="[(0,)]")
