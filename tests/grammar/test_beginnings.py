"""Grammars that begin after free text, beside a mask that is made anew of every text."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from support.batches import assert_nothing_left, manager_of, ragged_prompts, text_alone
from support.calls import TREE
from support.exact import SIGNIFICANCE, enumerate_tokens, fit, sample_tokens
from support.grammar import NaiveMask, small_tokenizer
from support.sampling import LENGTH, METHODS, PROMPT, VOCAB, a_draft, the_target
from support.tokenizer import tiny_tokenizer
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from hf_specdec import NgramDraft, last_metrics
from hf_specdec.grammar import CompiledGrammar, FreeBeginning


END = 2
WORDS = LLMatcher.grammar_from_regex(r"(ab|ba){2}( cc){0,3}\.")
LETTERS = LLMatcher.grammar_from_regex("(a|ca)[abc]bca[abc]{2,9}")


class NaiveLateMask(LogitsProcessor):
    """The mask of a grammar that begins after some tokens, or at once if the text does not start with `first`."""

    def __init__(self, grammar: str, tokenizer: Any, length: int, end: int, vocab: int, after: list[int], first: Any):
        self._arguments, self._length, self._after, self._first = (grammar, tokenizer), length, after, first
        self._end, self._vocab, self._masks = end, vocab, dict[int, NaiveMask]()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return torch.cat([self._row(row[None], one[None]) for row, one in zip(input_ids, scores, strict=True)])

    def _row(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        text, count = ids[0, self._length :].tolist(), len(self._after)
        ends = [at for at in range(count, len(text) + 1) if text[at - count : at] == self._after]
        is_late = self._first is None or text[:1] == [self._first]
        if text and is_late and not ends:
            return scores
        start = self._length + (ends[0] if is_late and ends else 0)
        if not text and self._first is None:
            return scores
        if start not in self._masks:
            self._masks[start] = NaiveMask(*self._arguments, start, [self._end], self._vocab)
        found = self._masks[start](ids, scores)
        if not text:
            found[:, self._first] = scores[:, self._first]
        return found


@pytest.mark.parametrize("first", [None, 3], ids=["always", "if begun"])
def test_tokens_one_by_one_are_those_of_masks(first: int | None) -> None:
    """In random texts, for every token; and the text goes back to where it stood."""
    tokenizer = small_tokenizer()
    text = CompiledGrammar(LETTERS, tokenizer, VOCAB, [0], FreeBeginning((1, 2), first)).text()
    naive = NaiveLateMask(LETTERS, tokenizer, 1, 0, VOCAB, [1, 2], first)
    for number in range(12):
        draw, tokens = random.Random(number), list[int]()
        while len(tokens) < 14 and 0 not in tokens:
            text.follow(tokens)
            allowed = np.flatnonzero(np.unpackbits(text.allowed(), bitorder="little")[:VOCAB]).tolist()
            scores = naive(torch.tensor([[9, *tokens]]), torch.zeros(1, VOCAB))[0]
            assert allowed == torch.isfinite(scores).nonzero().flatten().tolist()
            assert all([token] == allowed for token in text.forced(1))
            for token in range(VOCAB):
                text.follow(tokens)
                assert text.num_allowed([token]) == (token in allowed)
            tokens.append(draw.choice(allowed))
        text.follow([])
        assert text.num_allowed(tokens) == len(tokens)


@pytest.mark.parametrize("first", [None, 3], ids=["always", "if begun"])
def test_texts_in_any_order(first: int | None) -> None:
    """A text is told of others that share a beginning with it, or none: as one that is told of each alone."""
    grammar = CompiledGrammar(LETTERS, small_tokenizer(), VOCAB, [0], FreeBeginning((1, 2), first))
    draw, text, tokens = random.Random(0), grammar.text(), list[int]()
    for _ in range(200):
        tokens = tokens[: draw.randint(0, len(tokens))] + draw.choices([1, 1, 2, 3, 4], k=draw.randint(0, 3))
        alone, found = grammar.text(), []
        for one in (text, alone):
            try:
                one.follow(tokens)
                found.append((one.has_ended, one.allowed().tolist()))
            except ValueError as error:
                found.append((False, [str(error)]))
        assert found[0] == found[1], tokens


@pytest.mark.parametrize("first", [None, True], ids=["always", "if begun"])
@pytest.mark.some_cases(1)
def test_greedy_texts(target: PreTrainedModel, draft: PreTrainedModel, inputs_of: Any, first: bool | None) -> None:
    """The end comes where the model writes it, in each row at another place."""
    inputs, length = inputs_of[3], inputs_of[3]["input_ids"].shape[1]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": END}
    free = target.generate(**inputs, **options)[:, length:].tolist()
    after = free[0][5:7]
    start = free[1][0] if first else None
    mask = NaiveLateMask(WORDS, tiny_tokenizer(), length, END, 61, after, start)
    expected = target.generate(**inputs, logits_processor=LogitsProcessorList([mask]), **options)
    assert expected[0, length + 7 :].tolist() != free[0][7:]
    for assistant, tree in ((None, None), (draft, TREE), (NgramDraft(), None)):
        found = target.generate(
            **inputs,
            grammar=WORDS,
            grammar_after=FreeBeginning(tuple(after), start),
            tokenizer=tiny_tokenizer(),
            assistant_model=assistant,
            **({"tree": tree} if tree else {}),
            **options,
        )
        assert torch.equal(found, expected)


def fit_of(rows: int) -> Any:
    mask = NaiveLateMask(LETTERS, small_tokenizer(), PROMPT["input_ids"].shape[1], 0, VOCAB, [2], 3)
    expected = enumerate_tokens(the_target(), PROMPT, LENGTH, logits_processor=LogitsProcessorList([mask]))
    tokens = sample_tokens(
        the_target(),
        PROMPT,
        rows,
        LENGTH,
        assistant_model=a_draft("noisy"),
        speculative_config=METHODS["rejection, irregular"],
        grammar=LETTERS,
        grammar_after=FreeBeginning((2,), 3),
        tokenizer=small_tokenizer(),
    )
    return fit(tokens[0], expected)


@pytest.mark.slow
def test_drawn_texts_have_the_enumerated_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fit_of(600)
    assert found.p_value > SIGNIFICANCE and found.detectable < 0.35, found
    assert last_metrics().num_accepted_tokens > 0
    monkeypatch.setattr(FreeBeginning, "length_in", lambda self, tokens, *_: 0 if tokens else None)  # a wrong version
    assert fit_of(200).p_value < SIGNIFICANCE


def test_requests(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    prompts = ragged_prompts((9, 4))
    free = text_alone(target, prompts[0], max_new_tokens=8)
    own: dict[str, Any] = {"grammar": WORDS, "grammar_after": free[1:3], "tokenizer": tiny_tokenizer()}
    options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": END}
    with manager_of(target, draft) as manager:
        names = [manager.add_request(prompts[0], **own, **options), manager.add_request(prompts[1], **options)]
        results = {}
        while len(results) < 2:
            output = manager.get_result(timeout=60)
            if output is not None and output.is_finished():
                results[output.request_id] = output.generated_tokens
        expected = [text_alone(target, prompts[0], anew=True, **own, **options)]
        expected.append(text_alone(target, prompts[1], **options))
        assert [results[name] for name in names] == expected
    assert_nothing_left(manager)
    assert results[names[0]][:3] == free[:3] and tiny_tokenizer().decode(results[names[0]][3:]).endswith(".<eos>")


@pytest.mark.parametrize(
    "options, says",
    [
        ({"grammar": WORDS, "grammar_after": "</think>"}, "`grammar_after` must be a list of token ids"),
        ({"grammar": WORDS, "grammar_after": []}, "`grammar_after` has no token"),
        ({"grammar_after": [5]}, "`grammar_after` without a `grammar`"),
    ],
)
def test_refusals(target: PreTrainedModel, inputs_of: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        target.generate(**inputs_of[1], tokenizer=tiny_tokenizer(), max_new_tokens=4, **options)
