"""What cannot be served is refused by name, before any forward, and leaves everything as it was."""

from __future__ import annotations

import copy
import importlib
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.calls import TREE, assert_same_calls
from support.heads import tiny_head
from support.models import VOCAB, noisy_copy, prompts, tiny_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    PreTrainedModel,
    StaticCache,
    cache_utils,
)

import hf_specdec
from hf_specdec import DynamicTree, EagleHead, NgramDraft, SpeculativeConfig, TokenTree
from hf_specdec.compat import CACHE
from hf_specdec.models.structure import num_embeddings_of, num_logits_of


@contextmanager
def left_untouched(*models: Any, cache: Any = None) -> Iterator[None]:
    """Asserts that nothing inside runs a forward of these models or changes them, the random state, or a cache."""
    models = [model for model in models if isinstance(model, PreTrainedModel)]
    forwards: list[PreTrainedModel] = []
    handles = [
        module.register_forward_pre_hook(lambda module, args: forwards.append(module))
        for model in models
        for module in model.modules()
    ]
    before = [snapshot(model) for model in models]
    layers = [] if cache is None else copy.deepcopy(getattr(cache, "layers", []))
    random_state = torch.get_rng_state()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    assert not forwards, f"{type(forwards[0]).__name__} was run"
    assert [snapshot(model) for model in models] == before
    assert torch.equal(torch.get_rng_state(), random_state)
    for then, now in zip(layers, getattr(cache, "layers", []), strict=True):
        assert type(now) is type(then)
        assert now.is_initialized == then.is_initialized
        if now.is_initialized:
            assert torch.equal(now.keys, then.keys) and torch.equal(now.values, then.values)


def snapshot(model: PreTrainedModel) -> list[Any]:
    """What a call could leave behind on a model."""
    return [
        model.config.to_dict(),
        model.config._attn_implementation,
        [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")],
        model.generation_config.to_dict() if model.can_generate() else None,
        sorted(set(vars(model)) - {"prepare_inputs_for_generation"}),  # PEFT leaves its own behind in every call
        {name: parameter._version for name, parameter in model.named_parameters()},
    ]


def assert_refused(
    model: PreTrainedModel, options: dict[str, Any], *words: str, error: type[Exception] = ValueError
) -> None:
    """Asserts that a call raises an error that says all these words, and changes nothing."""
    assistant, cache = options.get("assistant_model"), options.get("past_key_values")
    with left_untouched(model, assistant, cache=cache), pytest.raises(error) as caught:
        model.generate(**({"max_new_tokens": 8, **prompts(1, 6)} | options))
    message = str(caught.value)
    assert type(caught.value) is error, message
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"


# -------------------------------------------------------------------------------------------------------------- trees


BAD_TREES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "not closed": ("[(0,), (0, 0", ("[(0,), (0, 0", "[(0,), (1,), (0, 0)]")),
    "a word": ("deep", ("deep", "[(0,), (1,), (0, 0)]")),
    "an expression": ("[(0,)] * 2", ("[(0,)] * 2", "[(0,), (1,), (0, 0)]")),
    "a call": ("__import__('os').getcwd()", ("[(0,), (1,), (0, 0)]",)),
    "an empty string": ("", ("[(0,), (1,), (0, 0)]",)),
    "a number in a string": ("3", ("int", "[(0,), (1,), (0, 0)]")),
    "a single path": ("(0, 0)", ("(0, 0)", "a single path", "[(0, 0)]")),
    "a missing comma": ("[(0)]", ("(0,)", "comma")),
    "no nodes": ([], ("empty", "at least one")),
    "no nodes in a string": ("[]", ("empty", "at least one")),
    "the root": ([()], ("()", "the root is always there")),
    "a missing parent": ([(0,), (1, 0)], ("(1, 0)", "(1,)", "Add the parent")),
    "a missing grandparent": ("[(0, 0, 0), (0, 0)]", ("(0, 0)", "(0,)", "Add the parent")),
    "a duplicate": ([(0,), (0, 1), (0, 1)], ("(0, 1)", "twice", "Remove one")),
    "a negative rank": ([(0,), (-1,)], ("(-1,)", "negative", "from 0")),
    "a rank that is half": ([(0,), (0.5,)], ("0.5", "not an integer")),
    "a rank that is a bool": ([(0,), (0, True)], ("True", "not an integer")),
    "a rank that is a string": ([("0",)], ("'0'", "not an integer")),
    "too many nodes": ([(rank,) for rank in range(1025)], ("1024", "smaller")),
    "a rank beyond the vocabulary": ([(VOCAB,)], (str(VOCAB), "vocabulary", "narrower")),
    "more branches than tokens": (DynamicTree(depth=2, top_k=VOCAB + 1, num_nodes=4), (str(VOCAB), "vocabulary")),
    "a schedule that begins late": ([(5, "[(0,)]"), (9, "[(0,)]")], ("begin with 0 and rise", "[5, 9]")),
    "a schedule that falls": ([(0, "[(0,)]"), (9, "[(0,)]"), (7, None)], ("begin with 0 and rise", "[0, 9, 7]")),
    "a schedule without trees": ([(0, None)], ("must name a tree somewhere",)),
    "a schedule with a path": ([(0, "[(0,)]"), (0, 1)], ("(0, 1)", "no entry of a schedule")),
    "a schedule in a schedule": ([(0, [(0, "[(0,)]")])], ("a schedule within a schedule",)),
    "a schedule with a bad tree": ([(0, "[(0, 0)]")], ("(0, 0)", "parent")),
}


