"""Calls end where plain `generate` ends them: the same text, the same calls to criteria and streamers on the way."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.calls import (
    TREE,
    Options,
    RecordingCriterion,
    RecordingProcessor,
    RecordingStreamer,
    assert_same_calls,
    generate_plain,
    generate_with_tree,
    is_ragged,
    new_tokens,
    own_token,
    telling_prompts,
)
from support.models import noisy_copy, prompts
from support.tokenizer import tiny_tokenizer
from transformers import (
    AsyncTextIteratorStreamer,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation import stopping_criteria as stopping_criteria_module

import hf_specdec
from hf_specdec import SpeculativeConfig


PROMPT = 12
NEW_TOKENS = 24
CHAIN = "[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]"
Inputs = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


Text = list[list[int]]


@pytest.fixture(scope="module")
def inputs_of(target: PreTrainedModel) -> dict[int, Inputs]:
    """Prompts by batch size; without padding for one sequence."""
    return {batch_size: telling_prompts(target, batch_size, PROMPT) for batch_size in (1, 3)}


@pytest.fixture(scope="module")
def text_of(target: PreTrainedModel, inputs_of: dict[int, Inputs]) -> dict[int, Text]:
    """What plain `generate` writes if nothing stops it, `[batch][NEW_TOKENS]`, by batch size."""
    return {batch_size: new_tokens(target, inputs, NEW_TOKENS) for batch_size, inputs in inputs_of.items()}


# ------------------------------------------------------------------------------------------------------------- length


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", ["max_new_tokens", "max_length"])
@pytest.mark.parametrize("count", range(1, 13))
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


# ---------------------------------------------------------------------------------------------------- custom criteria


class Custom(StoppingCriteria):
    """A criterion made of a function of (`input_ids`, `scores`, number of the call) to bools: `[batch]`, or one."""

    def __init__(self, function: Callable[..., Any], *more: Any):
        self.function, self.more = function, more
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return torch.as_tensor(self.function(input_ids, scores, self.calls, *self.more)).expand(len(input_ids))


def in_text(input_ids: torch.Tensor, *tokens: int) -> torch.Tensor:
    """Which rows have generated one of these tokens, `[batch]`."""
    return torch.isin(input_ids[:, PROMPT:], torch.tensor(tokens)).any(dim=1)


def at_places(text: Text) -> list[int]:
    """A token of every row, from a place that differs from row to row."""
    return [row[5 + 3 * number] for number, row in enumerate(text)]


SCORES = {"return_dict_in_generate": True, "output_scores": True}
Criterion = Callable[[torch.Tensor, Any, int, Text], Any]
CRITERIA: dict[str, Criterion] = {
    "by_length": lambda input_ids, scores, call, text: input_ids.shape[1] >= PROMPT + 9,
    "by_content": lambda input_ids, scores, call, text: in_text(input_ids, *at_places(text)),
    "by_last_token": lambda input_ids, scores, call, text: torch.isin(input_ids[:, -1], torch.tensor(at_places(text))),
    "by_number_of_the_call": lambda input_ids, scores, call, text: call >= 7,
    "any_row": lambda input_ids, scores, call, text: bool((input_ids[:, PROMPT:] == text[-1][8]).any()),
    "sum_over_rows": lambda input_ids, scores, call, text: bool(input_ids[:, PROMPT:].sum() > 300),
    "rows_at_different_calls": lambda input_ids, scores, call, text: call > 4 + 3 * torch.arange(len(input_ids)),
    "one_row_only": lambda input_ids, scores, call, text: (torch.arange(len(input_ids)) == 0) & (call > 5),
    "now_and_then": lambda input_ids, scores, call, text: torch.arange(len(input_ids)) == call // 3 - 1,
    "flattens": lambda input_ids, scores, call, text: bool((input_ids.view(-1) >= 0).sum() > 61),
}
CRITERIA_ON_SCORES: dict[str, Criterion] = {
    "last_scores": lambda input_ids, scores, call, text: scores[-1].softmax(-1).amax(-1) > 0.95,
    "all_scores": lambda input_ids, scores, call, text: len(scores) == call and sum(s.amax() for s in scores) > 60,
}
WITH_END_TOKEN = {"no_end_token": False, "end_token": True}


@pytest.mark.parametrize("end_token", WITH_END_TOKEN)
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", CRITERIA | CRITERIA_ON_SCORES)
def test_custom_criteria(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    name: str,
    batch_size: int,
    end_token: str,
    inputs_of: dict[int, Inputs],
    text_of: dict[int, Text],
) -> None:
    """Without an end token, rows that are done go on with real tokens until all are, as in plain `generate`."""
    inputs, text = inputs_of[batch_size], text_of[batch_size]
    recorders: list[RecordingCriterion] = []

    def options() -> dict[str, Any]:
        recorders.append(RecordingCriterion())
        criteria = [recorders[-1], Custom((CRITERIA | CRITERIA_ON_SCORES)[name], text)]
        on_scores = SCORES if name in CRITERIA_ON_SCORES else {}
        end_tokens = {"eos_token_id": own_token(text, 0, 6)} if WITH_END_TOKEN[end_token] else {}
        return {"max_new_tokens": NEW_TOKENS, "stopping_criteria": criteria, **on_scores, **end_tokens}

    for assistant, tree in ((draft, TREE), (target, CHAIN)):
        recorders.clear()
        plain = generate_plain(target, inputs, options)
        ours = generate_with_tree(target, assistant, inputs, options, tree)
        if name in CRITERIA_ON_SCORES:
            assert [tuple(score.shape) for score in ours.scores] == [tuple(score.shape) for score in plain.scores]
            plain, ours = plain.sequences, ours.sequences
        assert ours.tolist() == plain.tolist()
        assert recorders[1].calls == recorders[0].calls
        if ours.shape[1] > PROMPT + 4:
            assert hf_specdec.last_metrics().num_accepted_tokens > 0


def test_criteria_stop_where_they_should(
    target: PreTrainedModel, draft: PreTrainedModel, inputs_of: dict[int, Inputs], text_of: dict[int, Text]
) -> None:
    """The criteria above do stop these texts."""
    lengths, plain_text = {}, text_of[3]
    for name, function in CRITERIA.items():
        options = lambda function=function: {  # noqa: E731
            "max_new_tokens": NEW_TOKENS,
            "stopping_criteria": StoppingCriteriaList([Custom(function, plain_text)]),
        }
        text, _ = assert_same_calls(target, draft, inputs_of[3], options)
        lengths[name] = text.shape[1] - PROMPT
    assert [name for name, length in lengths.items() if length == NEW_TOKENS] == ["one_row_only"]
    assert lengths["by_length"] == 9 and lengths["by_number_of_the_call"] == 7


def test_a_length_criterion_of_the_user_takes_precedence(
    target: PreTrainedModel, draft: PreTrainedModel, inputs_of: dict[int, Inputs]
) -> None:
    """As in plain `generate`, whether it is shorter or longer than the option says."""
    for length in (5, 30):
        options = {"max_new_tokens": 12, "stopping_criteria": [MaxLengthCriteria(PROMPT + length)]}
        text, _ = assert_same_calls(target, draft, inputs_of[3], options)
        assert text.shape[1] == PROMPT + length


@pytest.mark.parametrize("count", range(2, 12))
def test_processors_criteria_and_streamers_take_turns(
    target: PreTrainedModel, count: int, inputs_of: dict[int, Inputs]
) -> None:
    """
    With one sequence they may share state, as a grammar does that says when the text is complete: a criterion that
    stops by what a processor has seen stops at the same token, and the processor sees nothing behind it.
    """
    logs: list[list[Any]] = []

    def options() -> dict[str, Any]:
        logs.append([])
        log = logs[-1]

        def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            log.append(("processor", input_ids.tolist()))
            return scores

        def stop(input_ids: torch.Tensor, scores: Any, call: int) -> bool:
            log.append(("criterion", input_ids.tolist()))
            return sum(entry[0] == "processor" for entry in log) >= count

        return {
            "max_new_tokens": NEW_TOKENS,
            "logits_processor": [process],
            "stopping_criteria": [Custom(stop)],
            "streamer": RecordingStreamer(log),
        }

    plain = generate_plain(target, inputs_of[1], options)
    ours = generate_with_tree(target, target, inputs_of[1], options, CHAIN)
    assert ours.tolist() == plain.tolist()
    assert ours.shape[1] == PROMPT + count
    assert hf_specdec.last_metrics().num_accepted_tokens == count - 1 - (count - 1) // 5
    assert logs[1] == logs[0]


@pytest.mark.parametrize("verification", ["target", "rejection"])
def test_processors_and_criteria_take_turns_when_sampling(
    target: PreTrainedModel, draft: PreTrainedModel, inputs_of: dict[int, Inputs], verification: str
) -> None:
    """A processor is asked about a token only after criteria and streamer have seen the one before."""
    log: list[Any] = []

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        log.append(("processor", input_ids.tolist()))
        return scores

    def stop(input_ids: torch.Tensor, scores: Any, call: int) -> bool:
        log.append(("criterion", input_ids.tolist()))
        return input_ids.shape[1] >= PROMPT + 17

    text = target.generate(
        **inputs_of[1],
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        top_k=5,
        temperature=0.5,
        logits_processor=[process],
        stopping_criteria=[Custom(stop)],
        streamer=RecordingStreamer(log),
        assistant_model=draft,
        speculative_config=SpeculativeConfig(tree=TREE, verification=verification),
    )
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    assert text.shape[1] == PROMPT + 17
    prefixes = [text[:, :length].tolist() for length in range(PROMPT, PROMPT + 18)]
    expected: list[Any] = [("put", "cpu", prefixes[0])]
    for before, after in zip(prefixes, prefixes[1:], strict=False):
        expected += [("processor", before), ("criterion", after), ("put", "cpu", [after[0][-1]])]
    assert log == [*expected, ("end",)]


def test_outputs_are_complete_when_tokens_are_judged_one_by_one(
    target: PreTrainedModel, inputs_of: dict[int, Inputs]
) -> None:
    """With one sequence and a processor, tokens are judged before the step's hidden states have been taken apart."""
    wanted = ("scores", "logits", "hidden_states")

    def options() -> dict[str, Any]:
        criterion = Custom(lambda input_ids, scores, call: len(scores) == call and call >= 9)
        returned = {f"output_{name}": True for name in wanted} | {"return_dict_in_generate": True}
        return {
            "max_new_tokens": NEW_TOKENS,
            "logits_processor": [RecordingProcessor()],
            "stopping_criteria": [criterion],
            **returned,
        }

    plain = generate_plain(target, inputs_of[1], options)
    ours = generate_with_tree(target, target, inputs_of[1], options, CHAIN)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert ours.speculation.accepted_per_step == [[4, 3]]
    for name in wanted:
        torch.testing.assert_close(getattr(ours, name), getattr(plain, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_metrics_count_what_is_part_of_the_text(
    target: PreTrainedModel, batch_size: int, inputs_of: dict[int, Inputs]
) -> None:
    """Draft tokens that were accepted behind the stop are dropped, and not counted."""
    for length in range(2, 12):
        options = lambda length=length: {  # noqa: E731
            "max_new_tokens": NEW_TOKENS,
            "stopping_criteria": [Custom(lambda input_ids, scores, call: input_ids.shape[1] >= PROMPT + length)],
        }
        generate_with_tree(target, target, inputs_of[batch_size], options, CHAIN)
        steps = [min(4, length - 1 - done) for done in range(0, length - 1, 5)]
        assert hf_specdec.last_metrics().accepted_per_step == [steps] * batch_size
        assert hf_specdec.last_metrics().num_accepted_tokens == batch_size * sum(steps)


def test_an_error_in_a_criterion_leaves_the_model_usable(
    target: PreTrainedModel, draft: PreTrainedModel, inputs_of: dict[int, Inputs]
) -> None:
    """Its exception reaches the user, and the next call is as good as ever."""

    def fail(input_ids: torch.Tensor, scores: Any, call: int) -> bool:
        if call == 5:
            raise KeyboardInterrupt("the user had enough")
        return False

    before = target.config._attn_implementation
    torch.manual_seed(7)
    state = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt, match="had enough"):
        options = {"max_new_tokens": NEW_TOKENS, "stopping_criteria": [Custom(fail)], "do_sample": True}
        generate_with_tree(target, draft, inputs_of[3], options)
    assert target.config._attn_implementation == before
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_calls(target, draft, inputs_of[3], {"max_new_tokens": NEW_TOKENS})


# ---------------------------------------------------------------------------------------------------------- streamers


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("end_token", WITH_END_TOKEN)
def test_streamers_get_the_calls_of_plain_generate(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    end_token: str,
    batch_size: int,
    inputs_of: dict[int, Inputs],
    text_of: dict[int, Text],
) -> None:
    """The prompts, then one column after the other, each behind the criteria; then the end."""
    plain_text = text_of[batch_size]
    end_tokens = [own_token(plain_text, 0, 7), own_token(plain_text, -1 % batch_size, 11)]
    logs: list[list[Any]] = []

    def options() -> dict[str, Any]:
        logs.append([])
        log = logs[-1]
        criterion = Custom(lambda input_ids, scores, call: log.append(("criterion", input_ids.tolist())) is not None)
        return {
            "max_new_tokens": NEW_TOKENS,
            "eos_token_id": end_tokens if WITH_END_TOKEN[end_token] else None,
            "streamer": RecordingStreamer(log),
            "stopping_criteria": [criterion],
        }

    text, metrics = assert_same_calls(target, draft, inputs_of[batch_size], options)
    plain, ours = logs
    assert ours == plain
    assert ours[0] == ("put", "cpu", text[:, :PROMPT].tolist()) and ours[-1] == ("end",)
    assert is_ragged(metrics) or batch_size == 1


@pytest.mark.parametrize("options", [{}, {"skip_prompt": True}, {"skip_special_tokens": True}], ids=str)
def test_text_streamer(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
    inputs_of: dict[int, Inputs],
) -> None:
    """What is printed."""
    printed = []

    def with_streamer() -> dict[str, Any]:
        printed.append(capsys.readouterr().out)
        return {"max_new_tokens": NEW_TOKENS, "streamer": TextStreamer(tokenizer, **options)}

    assert_same_calls(target, draft, inputs_of[1], with_streamer)
    assert capsys.readouterr().out == printed[1] != ""


def test_text_iterator_streamer(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, inputs_of: dict[int, Inputs]
) -> None:
    """In a thread, as everyone uses it; the pieces are those of plain `generate`."""

    def pieces(**options: Any) -> tuple[list[str], int]:
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60.0)
        accepted = []

        def run() -> None:
            target.generate(**inputs_of[1], do_sample=False, max_new_tokens=NEW_TOKENS, streamer=streamer, **options)
            metrics = hf_specdec.last_metrics()  # of this thread
            accepted.append(0 if metrics is None else metrics.num_accepted_tokens)

        thread = threading.Thread(target=run)
        thread.start()
        collected = list(streamer)
        thread.join()
        return collected, accepted[0]

    plain, none_accepted = pieces()
    ours, accepted = pieces(assistant_model=draft, tree=TREE)
    assert ours == plain and len(ours) > 3
    assert none_accepted == 0 < accepted


