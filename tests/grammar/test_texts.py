"""Where texts stand in grammars: what may come next, asked in two ways, and ways back."""

from __future__ import annotations

import copy
import random
import re
import weakref

import llguidance.hf
import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from support.grammar import NaiveMask, json_tokenizer, small_tokenizer
from support.scripts import tokenizer as marked_tokenizer
from support.tokenizer import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from hf_specdec.grammar import CompiledGrammar, compiled, special_tokens
from hf_specdec.grammar.texts import GrammarText, num_shared


SCHEMA = {
    "type": "object",
    "properties": {"abc": {"type": "string", "maxLength": 3}, "b": {"type": ["integer", "null"]}},
    "required": ["abc", "b"],
    "additionalProperties": False,
}
GRAMMARS = {
    "lines": (LLMatcher.grammar_from_regex(r"start[a-m]{2,9}( (aa|bb|zz)[a-f]{0,3}end){2,4}\."), tiny_tokenizer()),
    "open": (LLMatcher.grammar_from_regex(r"([a-d]+\.)*"), tiny_tokenizer()),
    "letters": (LLMatcher.grammar_from_regex("(a|b|ca)[abc](bca|cab)?[abc]{2,5}"), small_tokenizer()),
    "lark": (LLMatcher.grammar_from_lark('start: x ("c" start)?\nx: "ab" | "ba" | /aa+/'), small_tokenizer()),
    "json": (LLMatcher.grammar_from_json_schema(SCHEMA), json_tokenizer()),
    "compact json": (
        LLMatcher.grammar_from_json_schema(SCHEMA, defaults={"whitespace_flexible": False}),
        json_tokenizer(),
    ),
}


def begun(name: str) -> tuple[GrammarText, int, PreTrainedTokenizerFast]:
    grammar, tokenizer = GRAMMARS[name]
    return CompiledGrammar(grammar, tokenizer, len(tokenizer)).text(), len(tokenizer), tokenizer


def allowed_in(text: GrammarText, vocab: int) -> list[int]:
    bits = np.unpackbits(text.allowed(), bitorder="little")[:vocab]
    return np.flatnonzero(bits).tolist()


@pytest.mark.parametrize("name", GRAMMARS)
def test_tokens_one_by_one_are_those_of_masks(name: str) -> None:
    """In every state of random texts, for every token; and the text goes back to where it stood."""
    text, vocab, tokenizer = begun(name)
    for number in range(6):
        draw, tokens, has_ended = random.Random(number), [], False
        while not has_ended and len(tokens) < 40:
            text.follow(tokens)
            allowed = allowed_in(text, vocab)
            assert all(token == allowed[0] for token in text.forced(1)) and (not text.forced(1) or len(allowed) == 1)
            for token in range(vocab):
                text.follow(tokens)
                assert text.num_allowed([token]) == (token in allowed), (name, tokenizer.decode(tokens), token)
            tokens.append(draw.choice(allowed))
            has_ended = tokens[-1] == tokenizer.eos_token_id
        text.follow([])
        assert text.num_allowed(tokens) == len(tokens)


@pytest.mark.parametrize("ends", [[2], [2, 40], [40, 2, 7], [40]])
def test_end_tokens(ends: list[int]) -> None:
    """All of them may come where the text is complete, and only there, although llguidance knows one alone."""
    grammar, tokenizer = GRAMMARS["open"]
    text = CompiledGrammar(grammar, tokenizer, len(tokenizer), ends).text()
    naive = NaiveMask(grammar, tokenizer, 0, [2], len(tokenizer))
    for written in ("", "ab", "ab.", "ab.c"):
        tokens = tokenizer.encode(written)
        masked = naive(torch.tensor([tokens], dtype=torch.long), torch.zeros(1, len(tokenizer)))
        text.follow(tokens)
        allowed = {*(masked[0] == 0).nonzero()[:, 0].tolist()}
        assert {*allowed_in(text, len(tokenizer))} == allowed - {2, *ends} | ({*ends} if 2 in allowed else set())
        assert [text.num_allowed([end]) for end in ends] == [int(written in ("", "ab."))] * len(ends)
        text.follow(tokens)


def test_calls_with_one_end_token_in_common_share_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], llguidance.hf.from_tokenizer
    monkeypatch.setattr(llguidance.hf, "from_tokenizer", lambda *given, **own: made.append(1) or make(*given, **own))
    tokenizer = copy.deepcopy(small_tokenizer())
    for ends in ([], [0], [3, 0], [5, 0, 999]):
        CompiledGrammar(GRAMMARS["letters"][0], tokenizer, len(tokenizer), ends)
    assert len(made) == 1
    CompiledGrammar(GRAMMARS["letters"][0], tokenizer, len(tokenizer), [3])
    assert len(made) == 2
    with pytest.raises(ValueError, match="neither `eos_token_id` nor the tokenizer"):
        CompiledGrammar(GRAMMARS["letters"][0], tokenizer, len(tokenizer), [999])


