"""Every logits processor of `generate`, and ones of a user's own: the text is plain `generate`'s, token for token."""

from __future__ import annotations

import copy
import functools
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.calls import (
    TREE,
    RecordingProcessor,
    assert_same_calls,
    generate_plain,
    generate_with_tree,
    is_ragged,
    new_tokens,
    telling_prompts,
)
from support.models import VOCAB, prompts
from support.tokenizer import tiny_tokenizer
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

import hf_specdec
from hf_specdec import SpeculativeConfig
from hf_specdec.verification.copying import deep_copy
from hf_specdec.verification.processors_by_row import copies_per_row


NEW_TOKENS = 24
Inputs = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def inputs_of(target: PreTrainedModel) -> dict[int, Inputs]:
    """Prompts by batch size; without padding for one sequence."""
    return {batch_size: telling_prompts(target, batch_size, 12) for batch_size in (1, 3)}


# ------------------------------------------------------------------------------------------ what options switch on


def odd_one_out(batch_id: int, input_ids: torch.Tensor) -> list[int]:
    """Allows two thirds of the vocabulary; which, depends on the row, on its last token and on its length."""
    banned = (batch_id + int(input_ids[-1]) + len(input_ids)) % 3
    return [token for token in range(VOCAB) if token % 3 != banned]


def negative_prompts(batch_size: int, padding: bool) -> Inputs:
    negative = prompts(batch_size, 6, seed=5, padding=padding)
    names = {"input_ids": "negative_prompt_ids", "attention_mask": "negative_prompt_attention_mask"}
    return {names[name]: value for name, value in negative.items()}


def synthid(num_keys: int) -> SynthIDTextWatermarkingConfig:
    return SynthIDTextWatermarkingConfig(ngram_len=3, keys=list(range(11, 11 + num_keys)), sampling_table_size=2**10)


Text = list[list[int]]
"""What plain `generate` writes without any option, `[batch][NEW_TOKENS]`."""

OPTIONS: dict[str, Callable[[Text], dict[str, Any]]] = {
    "repetition_penalty": lambda text: {"repetition_penalty": 1.4},
    "repetition_reward": lambda text: {"repetition_penalty": 0.7},
    "no_repeat_ngram_size": lambda text: {"no_repeat_ngram_size": 2},
    "encoder_repetition_penalty": lambda text: {"encoder_repetition_penalty": 1.4},
    "encoder_no_repeat_ngram_size": lambda text: {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": lambda text: {"bad_words_ids": [text[0][2:3], text[-1][4:6], text[0][7:10]]},
    "sequence_bias": lambda text: {"sequence_bias": {(text[0][2],): -4.0, (40,): 0.5, tuple(text[-1][4:6]): -30.0}},
    "min_length": lambda text: {"min_length": 22, "eos_token_id": [row[3] for row in text]},
    "min_new_tokens": lambda text: {"min_new_tokens": 9, "eos_token_id": [row[3] for row in text]},
    "forced_eos_token_id": lambda text: {"forced_eos_token_id": 2},
    "exponential_decay_length_penalty": lambda text: {
        "exponential_decay_length_penalty": (6, 1.3),
        "eos_token_id": next(token for token in range(VOCAB) if not any(token in row for row in text)),
    },
    "suppress_tokens": lambda text: {"suppress_tokens": [text[0][1], text[-1][2]]},
    "begin_suppress_tokens": lambda text: {"begin_suppress_tokens": [row[0] for row in text]},
    "prefix_allowed_tokens_fn": lambda text: {"prefix_allowed_tokens_fn": odd_one_out},
    "guidance_scale": lambda text: {"guidance_scale": 1.5},
    "guidance_scale_below_1": lambda text: {"guidance_scale": 0.6},
    "negative_prompt_ids": lambda text: {
        "guidance_scale": 1.4,
        "negative_prompt_ids": negative_prompts(len(text), padding=False)["negative_prompt_ids"],
    },
    "negative_prompt_attention_mask": lambda text: {
        "guidance_scale": 1.4,
        **negative_prompts(len(text), padding=len(text) > 1),
    },
    "watermark_lefthash": lambda text: {"watermarking_config": WatermarkingConfig(bias=2.5)},
    "watermark_selfhash": lambda text: {
        "watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash", context_width=2)
    },
    "synthid": lambda text: {"watermarking_config": synthid(num_keys=5)},
    "synthid_as_many_keys_as_rows": lambda text: {"watermarking_config": synthid(num_keys=len(text))},
    "remove_invalid_values": lambda text: {
        "remove_invalid_values": True,
        "sequence_bias": {(text[0][2],): float("-inf"), (9,): float("inf")},
        "suppress_tokens": [9],
    },
}
INVISIBLE_TO_GREEDY: dict[str, Callable[[Text], dict[str, Any]]] = {
    "renormalize_logits": lambda text: {"renormalize_logits": True},
    "remove_invalid_values_without_any": lambda text: {"remove_invalid_values": True},
}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", OPTIONS | INVISIBLE_TO_GREEDY)
def test_options_give_the_text_of_plain_generate(
    target: PreTrainedModel, draft: PreTrainedModel, name: str, batch_size: int, inputs_of: dict[int, Inputs]
) -> None:
    inputs = inputs_of[batch_size]
    values = (OPTIONS | INVISIBLE_TO_GREEDY)[name](new_tokens(target, inputs, NEW_TOKENS))
    recorders: list[RecordingProcessor] = []

    def options() -> dict[str, Any]:
        chosen = {"max_new_tokens": NEW_TOKENS, **values}
        if batch_size == 1:
            recorders.append(RecordingProcessor())
            chosen["logits_processor"] = [recorders[-1]]
        return chosen

    text, metrics = assert_same_calls(target, draft, inputs, options)
    if batch_size == 1:
        plain, ours = recorders
        ours.assert_saw_the_same(plain)
    else:
        assert is_ragged(metrics)
    if name in OPTIONS:
        without = {"max_new_tokens": NEW_TOKENS, "eos_token_id": values.get("eos_token_id")}
        assert text.tolist() != generate_plain(target, inputs, without).tolist(), "the option changes nothing"