@pytest.mark.parametrize("name", BAD_TREES)
@pytest.mark.parametrize("through", ["tree", "speculative_config"])
def test_bad_trees(target: PreTrainedModel, draft: PreTrainedModel, name: str, through: str) -> None:
    tree, words = BAD_TREES[name]
    value = tree if through == "tree" else {"tree": tree}
    for assistant in (draft, NgramDraft()):
        assert_refused(target, {"assistant_model": assistant, through: value}, "`tree", *words)


def named(value: Any) -> str:
    """The same in every process."""
    return re.sub(r" at 0x\w+", "", repr(value))


@pytest.mark.parametrize("tree", ["[(0,,", [(0, 1)]])
def test_the_frames_of_an_error_are_those_of_the_call(target: PreTrainedModel, tree: Any) -> None:
    """
    A notebook shows all frames: those that read the tree, and the parser's own error, are left out. What stays are the
    wrappers of `generate`, which loads named drafts, and of its checks.
    """
    with pytest.raises(ValueError, match="`tree`") as caught:
        target.generate(torch.tensor([[3]]), assistant_model=NgramDraft(), tree=tree, max_new_tokens=2)
    own = str(Path(hf_specdec.__file__).parent)
    assert sum(frame.filename.startswith(own) for frame in traceback.extract_tb(caught.tb)) <= 5
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("tree", [3, 0.5, True, {"paths": [[0]], "depth": 2}, {0, 1}, b"[(0,)]", object()], ids=named)
def test_trees_of_the_wrong_type(target: PreTrainedModel, draft: PreTrainedModel, tree: Any) -> None:
    options = {"assistant_model": draft, "tree": tree}
    assert_refused(target, options, "`tree`", type(tree).__name__, "a string", error=TypeError)


@pytest.mark.parametrize("tree", [["0"], ["(0,)"], [0, 1], [(0,), 1], [None]], ids=repr)
def test_paths_of_the_wrong_type(target: PreTrainedModel, draft: PreTrainedModel, tree: Any) -> None:
    wrong = next(path for path in tree if not isinstance(path, tuple))
    options = {"assistant_model": draft, "tree": tree}
    assert_refused(target, options, "`tree`", repr(wrong), "not a path", error=TypeError)


def test_a_rank_within_the_vocabulary_is_taken(target: PreTrainedModel) -> None:
    """The last rank there is, with all better ones: whatever the target says is among the children."""
    tree = [(rank,) for rank in range(VOCAB)]
    _, metrics = assert_same_calls(target, noisy_copy(target, noise=3.0), prompts(1, 6), {"max_new_tokens": 8}, tree)
    assert metrics.accepted_per_step == [[1, 1, 1, 0]]


