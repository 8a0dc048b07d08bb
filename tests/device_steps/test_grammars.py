"""Rows with a grammar in whole steps on the device: the host takes tokens up to the first that is not allowed."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from support.batches import assert_nothing_left, limits
from support.device_steps import Steps
from support.exact import SIGNIFICANCE, Fit, enumerate_tokens, fit
from support.grammar import NaiveMask, small_tokenizer
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR
from support.sampling import LENGTH, PROMPT, TREE, VOCAB, a_draft, a_head, sampled_tokens, the_target
from support.tokenizer import tiny_tokenizer
from transformers import LogitsProcessorList

from hf_specdec import DynamicTree, SpeculativeConfig
from hf_specdec.engine.captured import constraining


ROWS, END = 500, 2
GRAMMAR = LLMatcher.grammar_from_regex("(a|b|ca)[abc](bca|cab)?[abc]{8,}")
LINES = LLMatcher.grammar_from_regex(r"start[a-m]{2,9}( (aa|bb|zz)[a-f]{0,3}end){2,4}\.")


@cache
def expected() -> torch.Tensor:
    mask = NaiveMask(GRAMMAR, small_tokenizer(), PROMPT["input_ids"].shape[1], [0], VOCAB)
    return enumerate_tokens(
        the_target(), PROMPT, LENGTH, logits_processor=LogitsProcessorList([mask]), temperature=0.8
    )


def sampled(config: SpeculativeConfig, assistant: Any) -> Fit:
    target, options = copy.deepcopy(the_target()).float(), {"grammar": GRAMMAR, "tokenizer": small_tokenizer()}
    return fit(sampled_tokens(target, assistant.float(), config, ROWS, temperature=0.8, **options), expected())


@pytest.mark.parametrize("method", ["target", "auto"])
def test_the_distribution(method: Any, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong version of it, which takes the next best token of the step, does not fit."""
    config = SpeculativeConfig(tree=TREE, verification=method, cuda_graphs=True)
    found = sampled(config, copy.deepcopy(a_draft("noisy")))
    assert steps.replays > 0
    assert found.p_value > SIGNIFICANCE, found
    if method == "auto":
        monkeypatch.setattr(constraining, "choose", lambda scores, do_sample: scores.argmax(dim=-1))
        assert sampled(config, copy.deepcopy(a_draft("noisy"))).p_value < SIGNIFICANCE


@pytest.mark.parametrize("tree", [IRREGULAR, DynamicTree(depth=3, top_k=3, num_nodes=9)], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", ["draft", "head"])
def test_greedy_calls(kind: str, tree: Any, steps: Steps) -> None:
    """With padding, and with features that wait for a head."""
    target = tiny_model(dtype=torch.float32) if kind == "draft" else copy.deepcopy(the_target()).float()
    grammar, tokenizer = (LINES, tiny_tokenizer()) if kind == "draft" else (GRAMMAR, small_tokenizer())
    inputs = prompts(3, 9) if kind == "draft" else {name: value.expand(2, -1) for name, value in PROMPT.items()}
    draft = noisy_copy(target, 0.05) if kind == "draft" else copy.deepcopy(a_head(None)).float()
    options: dict[str, Any] = {"grammar": grammar, "tokenizer": tokenizer, "max_new_tokens": 40, "do_sample": False}
    options |= {"eos_token_id": END, "min_new_tokens": 16} if kind == "draft" else {"eos_token_id": 0}
    options["pad_token_id"] = 0
    alone = target.generate(**inputs, **options)
    found = target.generate(**inputs, **options, assistant_model=draft, tree=tree)
    assert torch.equal(found, alone)
    assert steps.replays > 4


def test_requests_beside_others(steps: Steps) -> None:
    """One with a grammar, one without, one that nothing continues: all of them in whole steps."""
    target = tiny_model(dtype=torch.float32)
    given: list[tuple[list[int], dict[str, Any]]] = [
        ([5, 9, 12], {"grammar": LINES}),
        ([7, 7, 3, 8], {}),
        ([4, 30], {"grammar": LLMatcher.grammar_from_regex("abcde[0-9]")}),
    ]
    with target.init_continuous_batching(
        assistant_model=noisy_copy(target, 0.05), tree=IRREGULAR, continuous_batching_config=limits()
    ) as manager:
        for number, (prompt, own) in enumerate(given):
            own = own | ({"tokenizer": tiny_tokenizer()} if own else {})
            manager.add_request(prompt, str(number), 40, eos_token_id=END, **own)
        found: dict[str, Any] = {}
        while len(found) < len(given):
            output = manager.get_result(timeout=60)
            if output is not None and output.is_finished():
                found[output.request_id] = output
    for number in (0, 1):
        prompt, own = given[number]
        own = own | ({"tokenizer": tiny_tokenizer()} if own else {})
        alone = target.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=END, **own)
        assert found[str(number)].generated_tokens == alone[0, len(prompt) :].tolist()
    assert "no token of the vocabulary continues the text" in found["2"].error
    assert found["2"].fails_by_its_options and len(found["2"].generated_tokens) == 5
    assert steps.replays > 4
    assert_nothing_left(manager)