@pytest.mark.parametrize("batch_size", [1, 3])
def test_forced_bos_token_id(target: PreTrainedModel, draft: PreTrainedModel, batch_size: int) -> None:
    """It acts on the first token behind a prompt of one token; what is suppressed at the beginning on the next."""
    inputs = prompts(batch_size, 1)
    options = {"max_new_tokens": NEW_TOKENS, "forced_bos_token_id": 29}
    second = generate_plain(target, inputs, options)[:, 2].tolist()
    options["begin_suppress_tokens"] = second
    text, _ = assert_same_calls(target, draft, inputs, options)
    assert text[:, 1].tolist() == [29] * batch_size
    assert not set(text[:, 2].tolist()) & set(second)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_all_kinds_of_processors_together(
    target: PreTrainedModel, draft: PreTrainedModel, batch_size: int, inputs_of: dict[int, Inputs]
) -> None:
    """Processors of every kind in one list, in the order in which `generate` puts them."""
    end_tokens = [row[3] for row in new_tokens(target, inputs_of[batch_size], NEW_TOKENS)]
    recorders: list[RecordingProcessor] = []

    def options() -> dict[str, Any]:
        recorders.append(RecordingProcessor())
        return {
            "max_new_tokens": NEW_TOKENS,
            "eos_token_id": end_tokens,
            "min_new_tokens": 12,
            "repetition_penalty": 1.1,
            "encoder_repetition_penalty": 1.1,
            "guidance_scale": 1.2,
            "suppress_tokens": [3],
            "prefix_allowed_tokens_fn": odd_one_out,
            "watermarking_config": WatermarkingConfig(bias=0.5),
            "renormalize_logits": True,
            "remove_invalid_values": True,
            "logits_processor": [recorders[-1], BansTokenBeforeLast(), Alternates()],
        }

    assert_same_calls(target, draft, inputs_of[batch_size], options)
    if batch_size == 1:
        plain, ours = recorders
        ours.assert_saw_the_same(plain)