@pytest.mark.parametrize("value", [-1, 0, 1.5, True, "3", None], ids=repr)
@pytest.mark.parametrize("name", ["depth", "top_k", "num_nodes"])
def test_limits_of_dynamic_trees(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}={re.escape(repr(value))}.*positive integer"):
        DynamicTree(**({"depth": 2, "top_k": 2, "num_nodes": 4} | {name: value}))


def test_dynamic_trees_that_cannot_be_filled() -> None:
    with pytest.raises(ValueError, match="num_nodes=1025.*1024.*Use fewer"):
        DynamicTree(depth=9, top_k=32, num_nodes=1025)
    with pytest.raises(ValueError, match="num_nodes=7.*depth=2.*top_k=2.*6 candidates.*Raise `depth` or `top_k`"):
        DynamicTree(depth=2, top_k=2, num_nodes=7)


# --------------------------------------------------------------------------------------------------- how to speculate


def test_a_tree_without_a_draft(target: PreTrainedModel) -> None:
    """It would decode plainly, and silently."""
    assert_refused(target, {"tree": "[(0,)]"}, "`tree`", "[(0,)]", "assistant_model", "NgramDraft")
    assert_refused(target, {"tree": "[(0,)]", "do_sample": True}, "`tree`", "assistant_model")
    options = {"speculative_config": SpeculativeConfig(tree="[(0,)]")}
    assert_refused(target, options, "`speculative_config`", "assistant_model", "NgramDraft")