def test_a_chain_of_forced_tokens_is_allowed() -> None:
    text, _, tokenizer = begun("lines")
    chain = text.forced(12)
    assert tokenizer.decode(chain) == "start"
    assert text.num_allowed([*chain, tokenizer.eos_token_id]) == len(chain)
    with pytest.raises(ValueError, match="does not let token 3 through"):
        text.follow([*chain, 3])
    text.follow(chain[:2])
    assert text.forced(12) == chain[2:]


@pytest.mark.parametrize(
    "grammar, pattern",
    [
        (LLMatcher.grammar_from_lark('start: "a<|im_end|>" /[a-z]{2}/ "</think>"'), r"a<\|im_end\|>[a-z]{2}</think>"),
        (LLMatcher.grammar_from_lark('start: "<" "think" ">"'), "<think>"),
        (LLMatcher.grammar_from_lark('start: "<think>" | "b<think>"'), "b?<think>"),
        (LLMatcher.grammar_from_regex(r"[ab]<\|im_end\|>"), r"[ab]<\|im_end\|>"),
        (LLMatcher.grammar_from_json_schema({"const": "<think>"}), '"<think>"'),
        # What does not look like one until it is asked for:
        (LLMatcher.grammar_from_regex(r"<[|]im_end[|]>"), r"<\|im_end\|>"),
        (LLMatcher.grammar_from_regex(r"[ab]<(think)>\x3cthink>"), "[ab]<think><think>"),
        (LLMatcher.grammar_from_lark('start: /[ab]/ a "think" b\na: "<"\nb: ">"'), "[ab]<think>"),
        (LLMatcher.grammar_from_lark('// one "\nstart: "<think>"'), "<think>"),
        (LLMatcher.grammar_from_lark('%llguidance {}\nstart: "a<think>"'), "a<think>"),
        (LLMatcher.grammar_from_json_schema({"pattern": "^[<]think>$", "type": "string"}), '"<think>"'),
    ],
)
def test_texts_of_special_tokens(grammar: str, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written in other tokens. Without that llguidance asks for a token that it does not take."""
    own, draw = marked_tokenizer(), random.Random(0)
    end = own.convert_tokens_to_ids("<|im_end|>")

    def write() -> str:
        text, tokens = CompiledGrammar(grammar, own, len(own), [end]).text(), list[int]()
        while end not in tokens:
            text.follow(tokens)
            allowed = np.flatnonzero(np.unpackbits(text.allowed(), bitorder="little")).tolist()
            tokens.append(draw.choice(allowed))
        assert not set(tokens[:-1]) & set(special_tokens(own).values())
        assert CompiledGrammar(grammar, own, len(own), [end]).text().num_allowed(tokens) == len(tokens)
        for count in range(len(tokens)):  # as far as a draft goes back
            text.follow(tokens[:count])
            assert text.forced(1) in ([], [tokens[count]])
        return own.decode(tokens[:-1])

    assert all(re.fullmatch(pattern, write()) for _ in range(6))
    monkeypatch.setattr(compiled, "spelled_out", lambda grammar, special: grammar)
    monkeypatch.setattr(compiled, "_tables", weakref.WeakKeyDictionary())
    assert all(re.fullmatch(pattern, write()) for _ in range(6))
    monkeypatch.setattr(compiled, "unforced", lambda grammar: grammar)
    with pytest.raises((ValueError, AssertionError)):
        for _ in range(6):
            assert re.fullmatch(pattern, write())


def test_special_tokens_that_a_grammar_names() -> None:
    """They stay those, and what has nothing of them is forced as ever."""
    own = marked_tokenizer()
    think = own.convert_tokens_to_ids("<think>")
    text = CompiledGrammar(LLMatcher.grammar_from_lark('start: <think> "abc"'), own, len(own), [257]).text()
    assert text.forced(9)[:2] == [think, own.convert_tokens_to_ids("a")]


def test_num_shared() -> None:
    draw = random.Random(0)
    for _ in range(300):
        told = [draw.randint(0, 1) for _ in range(draw.choice([0, 1, 30, 33, 70, 200]))]
        tokens = told[: draw.randint(0, len(told))] + [draw.randint(0, 1) for _ in range(draw.choice([0, 1, 40]))]
        pairs = [one == other for one, other in zip(told, tokens, strict=False)]
        assert num_shared(told, tokens) == (pairs.index(False) if False in pairs else len(pairs))