def test_repetition_penalty_knows_where_every_row_begins(
    target: PreTrainedModel, draft: PreTrainedModel, inputs_of: dict[int, Inputs]
) -> None:
    """Padding is token 0 here, which the penalty must leave alone in every row if plain `generate` does."""
    inputs = inputs_of[3]
    options = {"max_new_tokens": NEW_TOKENS, "repetition_penalty": 1.4, "sequence_bias": {(0,): 1.0}}
    text, metrics = assert_same_calls(target, draft, inputs, options)
    assert is_ragged(metrics)
    assert (text[:, 12:] == 0).any(), "the padding token is never generated: the test shows nothing"


# -------------------------------------------------------------------------------------------------- a user's own ones


class BansTokenBeforeLast(LogitsProcessor):
    """Reads the history alone."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -2:-1], -torch.inf)


class WritesInPlace(LogitsProcessor):
    """Changes the very tensor it is given, and returns it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores -= 1.0
        scores.scatter_(1, input_ids[:, -3:], -torch.inf)
        return scores


class CountsCalls(LogitsProcessor):
    """Bans the best token in every third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores.scatter(1, scores.argmax(1, True), -torch.inf) if self.calls % 3 == 0 else scores


class Alternates(LogitsProcessor):
    """Prefers odd tokens in one call, and even ones in the next."""

    def __init__(self) -> None:
        self.even = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.even = not self.even
        scores[:, int(self.even) :: 2] -= 0.4
        return scores


class KeepsRunningSets(LogitsProcessor):
    """Remembers the last tokens it was called with, a set for every row, and never lets them come again."""

    def __init__(self, batch_size: int | None = None) -> None:
        self.seen: Any = None if batch_size is None else [set() for _ in range(batch_size)]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.seen is None:
            self.seen = [set() for _ in input_ids]
        for row, seen in enumerate(self.seen):
            seen.add(int(input_ids[row, -1]))
            scores[row, sorted(seen)] = -torch.inf
        return scores


class BiasOfRows(LogitsProcessor):
    """Adds a tensor of `[batch, vocab]`, or of more rows."""

    def __init__(self, bias: torch.Tensor):
        self.bias = bias

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.bias[: len(input_ids)] * (1 + input_ids[:, -1:] % 2)


class TokensOfRows(LogitsProcessor):
    """Bans other tokens in every row, by a container with an entry per row."""

    def __init__(self, banned: Any):
        self.banned = banned

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row in range(len(input_ids)):
            scores[row, self.banned[row]] = -torch.inf
        return scores


class Holder:
    """An object that a processor may hold: what it knows of the rows is not to be seen from outside."""

    def __init__(self, banned: list[list[int]]):
        self._banned = banned

    def __getitem__(self, row: int) -> list[int]:
        return self._banned[row]


def tokens_of_rows_in_the_class(banned: Text) -> LogitsProcessor:
    """The same, with the entries as an attribute of the class."""

    class InTheClass(LogitsProcessor):
        banned_of_rows = banned

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            for row in range(len(input_ids)):
                scores[row, self.banned_of_rows[row]] = -torch.inf
            return scores

    return InTheClass()


class TokensOfRowsInSlots(LogitsProcessor):
    """Has its entries per row in a slot."""

    __slots__ = ("banned",)

    def __init__(self, banned: Any):
        self.banned = banned

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row in range(len(input_ids)):
            scores[row, self.banned[row]] = -torch.inf
        return scores


class MakesRowsWhenCalled(LogitsProcessor):
    """Learns the number of rows from its first call, as a processor must that is made before it is known."""

    def __init__(self, kind: type):
        self.of_rows = kind()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row in range(len(input_ids)):
            if isinstance(self.of_rows, dict):
                self.of_rows[row] = self.of_rows.get(row, 5 * row) + 1
            elif len(self.of_rows) == row:
                self.of_rows.append(5 * row + 1)
            else:
                self.of_rows[row] += 1
            scores[row, self.of_rows[row] % VOCAB] += 50
        return scores


class NumbersRows(LogitsProcessor):
    """Holds nothing, and now and then prefers another token in every row."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(scores))
        scores[rows, rows + 7 + input_ids[:, -1] % 2] += 3 * (input_ids.shape[1] % 4 == 0)
        return scores


class OneRow(LogitsProcessor):
    """Now and then prefers a token, in one row alone or in those of a set."""

    def __init__(self, rows: int | set[int]):
        self.rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row in {self.rows} if isinstance(self.rows, int) else self.rows:
            scores[row, 9 + input_ids[row, -1] % 2] += 3 * (input_ids.shape[1] % 4 == 0)
        return scores


