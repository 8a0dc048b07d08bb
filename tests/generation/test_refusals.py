"""Options and caches that cannot be served are refused by name, before any forward, and leave everything as it was."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.calls import TREE, assert_same_calls
from support.models import prompts
from support.refusals import assert_refused
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    EosTokenCriteria,
    GenerationConfig,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
    cache_utils,
)

from hf_specdec import NgramDraft
from hf_specdec.compat import CACHE


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


def test_rows_that_cannot_be_padded(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """A criterion with end tokens where the config has none: `generate` makes no pad token, and needs one."""
    criteria = StoppingCriteriaList([EosTokenCriteria(5)])
    alone = {"stopping_criteria": criteria, "eos_token_id": None, "pad_token_id": None, "do_sample": False}
    with pytest.raises(TypeError, match="NoneType"):
        target.generate(**prompts(2, 6), max_new_tokens=8, **alone)
    options = alone | prompts(2, 6) | {"assistant_model": draft, "tree": "[(0,)]"}
    assert_refused(target, options, "`stopping_criteria`", "`pad_token_id` is None")


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