def test_async_text_iterator_streamer(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, inputs_of: dict[int, Inputs]
) -> None:
    async def pieces(**options: Any) -> list[str]:
        streamer = AsyncTextIteratorStreamer(tokenizer, timeout=60.0)
        call = dict(**inputs_of[1], do_sample=False, max_new_tokens=NEW_TOKENS, streamer=streamer, **options)
        thread = threading.Thread(target=target.generate, kwargs=call)
        thread.start()
        collected = [piece async for piece in streamer]
        thread.join()
        return collected

    plain = asyncio.run(pieces())
    assert asyncio.run(pieces(assistant_model=draft, tree=TREE)) == plain
    assert len(plain) > 3


def test_streamers_see_tokens_as_soon_as_they_are_known(target: PreTrainedModel, inputs_of: dict[int, Inputs]) -> None:
    """The first token arrives before any step, and those of a step before the next one."""
    log: list[Any] = []
    draft = noisy_copy(target, noise=0.0)  # another object, whose forwards are not logged
    handle = target.register_forward_hook(lambda *_: log.append("forward"))
    try:
        options: Options = {"max_new_tokens": 11, "streamer": RecordingStreamer(log)}
        generate_with_tree(target, draft, inputs_of[1], options, CHAIN)
    finally:
        handle.remove()
    kinds = [entry if isinstance(entry, str) else entry[0] for entry in log]
    assert kinds == ["put", "forward", "put", *(["forward"] + ["put"] * 5) * 2, "end"]


def test_all_kinds_of_ends_at_once(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Whichever comes first, in every row."""
    ends = set()
    for seed in range(12):
        inputs = prompts(3, PROMPT, seed=seed, padding=True)
        text = new_tokens(target, inputs, 16)
        criterion = Custom(lambda input_ids, scores, call, text: in_text(input_ids, text[2][12]), text)
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