def test_a_tree_beside_a_config(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    options = {"assistant_model": draft, "tree": "[(0,)]", "speculative_config": SpeculativeConfig(tree="[(1,)]")}
    assert_refused(target, options, "`tree`", "[(0,)]", "`speculative_config`", "give one of them")


def test_configs_of_the_wrong_kind(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    call = {"assistant_model": draft}
    for wrong in ("[(0,)]", [(0,)], TokenTree.chain(2), 3):
        words = ("`speculative_config`", type(wrong).__name__, "SpeculativeConfig")
        assert_refused(target, call | {"speculative_config": wrong}, *words, error=TypeError)
    unknown = {"tree": "[(0,)]", "depth": 3}
    assert_refused(target, call | {"speculative_config": unknown}, "`speculative_config`", "depth", "draft_sampling")


BAD_CONFIGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "greedy with rejection": (
        {"draft_sampling": "greedy", "verification": "rejection"},
        ("draft_sampling='greedy'", "verification='rejection'", "verification='target'", "draft_sampling='sample'"),
    ),
    "draft_sampling": ({"draft_sampling": "beam"}, ("`draft_sampling`", "'beam'", "'auto', 'greedy', 'sample'")),
    "verification": ({"verification": "typical"}, ("`verification`", "'typical'", "'auto', 'target', 'rejection'")),
    "negative batch size": ({"disable_by_batch_size": -1}, ("`disable_by_batch_size`", "-1", "from 0 on")),
    "half a batch size": ({"disable_by_batch_size": 1.5}, ("`disable_by_batch_size`", "1.5", "integer")),
    "a batch size that is a bool": ({"disable_by_batch_size": True}, ("`disable_by_batch_size`", "True", "integer")),
    "cuda_graphs": ({"cuda_graphs": "always"}, ("`cuda_graphs`", "'auto', True or False", "'always'")),
    "compile": ({"compile": "max"}, ("`compile`", "True or False", "'max'")),
    "compile without graphs": (
        {"compile": True, "cuda_graphs": False},
        ("`compile=True`", "`cuda_graphs=False`"),
    ),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configs(target: PreTrainedModel, draft: PreTrainedModel, name: str) -> None:
    """When a `SpeculativeConfig` is made, and when a saved one is read."""
    values, words = BAD_CONFIGS[name]
    with pytest.raises(ValueError) as caught:
        SpeculativeConfig(**values)
    assert all(word in str(caught.value) for word in words)
    assert_refused(target, {"assistant_model": draft, "speculative_config": values}, *words)


@pytest.mark.parametrize("do_sample", [False, True])
def test_drafters_without_probabilities(target: PreTrainedModel, do_sample: bool) -> None:
    call = {"assistant_model": NgramDraft(), "do_sample": do_sample}
    for asked, words in (
        ({"verification": "rejection"}, ("verification='rejection'", "'auto' or 'target'")),
        ({"draft_sampling": "sample"}, ("draft_sampling='sample'", "'auto' or 'greedy'")),
        ({"draft_sampling": "sample", "verification": "rejection"}, ("draft_sampling='sample'", "'auto' or 'greedy'")),
    ):
        assert_refused(target, call | {"speculative_config": SpeculativeConfig(**asked)}, *words)


@pytest.mark.parametrize("tree", ["[(1,)]", "[(0,), (2,)]", "[(0,), (0, 1)]"])
def test_rank_gaps_with_drawn_children(target: PreTrainedModel, draft: PreTrainedModel, tree: str) -> None:
    """Taking the second draw only would bias the output. Children that are not drawn may have gaps."""
    words = ("`tree`", tree, "rank gaps", "close the gaps")
    assert_refused(target, {"assistant_model": draft, "tree": tree, "do_sample": True}, *words)
    drawn = SpeculativeConfig(tree=tree, draft_sampling="sample")
    assert_refused(target, {"assistant_model": draft, "speculative_config": drawn}, *words)
    chosen = SpeculativeConfig(tree=tree, draft_sampling="greedy")
    for options in ({"tree": tree}, {"speculative_config": chosen, "do_sample": True}):
        target.generate(**prompts(1, 6), max_new_tokens=8, assistant_model=draft, **options)
        assert hf_specdec.last_metrics().num_drafts > 0


# ------------------------------------------------------------------------------------------------------------- drafts


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


# ------------------------------------------------------------------------------------------------------ architectures


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


# ------------------------------------------------------------------------------------------------- options of generate


BAD_OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "beam search": ({"num_beams": 2}, ("num_beams=2", "num_beams=1")),
    "beam sampling": ({"num_beams": 3, "do_sample": True}, ("num_beams=3", "num_beams=1")),
    "contrastive search": (
        {"penalty_alpha": 0.6, "top_k": 4, "trust_remote_code": True},
        ("contrastive_search", "`penalty_alpha`", "Leave the option"),
    ),
    "group beam search": (
        {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5, "trust_remote_code": True},
        ("num_beams=2", "num_beams=1"),
    ),
    "constraints": (
        {"force_words_ids": [[3]], "trust_remote_code": True},
        ("constrained_beam_search", "`constraints`", "Leave the option"),
    ),
    "dola": ({"dola_layers": "low"}, ("dola_layers='low'", "Leave one of them out")),
    "prompt look-up": ({"prompt_lookup_num_tokens": 3}, ("prompt_lookup_num_tokens=3", "Leave one out")),
    "early exit": ({"assistant_early_exit": 1}, ("assistant_early_exit=1", "Leave one out")),
    "multi-token prediction": ({"use_mtp": True}, ("use_mtp=True", "Leave one out")),
    "no cache": ({"use_cache": False}, ("use_cache=False", "needs the cache", "Leave `use_cache` out")),
    **{
        f"{name} cache": ({"cache_implementation": name}, (f"cache_implementation='{name}'", "Leave"))
        for name in ("static", "offloaded_static", "sliding_window", "quantized", "offloaded")
    },
    **{
        name: (
            {name: value},
            (f"{name}={value!r}", "transformers' own assisted generation", "Leave it out", "`tree=`"),
        )
        for name, value in {
            "num_assistant_tokens": 7,
            "num_assistant_tokens_schedule": "heuristic",
            "assistant_confidence_threshold": 0.1,
            "assistant_ensemble_weight": 0.5,
            "assistant_lookbehind": 3,
            "target_lookbehind": 4,
            "speculation_type": "dflash",
            "max_matching_ngram_size": 3,
        }.items()
    },
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options_that_mean_something_else(target: PreTrainedModel, draft: PreTrainedModel, name: str) -> None:
    """Nothing is silently ignored: neither with a draft model nor with a drafter."""
    options, words = BAD_OPTIONS[name]
    for speculative in ({"assistant_model": draft, "tree": "[(0,)]"}, {"assistant_model": NgramDraft()}):
        assert_refused(target, speculative | options, *words)


@pytest.mark.parametrize("name", ["beam search", "beam sampling", "contrastive search", "constraints", "dola"])
def test_no_warning_before_the_refusal(target: PreTrainedModel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of flags that are ignored, nor of code to trust; plain calls get transformers' own words."""
    warnings: list[str] = []
    for module in ("configuration_utils", "utils"):
        logger = importlib.import_module(f"transformers.generation.{module}").logger
        for method in ("warning", "warning_once"):
            monkeypatch.setattr(logger, method, lambda text, *rest: warnings.append(text))
    options, words = BAD_OPTIONS[name]
    options = {key: value for key, value in options.items() if key != "trust_remote_code"}
    assert_refused(target, {"assistant_model": NgramDraft()} | options, *words)
    assert not [text for text in warnings if "will be ignored" in text or "custom_generate" in text]
    GenerationConfig(num_beams=2).get_generation_mode(target)
    assert any("will be ignored" in text for text in warnings)


def test_options_of_the_generation_config(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """A refused option is refused wherever it stands."""
    config = copy.deepcopy(target.generation_config)
    config.update(num_beams=4, max_new_tokens=8)
    assert_refused(
        target,
        {"assistant_model": draft, "tree": "[(0,)]", "generation_config": config, "max_new_tokens": None},
        "num_beams=4",
    )


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


def quantized_cache(config: Any) -> DynamicCache:
    """A cache with a quantised layer, without a quantisation library."""

    class Quantized(cache_utils.QuantizedLayer):
        def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
            return tensor

        def _dequantize(self, q_tensor: torch.Tensor) -> torch.Tensor:
            return q_tensor

    cache = DynamicCache(config=config)
    cache.layers[1] = Quantized()
    return cache


CACHES: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "static": (lambda config: StaticCache(config=config, max_cache_len=64), ("StaticCache", "StaticLayer", "layer 0")),
    "quantized": (quantized_cache, ("DynamicCache", "Quantized", "layer 1")),
    "offloaded": (lambda config: DynamicCache(config=config, offloading=True), ("without offloading",)),
    "encoder-decoder": (
        lambda config: EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config)),
        ("EncoderDecoderCache",),
    ),
}


@pytest.mark.parametrize("name", CACHES)
def test_caches_that_cannot_hold_a_tree(target: PreTrainedModel, draft: PreTrainedModel, name: str) -> None:
    make, words = CACHES[name]
    for speculative in ({"assistant_model": draft, "tree": "[(0,)]"}, {"assistant_model": NgramDraft()}):
        options = speculative | {"past_key_values": make(target.config)}
        assert_refused(target, options, f"`{CACHE}`", "Pass a `DynamicCache`", *words)


def test_a_good_cache_is_untouched_by_a_refusal(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """A cache with a conversation in it survives a call that is refused for something else."""
    cache = DynamicCache(config=target.config)
    text = target.generate(**prompts(1, 6), max_new_tokens=4, do_sample=False, past_key_values=cache)
    options = {"input_ids": text, "attention_mask": torch.ones_like(text), "past_key_values": cache}
    assert_refused(target, options | {"assistant_model": draft, "tree": "[(0, 0)]"}, "Add the parent")
    assert cache.get_seq_length() == text.shape[1] - 1


def test_a_misspelt_option(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """As ever, transformers finds it."""
    assert_refused(target, {"assistant_model": draft, "trees": "[(0,)]"}, "trees", "not used by the model")


def test_after_refusals_all_is_well(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """The models that were refused a hundred times above still speculate."""
    assert_same_calls(target, draft, prompts(3, 12, padding=True), {"max_new_tokens": 16}, TREE)
