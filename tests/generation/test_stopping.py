"""Calls end where plain `generate` ends them: lengths, end tokens, stop strings and time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.calls import TREE, assert_same_calls, generate_plain, generate_with_tree, new_tokens, own_token
from support.criteria import Custom, in_text
from support.models import prompts
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation import stopping_criteria as stopping_criteria_module

import hf_specdec


PROMPT = 12
NEW_TOKENS = 24
CHAIN = "[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]"
Inputs = dict[str, torch.Tensor]
Text = list[list[int]]


# ------------------------------------------------------------------------------------------------------------- length


@pytest.mark.parametrize(
    "count, name, batch_size",
    [
        (count, ("max_new_tokens", "max_length")[(count + batch_size // 2) % 2], batch_size)
        for count in range(1, 13)
        for batch_size in (1, 3)
    ],
)
@pytest.mark.some_cases(8)
def test_length(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    count: int,
    name: str,
    batch_size: int,
    inputs_of: dict[int, Inputs],
) -> None:
    """With a path of up to four tokens per step, the end falls at every place of a path."""
    options = {name: count + (PROMPT if name == "max_length" else 0)}
    inputs = inputs_of[batch_size]
    for assistant, tree in ((target, CHAIN), (draft, TREE)):
        plain = generate_plain(target, inputs, options)
        ours = generate_with_tree(target, assistant, inputs, options, tree)
        assert ours.tolist() == plain.tolist()
        assert ours.shape[1] == PROMPT + count
        metrics = hf_specdec.last_metrics()
        # The last token of a call is never a draft token: the step's own takes its place.
        assert metrics.num_draft_tokens == 0 if count < 3 else metrics.num_draft_tokens > 0
        if assistant is target:
            steps = [min(4, count - 2 - done) for done in range(0, max(count - 1, 0), 5)]
            assert metrics.accepted_per_step == [steps] * batch_size


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 12.0},
        {"max_length": PROMPT + 12.0},
        {"max_length": PROMPT + 11.5},
    ],
    ids=str,
)
def test_lengths_that_are_no_integers(
    target: PreTrainedModel, draft: PreTrainedModel, options: dict[str, Any], inputs_of: dict[int, Inputs]
) -> None:
    for batch_size in (1, 3):
        text, _ = assert_same_calls(target, draft, inputs_of[batch_size], options)
        assert text.shape[1] == PROMPT + 12


def test_no_maximum_length(target: PreTrainedModel, draft: PreTrainedModel, inputs_of: dict[int, Inputs]) -> None:
    end = new_tokens(target, inputs_of[1], NEW_TOKENS)[0][-1]
    assert_same_calls(target, draft, inputs_of[1], {"max_new_tokens": float("inf"), "eos_token_id": end})


def test_default_length(target: PreTrainedModel, draft: PreTrainedModel, inputs_of: dict[int, Inputs]) -> None:
    """Without any option `generate` stops after 20 tokens."""
    text, _ = assert_same_calls(target, draft, inputs_of[1], {})
    assert text.shape[1] > PROMPT


# --------------------------------------------------------------------------------------------------------- end tokens


def test_end_token_at_every_place_of_a_path(
    target: PreTrainedModel, inputs_of: dict[int, Inputs], text_of: dict[int, Text]
) -> None:
    """Every token of the text as the end token, and a draft that is always right: it ends inside of accepted paths."""
    inputs, text = inputs_of[1], text_of[1][0]
    places = set()
    for token in set(text):
        options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": token}
        plain = generate_plain(target, inputs, options)
        ours = generate_with_tree(target, target, inputs, options, CHAIN)
        assert ours.tolist() == plain.tolist()
        count = text.index(token) + 1
        assert ours.shape[1] == PROMPT + count
        # One token from the prefill, then five a step; an end token among the draft tokens counts as accepted.
        steps = [min(4, count - 1 - done) for done in range(0, count - 1, 5)]
        assert hf_specdec.last_metrics().accepted_per_step == [steps]
        places.add((count - 1) % 5)
    assert places == {0, 1, 2, 3, 4}, "not every place was tried: choose another seed"


@pytest.mark.parametrize("name", ["one", "several", "the_padding_token", "in_the_first_token", "of_one_row_only"])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.some_cases(5)
def test_end_tokens(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    batch_size: int,
    name: str,
    inputs_of: dict[int, Inputs],
    text_of: dict[int, Text],
) -> None:
    text = text_of[batch_size]
    last = batch_size - 1
    end_tokens: dict[str, dict[str, Any]] = {
        "one": {"eos_token_id": text[0][4]},
        "several": {"eos_token_id": [own_token(text, row, 3 + 4 * row) for row in range(batch_size)] + [text[0][11]]},
        "the_padding_token": {"eos_token_id": own_token(text, 0, 4), "pad_token_id": own_token(text, 0, 4)},
        "in_the_first_token": {"eos_token_id": [own_token(text, last, 0), own_token(text, 0, 7)]},
        "of_one_row_only": {"eos_token_id": own_token(text, last, 9)},
    }
    options = {"max_new_tokens": NEW_TOKENS, **end_tokens[name]}
    plain = generate_plain(target, inputs_of[batch_size], options)
    ours = generate_with_tree(target, draft, inputs_of[batch_size], options)
    assert ours.tolist() == plain.tolist()
    assert hf_specdec.last_metrics().num_accepted_tokens > 0 or ours.shape[1] < PROMPT + 4
    ends = {end(row, end_tokens[name]["eos_token_id"]) for row in plain[:, PROMPT:].tolist()}
    assert len(ends) > 1 or batch_size == 1, "all rows end together: the test shows less than it should"


def end(row: list[int], end_tokens: int | list[int]) -> int:
    tokens = [end_tokens] if isinstance(end_tokens, int) else end_tokens
    return next((place for place, token in enumerate(row) if token in tokens), len(row))


def test_end_tokens_of_the_generation_config(
    target: PreTrainedModel, draft: PreTrainedModel, inputs_of: dict[int, Inputs], text_of: dict[int, Text]
) -> None:
    """Where users have them: on the model."""
    text = text_of[3]
    target.generation_config.eos_token_id = [own_token(text, 0, 6), own_token(text, 2, 9)]
    try:
        ours, _ = assert_same_calls(target, draft, inputs_of[3], {"max_new_tokens": NEW_TOKENS})
    finally:
        target.generation_config.eos_token_id = None
    assert ours[0, -1] == ours[2, -1] == 0 and ours[1, PROMPT:].tolist() == text[1]


# ------------------------------------------------------------------------------------------------------- stop strings


LETTERS_ONLY = {"suppress_tokens": [0, 1, 2, 3]}
STOP_STRINGS: dict[str, Callable[[list[str]], str | list[str]]] = {
    "inside of tokens": lambda texts: texts[0][10:13],
    "across many tokens": lambda texts: texts[0][9:19],
    "of several rows": lambda texts: [text[7 + 3 * row : 11 + 3 * row] for row, text in enumerate(texts)],
    "the last row's": lambda texts: texts[-1][14:18],
    "one letter": lambda texts: texts[0][8],
    "at once": lambda texts: [texts[0][0], texts[-1][1]],
    "never": lambda texts: "never written",
}


def written(target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, inputs: Inputs) -> list[str]:
    """What every row says, in letters."""
    options = {"max_new_tokens": NEW_TOKENS, **LETTERS_ONLY}
    return tokenizer.batch_decode(generate_plain(target, inputs, options)[:, PROMPT:])


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", STOP_STRINGS)
@pytest.mark.some_cases(3)
def test_stop_strings(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    name: str,
    batch_size: int,
    inputs_of: dict[int, Inputs],
) -> None:
    """Strings that begin and end inside of tokens, and span several; rows stop at different places or not at all."""
    inputs = inputs_of[batch_size]
    texts = written(target, tokenizer, inputs_of[batch_size])
    stop_strings = STOP_STRINGS[name](texts)
    options = {"max_new_tokens": NEW_TOKENS, "stop_strings": stop_strings, "tokenizer": tokenizer, **LETTERS_ONLY}
    for assistant, tree in ((draft, TREE), (target, CHAIN)):
        for end_token in (None, 59):
            plain = generate_plain(target, inputs, options | {"eos_token_id": end_token})
            ours = generate_with_tree(target, assistant, inputs, options | {"eos_token_id": end_token}, tree)
            assert ours.tolist() == plain.tolist()
            assert hf_specdec.last_metrics().num_accepted_tokens > 0 or ours.shape[1] < PROMPT + 4
        if name in ("inside of tokens", "across many tokens") and batch_size == 1:
            place = texts[0].index(stop_strings) + len(stop_strings)
            said = tokenizer.decode(ours[0, PROMPT:])
            assert place <= len(said) <= place + 2 and texts[0].startswith(said)


# --------------------------------------------------------------------------------------------------------------- time


@pytest.mark.parametrize("batch_size", [1, 3])
def test_no_time_at_all(
    target: PreTrainedModel, draft: PreTrainedModel, batch_size: int, inputs_of: dict[int, Inputs]
) -> None:
    """Plain `generate` looks at the clock behind the first token, and so do we."""
    options = {"max_new_tokens": NEW_TOKENS, "max_time": 0.0}
    plain = generate_plain(target, inputs_of[batch_size], options)
    ours = generate_with_tree(target, draft, inputs_of[batch_size], options)
    assert ours.tolist() == plain.tolist()
    assert ours.shape[1] == PROMPT + 1


def test_ample_time(target: PreTrainedModel, draft: PreTrainedModel, inputs_of: dict[int, Inputs]) -> None:
    text, _ = assert_same_calls(target, draft, inputs_of[3], {"max_new_tokens": NEW_TOKENS, "max_time": 3600.0})
    assert text.shape[1] == PROMPT + NEW_TOKENS


@pytest.mark.parametrize("seconds", range(1, 9))
def test_time_runs_out(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    seconds: int,
    inputs_of: dict[int, Inputs],
) -> None:
    """By a clock that moves one second whenever it is read: it is read as often, and at the same tokens."""

    def options() -> dict[str, Any]:
        clock = itertools.count()
        monkeypatch.setattr(stopping_criteria_module, "time", SimpleNamespace(time=lambda: float(next(clock))))
        return {"max_new_tokens": NEW_TOKENS, "max_time": float(seconds)}

    plain = generate_plain(target, inputs_of[3], options)
    ours = generate_with_tree(target, target, inputs_of[3], options, CHAIN)
    assert ours.tolist() == plain.tolist()
    assert ours.shape[1] == PROMPT + seconds + 1


# ------------------------------------------------------------------------------------------------------- all together


def test_all_kinds_of_ends_at_once(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Whichever comes first, in every row."""
    ends = set()
    for seed in range(12):
        inputs = prompts(3, PROMPT, seed=seed, padding=True)
        text = new_tokens(target, inputs, 16)
        criterion = Custom(lambda input_ids, scores, call, text: in_text(input_ids[:, PROMPT:], text[2][12]), text)
        options = {
            "max_new_tokens": 16,
            "max_time": 3600.0,
            "eos_token_id": [text[0][9], text[1][13]],
            "stop_strings": [tokenizer.decode(text[1][6:9])[1:-1] or "never"],
            "tokenizer": tokenizer,
            "stopping_criteria": [criterion],
        }
        plain = generate_plain(target, inputs, options)
        assert generate_with_tree(target, draft, inputs, options).tolist() == plain.tolist()
        ends.update(tuple((row != 0).sum() for row in plain[:, PROMPT:]))
    assert len(ends) > 4