class AsksModel(LogitsProcessor):
    """Contrasts with the model's own opinion after the last two tokens only; holds the model, and counts."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        opinion = self.model(input_ids[:, -2:]).logits[:, -1].float()
        return scores - (0.1 + 0.05 * (self.calls % 2)) * opinion


class AsksTokenizer(LogitsProcessor):
    """Bans tokens that continue a word, every other time; holds a tokenizer, and counts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for row, text in enumerate(self.tokenizer.batch_decode(input_ids[:, -1:])):
            if text.startswith(" ") and self.calls % 2:
                scores[row, 4:30] -= 1.0
        return scores


class CannotBeCopied(LogitsProcessor):
    """Holds what Python cannot copy."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with self.lock:
            self.calls += 1
        scores[:, self.calls % 2 :: 2] -= 0.5
        return scores


class Counter:
    """A user's object whose method is passed as a processor."""

    def __init__(self) -> None:
        self.calls = 0

    def process(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores[:, self.calls % 3 :: 3] -= 1.0
        return scores


def bias_of_rows(batch_size: int, width: int = VOCAB, scale: float = 0.2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return scale * torch.randn(batch_size, width, generator=generator)


def closure_over_rows(batch_size: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    bias = bias_of_rows(batch_size)

    def add_bias(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert len(input_ids) == len(bias)
        return scores + bias * (1 + input_ids[:, -1:] % 2)

    return add_bias


def closure_with_state(model: PreTrainedModel) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A function that counts its calls, remembers tokens in a list, and refers to a model."""
    import math  # a module that a function closes over

    calls, seen = 0, []

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        seen.append(input_ids[:, -1:])
        assert model is not None and all(len(tokens) == len(input_ids) for tokens in seen)
        scores = scores.scatter(1, torch.cat(seen[-4:], dim=1), -math.inf)
        return scores.scatter(1, scores.argmax(1, True), -torch.inf) if calls % 3 == 0 else scores

    return process


def calls_with(process: Callable, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return process(input_ids, scores)


class CallsFunction(LogitsProcessor):
    """Leaves the work to a function that it holds."""

    def __init__(self, process: Callable):
        self.process = process

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.process(input_ids, scores)


class CallsFunctions(LogitsProcessor):
    """Holds functions in a list, in an object and in defaults."""

    def __init__(self, *functions: Callable):
        self.functions = list(functions[:1])
        self.inner = CallsFunction(functions[1])
        self.last = lambda input_ids, scores, function=functions[2]: function(input_ids, scores)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for function in (*self.functions, self.inner, self.last):
            scores = function(input_ids, scores)
        return scores


class CopiesItself(LogitsProcessor):
    """Holds what Python cannot copy, and says how it is copied."""

    def __init__(self) -> None:
        self.lock, self.calls = threading.Lock(), 0
        self.process = lambda scores: scores if self.lock.locked() else scores

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        return CopiesItself()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores[:, self.calls % 2 :: 2] -= 0.5
        return self.process(scores)


def counts_with(counter: Counter, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return counter.process(input_ids, scores)


CUSTOM: dict[str, Callable[[PreTrainedModel, Text], Any]] = {
    "history": lambda model, text: BansTokenBeforeLast(),
    "writes_in_place": lambda model, text: WritesInPlace(),
    "counts_calls": lambda model, text: CountsCalls(),
    "alternates": lambda model, text: Alternates(),
    "running_sets": lambda model, text: KeepsRunningSets(),
    "running_sets_made_beforehand": lambda model, text: KeepsRunningSets(len(text)),
    "tensor_of_rows": lambda model, text: BiasOfRows(bias_of_rows(len(text))),
    "column_of_rows": lambda model, text: BiasOfRows(bias_of_rows(len(text), 1, 0.6).expand(-1, VOCAB).tril()),
    "list_of_rows": lambda model, text: TokensOfRows([row[1:3] for row in text]),
    "dict_of_rows": lambda model, text: TokensOfRows({number: row[1:3] for number, row in enumerate(text)}),
    "larger_dict_of_rows": lambda model, text: TokensOfRows(dict(enumerate([row[1:3] for row in text + text]))),
    "longer_list_of_rows": lambda model, text: TokensOfRows([row[1:3] for row in text + text]),
    "dict_of_some_rows": lambda model, text: TokensOfRows(defaultdict(list, {len(text) - 1: text[-1][1:3]})),
    "larger_tensor_of_rows": lambda model, text: BiasOfRows(bias_of_rows(9)),
    "object_of_rows": lambda model, text: TokensOfRows(Holder([row[1:3] for row in text])),
    "class_attribute_of_rows": lambda model, text: tokens_of_rows_in_the_class([row[1:3] for row in text]),
    "slot_of_rows": lambda model, text: TokensOfRowsInSlots([row[1:3] for row in text]),
    "dict_made_at_the_first_call": lambda model, text: MakesRowsWhenCalled(dict),
    "list_made_at_the_first_call": lambda model, text: MakesRowsWhenCalled(list),
    "number_of_the_row": lambda model, text: NumbersRows(),
    "the_last_row_alone": lambda model, text: OneRow(len(text) - 1),
    "a_set_of_rows": lambda model, text: OneRow({0}),
    "closure": lambda model, text: closure_over_rows(len(text)),
    "closure_with_state": lambda model, text: closure_with_state(model),
    "method": lambda model, text: Counter().process,
    "partial": lambda model, text: functools.partial(counts_with, Counter()),
    "partial_of_a_function_with_state": lambda model, text: functools.partial(calls_with, closure_with_state(model)),
    "object_with_such_a_function": lambda model, text: CallsFunction(closure_with_state(model)),
    "object_with_such_a_partial": lambda model, text: CallsFunction(
        functools.partial(calls_with, closure_with_state(model))
    ),
    "functions_further_inside": lambda model, text: CallsFunctions(*[closure_with_state(model) for _ in range(3)]),
    "its_own_copy": lambda model, text: CopiesItself(),
    "asks_model": lambda model, text: AsksModel(model),
    "asks_tokenizer": lambda model, text: AsksTokenizer(tiny_tokenizer()),
}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", CUSTOM)
def test_custom_processors_give_the_text_of_plain_generate(
    target: PreTrainedModel, draft: PreTrainedModel, name: str, batch_size: int, inputs_of: dict[int, Inputs]
) -> None:
    inputs = inputs_of[batch_size]
    plain_text = new_tokens(target, inputs, NEW_TOKENS)
    recorders: list[RecordingProcessor] = []

    def options() -> dict[str, Any]:
        recorders.append(RecordingProcessor())
        own = CUSTOM[name](target, plain_text)
        return {"max_new_tokens": NEW_TOKENS, "logits_processor": [own, recorders[-1]]}

    text, metrics = assert_same_calls(target, draft, inputs, options)
    if batch_size == 1:
        plain, ours = recorders
        ours.assert_saw_the_same(plain)
    else:
        assert is_ragged(metrics)
    assert text[:, 12:].tolist() != plain_text, "the processor changes nothing"


class CountsInto(LogitsProcessor):
    """Counts its calls in an object of others."""

    def __init__(self, counter: Counter):
        self.counter = counter

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.counter.calls += 1
        return scores


def closures_over_a_number() -> list[Any]:
    """One function counts, by another function, and a third one reads the count."""
    calls = 0

    def increase() -> None:
        nonlocal calls
        calls += 1

    def count(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        increase()
        return scores

    def bias(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, calls % 3 :: 3] -= 1.0
        return scores

    return [count, bias]


def functions_with_attributes() -> list[Any]:
    """One function counts in an attribute of its own, which another one reads."""

    def count(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        count.calls += 1
        return scores

    def bias(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, count.calls % 3 :: 3] -= 1.0
        return scores

    count.calls = 0
    return [count, bias]


class HidesFunction(LogitsProcessor):
    """Calls a function that it holds in a private slot."""

    __slots__ = ("__function",)

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
        self.__function = function

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.__function(input_ids, scores)


def processors_of_one_counter() -> list[Any]:
    counter = Counter()
    return [CountsInto(counter), counter.process]


SHARING = {
    "object": processors_of_one_counter,
    "closures": closures_over_a_number,
    "attributes of a function": functions_with_attributes,
    "functions in private slots": lambda: list(map(HidesFunction, closures_over_a_number())),
}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", SHARING)
def test_processors_that_share_state(
    target: PreTrainedModel, draft: PreTrainedModel, name: str, batch_size: int, inputs_of: dict[int, Inputs]
) -> None:
    """Of a batch, every row has a state of its own, which its processors share."""
    inputs = inputs_of[batch_size]
    options = lambda: {"max_new_tokens": NEW_TOKENS, "logits_processor": SHARING[name]()}  # noqa: E731
    text, _ = assert_same_calls(target, draft, inputs, options)
    assert text[:, 12:].tolist() != new_tokens(target, inputs, NEW_TOKENS), "the processors change nothing"


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_processor_of_the_user_is_called_as_often_as_in_plain_generate(
    target: PreTrainedModel, draft: PreTrainedModel, batch_size: int, inputs_of: dict[int, Inputs]
) -> None:
    """Of the rows of a batch the first has the user's own object, the others have copies."""
    mine = CountsCalls()
    options = {"max_new_tokens": NEW_TOKENS, "logits_processor": [mine]}
    generate_with_tree(target, draft, inputs_of[batch_size], options)
    assert mine.calls == NEW_TOKENS


def test_models_and_tokenizers_are_not_copied(
    target: PreTrainedModel, draft: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, inputs_of: dict[int, Inputs]
) -> None:
    """A copy of the model for every row would be as large as the model."""

    def refuse(self: PreTrainedModel, memo: dict[int, Any]) -> None:
        raise AssertionError("it was copied")

    tokenizer = tiny_tokenizer()
    for kind in (type(target), type(tokenizer)):
        monkeypatch.setattr(kind, "__deepcopy__", refuse, raising=False)
    with pytest.raises(AssertionError, match="it was copied"):
        copy.deepcopy(target)
    options = lambda: {  # noqa: E731
        "max_new_tokens": NEW_TOKENS,
        "logits_processor": [
            AsksModel(target),
            AsksTokenizer(tokenizer),
            closure_with_state(target),
            CallsFunction(functools.partial(calls_with, closure_with_state(target))),
            CallsFunctions(*[closure_with_state(target)] * 3),
            CallsFunction(CallsFunction(CallsFunction(AsksModel(target)))),
            lambda input_ids, scores, *, models=(target,): scores + 0.0 * len(models),
        ],
    }
    assert_same_calls(target, draft, inputs_of[3], options)


def test_attributes_of_functions_that_cannot_be_copied_are_shared(
    target: PreTrainedModel, draft: PreTrainedModel, inputs_of: dict[int, Inputs]
) -> None:
    """A lock has no copies; nor has what `functools.singledispatch` keeps, and what it finds is the same anyway."""

    def locked(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with locked.lock:
            locked.calls += 1
        return scores - locked.calls % 2 * input_ids[:, -1:]

    @functools.singledispatch
    def dispatched(input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores.flip(-1)

    locked.lock, locked.calls = threading.Lock(), 0
    options = {"max_new_tokens": NEW_TOKENS, "logits_processor": [locked, dispatched]}
    plain = generate_plain(target, inputs_of[3], options)
    locked.calls = 0
    assert generate_with_tree(target, draft, inputs_of[3], options).equal(plain)


def test_no_half_made_copy_of_an_attribute_is_taken_for_a_whole_one() -> None:
    """A lock in an object keeps it from being copied, whoever holds it."""
    shared = Holder([threading.Lock()])

    def function() -> None:
        pass

    function.shared = shared
    memo: dict[int, Any] = {}
    assert deep_copy(function, memo).shared is shared
    with pytest.raises(TypeError, match="cannot pickle"):
        deep_copy(shared, memo)


def test_what_cannot_be_copied_is_refused_for_batches(
    target: PreTrainedModel, draft: PreTrainedModel, inputs_of: dict[int, Inputs]
) -> None:
    """A row's state cannot be told from another's without a copy. One sequence needs none."""
    options = lambda: {"max_new_tokens": NEW_TOKENS, "logits_processor": [CannotBeCopied()]}  # noqa: E731
    assert_same_calls(target, draft, inputs_of[1], options)
    with pytest.raises(ValueError, match="`logits_processor`.*CannotBeCopied.*one sequence at a time"):
        generate_with_tree(target, draft, inputs_of[3], options)


def test_prefix_function_gets_every_row_as_in_plain_generate(
    target: PreTrainedModel, draft: PreTrainedModel, inputs_of: dict[int, Inputs]
) -> None:
    """A function with state by `batch_id` (a place in a trie, say) never sees a row under another's number."""

    class WalksTrie:
        def __init__(self) -> None:
            self.calls: dict[int, list[list[int]]] = {}

        def __call__(self, batch_id: int, input_ids: torch.Tensor) -> list[int]:
            calls = self.calls.setdefault(batch_id, [])
            calls.append(input_ids.tolist())
            return [token for token in range(VOCAB) if token % 3 != (batch_id + len(calls)) % 3]

    walks: list[WalksTrie] = []

    def options() -> dict[str, Any]:
        walks.append(WalksTrie())
        return {"max_new_tokens": NEW_TOKENS, "prefix_allowed_tokens_fn": walks[-1]}

    assert_same_calls(target, draft, inputs_of[3], options)
    plain, ours = walks
    assert ours.calls == plain.calls


def test_one_sequence_gets_no_calls_behind_its_end_token(
    target: PreTrainedModel, draft: PreTrainedModel, inputs_of: dict[int, Inputs]
) -> None:
    """An end token inside an accepted path ends the processors' calls too: a grammar has nothing to say after it."""
    inputs = inputs_of[1]
    inside = 0
    for token in sorted(set(new_tokens(target, inputs, NEW_TOKENS)[0])):
        recorders: list[RecordingProcessor] = []

        def options(token: int = token, recorders: list[RecordingProcessor] = recorders) -> dict[str, Any]:
            recorders.append(RecordingProcessor())
            return {"max_new_tokens": NEW_TOKENS, "eos_token_id": token, "logits_processor": [recorders[-1]]}

        plain = generate_plain(target, inputs, options)
        ours = generate_with_tree(target, target, inputs, options, "[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]")
        assert ours.tolist() == plain.tolist()
        assert recorders[1].input_ids == recorders[0].input_ids
        inside += (len(plain[0]) - 12) % 5 not in (0, 1)
    assert inside > 2, "no end token fell inside an accepted path: the test shows nothing"


@pytest.mark.parametrize("verification", ["target", "rejection"])
def test_sampled_calls_get_every_prefix_of_the_text_once(
    target: PreTrainedModel, draft: PreTrainedModel, verification: str, inputs_of: dict[int, Inputs]
) -> None:
    """When sampling, the calls of one sequence are those that plain `generate` would make for the same text."""
    recorder = RecordingProcessor()
    text = target.generate(
        **inputs_of[1],
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        top_k=8,
        logits_processor=[recorder],
        assistant_model=draft,
        speculative_config=SpeculativeConfig(tree=TREE, verification=verification),
    )
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    assert recorder.input_ids == [text[:, :length].tolist() for length in range(12, 12 + NEW_TOKENS)]


def test_processors_without_a_batch_dimension_of_their_own_are_shared(
    target: PreTrainedModel, draft: PreTrainedModel, inputs_of: dict[int, Inputs]
) -> None:
    """A lambda that reads the scores alone, in a batch."""
    options = lambda: {  # noqa: E731
        "max_new_tokens": NEW_TOKENS,
        "logits_processor": [lambda input_ids, scores: scores.roll(1, dims=-1)],
    }
    text, _ = assert_same_calls(target, draft, inputs_of[3], options, "[(0,), (1,), (2,), (3,), (4,), (5,)]")
    assert text.shape == (3, 12 + NEW_TOKENS)


def test_results_of_a_row_hold_no_more_than_the_row() -> None:
    """A view would hold the batch of copies: as many batches as rows."""

    class AddsRows(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores + torch.arange(len(scores))[:, None]

    scores = torch.zeros(1, 7)
    for row, processors in enumerate(copies_per_row(LogitsProcessorList([AddsRows()]), 5)):
        found = processors(torch.zeros(1, 3, dtype=torch.long), scores)
        assert torch.equal(found, scores + row)
        assert found.untyped_storage().nbytes() == scores.untyped_storage().nbytes()
