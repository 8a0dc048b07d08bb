"""Requests with a grammar in flight beside others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from support.batches import assert_nothing_left, limits, manager_of, ragged_prompts, text_alone
from support.grammar import rules
from support.models import VOCAB
from support.tokenizer import tiny_tokenizer
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList, TemperatureLogitsWarper

from hf_specdec.batching import SpeculativeBatchingManager
from hf_specdec.engine.captured.grammars import constrained
from hf_specdec.engine.request import Request, RequestOptions
from hf_specdec.grammar import CompiledGrammar, GrammarMask


END = 2
LINES = LLMatcher.grammar_from_regex(r"start[a-m]{2,9}( (aa|bb|zz)[a-f]{0,3}end){2,4}\.")
WORDS = LLMatcher.grammar_from_regex("(ab|ba){3}( cc)*")
IMPOSSIBLE = LLMatcher.grammar_from_regex("ab[0-9]")
LENGTHS = (9, 1, 30, 2)


@pytest.fixture
def running(target: PreTrainedModel, draft: PreTrainedModel) -> Iterator[SpeculativeBatchingManager]:
    with manager_of(target, draft) as manager:
        yield manager
    assert_nothing_left(manager)


def results_of(manager: SpeculativeBatchingManager, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while len(found) < len(names):
        output = manager.get_result(timeout=60)
        if output is not None and output.is_finished():
            found[output.request_id] = output
    return found


def alone(target: PreTrainedModel, prompt: list[int], grammar: str | None, **options: Any) -> list[int]:
    own = {} if grammar is None else {"grammar": grammar, "tokenizer": tiny_tokenizer()}
    return text_alone(target, prompt, anew=True, eos_token_id=END, **own, **options)


def test_texts_beside_others(target: PreTrainedModel, running: SpeculativeBatchingManager):
    prompts, grammars = ragged_prompts(LENGTHS), [LINES, None, WORDS, LINES]
    names = []
    for number, (prompt, grammar) in enumerate(zip(prompts, grammars, strict=True)):
        own = {} if grammar is None else {"grammar": grammar, "tokenizer": tiny_tokenizer()}
        names.append(running.add_request(prompt, f"{number}", 40, eos_token_id=END, speculate=number < 3, **own))
    results = results_of(running, names)
    for name, prompt, grammar in zip(names, prompts, grammars, strict=True):
        assert results[name].generated_tokens == alone(target, prompt, grammar, max_new_tokens=40)
    assert results["0"].finish_reason == "stop"
    assert results["0"].speculation.num_accepted_tokens >= 4


def test_ends(running: SpeculativeBatchingManager):
    """At the end of the grammar, at the length, and at a stop string within the grammar."""
    prompt, tokenizer = ragged_prompts((7,))[0], tiny_tokenizer()
    options: dict[str, Any] = {"eos_token_id": END, "grammar": LINES, "tokenizer": tokenizer}
    running.add_request(prompt, "all", 60, **options)
    running.add_request(prompt, "cut", 6, **options)
    running.add_request(prompt, "stop", 60, stop_strings=["tart"], **options)
    results = results_of(running, ["all", "cut", "stop"])
    texts = {name: tokenizer.decode(result.generated_tokens) for name, result in results.items()}
    assert texts["all"].endswith(".<eos>") and texts["all"].startswith(texts["cut"])
    assert texts["stop"] == "start"
    assert [results[name].finish_reason for name in ("all", "cut", "stop")] == ["stop", "length", "stop"]


def test_a_text_that_cannot_go_on_fails_alone(target: PreTrainedModel, running: SpeculativeBatchingManager):
    prompts = ragged_prompts((5, 9))
    running.add_request(prompts[0], "0", 20, grammar=IMPOSSIBLE, tokenizer=tiny_tokenizer())
    running.add_request(prompts[1], "1", 20, eos_token_id=END)
    results = results_of(running, ["0", "1"])
    assert "no token of the vocabulary continues the text" in results["0"].error
    assert results["0"].fails_by_its_options
    assert results["1"].generated_tokens == alone(target, prompts[1], None, max_new_tokens=20)


@pytest.mark.parametrize("do_sample", [False, True])
def test_scores_of_no_allowed_token(do_sample: bool):
    """Nothing is drawn in place of a captured step's token where a tiny temperature leaves nothing to draw from."""
    mask = GrammarMask(CompiledGrammar(WORDS, tiny_tokenizer(), VOCAB))
    processors = LogitsProcessorList([mask, TemperatureLogitsWarper(1e-37)])
    options = RequestOptions(processors, StoppingCriteriaList(), do_sample, None)
    request = Request("0", [5, 6], options, torch.device("cpu"))
    logits = torch.full((VOCAB,), -40.0)
    logits[7] = 30.0
    mask(torch.tensor([request.tokens]), logits[None])
    tokens, error = constrained(request, [7], lambda place: logits)
    assert tokens == [] and "nothing to choose from" in str(error)


def test_a_wrong_grammar_is_refused(running: SpeculativeBatchingManager):
    wrong: tuple[tuple[Any, Any, str], ...] = (
        ("start: x", tiny_tokenizer(), "`grammar` cannot be compiled"),
        (rules(6_000), tiny_tokenizer(), "`grammar`.*within each other 6001 times.*be 500 times"),
        (LINES, None, "`grammar` without a `tokenizer`"),
        (5, tiny_tokenizer(), "`grammar` must be a string"),
    )
    for grammar, tokenizer, says in wrong:
        with pytest.raises((TypeError, ValueError), match=says):
            running.add_request([5, 6], grammar=grammar, tokenizer=tokenizer)


def test_generate_batch(target: PreTrainedModel, draft: PreTrainedModel):
    """Little memory, so that requests are preempted; seeds, so that sampled texts are those of each alone."""
    prompts = ragged_prompts((9, 12, 17))
    options: dict[str, Any] = {"grammar": LINES, "tokenizer": tiny_tokenizer(), "eos_token_id": END}
    options |= {"max_new_tokens": 30, "do_sample": True, "seed": 5}
    texts = []
    for some, num_blocks in ((prompts, 22), *(([prompt], 200) for prompt in prompts)):
        outputs = target.generate_batch(
            some,
            assistant_model=draft,
            tree="chain:3",
            continuous_batching_config=limits(num_blocks=num_blocks),
            **options,
        )
        texts += [output.generated_tokens for output in outputs.values()]
    assert texts[:3] == texts[3:]
    assert all(tiny_tokenizer().decode(text).startswith("start") for text in texts)
    assert torch.equal(torch.tensor(texts[0][:5]), torch.tensor(tiny_tokenizer().encode("start")))
