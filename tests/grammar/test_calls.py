"""`generate(grammar=…)`: greedy texts beside plain `generate` with the mask as a logits processor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from support.calls import TREE
from support.grammar import NaiveMask, chain
from support.tokenizer import tiny_tokenizer
from transformers import LogitsProcessorList, PreTrainedModel

from hf_specdec import NgramDraft, last_metrics
from hf_specdec.trees import forced


VOCAB, END = 61, 2
LINES = LLMatcher.grammar_from_regex(r"start[a-m]{2,9}( (aa|bb|zz)[a-f]{0,3}end){2,4}\.")
"""Free and forced tokens, a choice of words, and an end."""
OPEN = LLMatcher.grammar_from_regex(r"([a-d]+\.)*")
"""May end after every full stop, and may go on."""


def plain(target: PreTrainedModel, inputs: dict[str, torch.Tensor], grammar: str, **options: Any) -> torch.Tensor:
    mask = NaiveMask(grammar, tiny_tokenizer(), inputs["input_ids"].shape[1], [END], VOCAB)
    options |= {"eos_token_id": END}
    return target.generate(**inputs, do_sample=False, logits_processor=LogitsProcessorList([mask]), **options)


def constrained(target: PreTrainedModel, inputs: dict[str, torch.Tensor], grammar: str, **options: Any) -> Any:
    options |= {"eos_token_id": END}
    return target.generate(**inputs, do_sample=False, grammar=grammar, tokenizer=tiny_tokenizer(), **options)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("grammar", [LINES, OPEN], ids=["lines", "open"])
@pytest.mark.some_cases(2)
def test_greedy_texts(target: PreTrainedModel, draft: PreTrainedModel, inputs_of: Any, batch_size: int, grammar: str):
    inputs, options = inputs_of[batch_size], {"max_new_tokens": 60}
    expected = plain(target, inputs, grammar, **options)
    assert torch.equal(constrained(target, inputs, grammar, **options), expected)
    for assistant, tree in ((draft, TREE), (draft, "chain:3"), (NgramDraft(), None)):
        found = constrained(target, inputs, grammar, assistant_model=assistant, tree=tree, **options)
        assert torch.equal(found, expected)
    assert grammar == OPEN or END in expected[0, 12:]


def test_forced_tokens_are_proposed(target: PreTrainedModel, inputs_of: Any, monkeypatch: pytest.MonkeyPatch):
    """
    `start` in the first step, whatever the drafter says, `end` below what it proposes; and any chain that does not fit
    is refused.
    """
    options: dict[str, Any] = {"max_new_tokens": 60, "assistant_model": NgramDraft(), "tree": "chain:2"}
    expected = constrained(target, inputs_of[1], LINES, **options)
    accepted = last_metrics().accepted_per_step[0]
    assert accepted[0] >= 4 and max(accepted[1:]) > 2
    for wrong in ([3, 3], [4, 4, 4], [2]):
        monkeypatch.setattr(
            "hf_specdec.grammar.texts.GrammarText.forced", lambda self, most, wrong=wrong: wrong[:most]
        )
        assert torch.equal(constrained(target, inputs_of[1], LINES, **options), expected)
    assert forced.MOST_FORCED > 3


def test_the_text_may_be_cut(target: PreTrainedModel, draft: PreTrainedModel, inputs_of: Any):
    expected = plain(target, inputs_of[1], LINES, max_new_tokens=9)
    found = constrained(target, inputs_of[1], LINES, max_new_tokens=9, assistant_model=draft, tree=TREE)
    assert torch.equal(found, expected) and found.shape[1] == 12 + 9


@pytest.mark.parametrize(
    "grammar, options, says",
    [
        (LINES, {"tokenizer": None}, "`grammar` without a `tokenizer`"),
        ({"type": "object"}, {}, "`grammar` must be a string, but is dict"),
        (LLMatcher.grammar_from_regex("a(b"), {}, "`grammar` cannot be compiled.*unclosed group"),
        (LLMatcher.grammar_from_json_schema({"type": "objekt"}), {}, "`grammar` cannot be compiled: Invalid type"),
        (
            LLMatcher.grammar_from_json_schema(chain(6_000)),
            {},
            "`grammar`.*within each other 12002 times.*be 500 times",
        ),
        (LLMatcher.grammar_from_regex("[0-9]"), {}, "no token of the vocabulary continues the text"),
        (LINES, {"tokenizer": object()}, "`tokenizer` must be a fast tokenizer"),
        (
            LLMatcher.grammar_from_regex("ab"),
            {"min_new_tokens": 9, "max_new_tokens": 9, "eos_token_id": torch.tensor(2)},
            "ruled out all that it lets through .as `min_new_tokens`",
        ),
    ],
)
def test_refusals(
    target: PreTrainedModel, draft: PreTrainedModel, inputs_of: Any, grammar: Any, options: Any, says: str
):
    call: dict[str, Any] = {"tokenizer": tiny_tokenizer(), "max_new_tokens": 4, "assistant_model": draft} | options
    state = torch.get_rng_state()
    with pytest.raises((TypeError, ValueError), match=f"(?s){says}"):
        target.generate(**inputs_of[1], grammar=grammar, **call)
    assert torch.equal(torch.get_rng_state(), state)
