"""Logits processors of a user's own: the text is plain `generate`'s, token for token, and their calls are its."""

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
)
from support.models import VOCAB
from support.processors import (
    Alternates,
    AsksModel,
    AsksTokenizer,
    BansTokenBeforeLast,
    BiasOfRows,
    CallsFunction,
    CallsFunctions,
    CannotBeCopied,
    CopiesItself,
    Counter,
    CountsCalls,
    HidesFunction,
    Holder,
    KeepsRunningSets,
    MakesRowsWhenCalled,
    NumbersRows,
    OneRow,
    Text,
    TokensOfRows,
    TokensOfRowsInSlots,
    WritesInPlace,
    bias_of_rows,
    calls_with,
    closure_over_rows,
    closure_with_state,
    closures_over_a_number,
    counts_with,
    functions_with_attributes,
    processors_of_one_counter,
    tokens_of_rows_in_the_class,
)
from support.tokenizer import tiny_tokenizer
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

import hf_specdec
from hf_specdec import SpeculativeConfig
from hf_specdec.verification.processor_copies import deep_copy
from hf_specdec.verification.processors_by_row import copies_per_row


NEW_TOKENS = 24
Inputs = dict[str, torch.Tensor]

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
    target: PreTrainedModel,
    draft: PreTrainedModel,
    name: str,
    batch_size: int,
    inputs_of: dict[int, Inputs],
    text_of: dict[int, Text],
) -> None:
    inputs, plain_text = inputs_of[batch_size], text_of[batch_size]
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


SHARING = {
    "object": processors_of_one_counter,
    "closures": closures_over_a_number,
    "attributes of a function": functions_with_attributes,
    "functions in private slots": lambda: list(map(HidesFunction, closures_over_a_number())),
}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", SHARING)
def test_processors_that_share_state(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    name: str,
    batch_size: int,
    inputs_of: dict[int, Inputs],
    text_of: dict[int, Text],
) -> None:
    """Of a batch, every row has a state of its own, which its processors share."""
    inputs = inputs_of[batch_size]
    options = lambda: {"max_new_tokens": NEW_TOKENS, "logits_processor": SHARING[name]()}  # noqa: E731
    text, _ = assert_same_calls(target, draft, inputs, options)
    assert text[:, 12:].tolist() != text_of[batch_size], "the processors change nothing"


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


def test_one_sequence_gets_no_calls_behind_its_end_token(
    target: PreTrainedModel, draft: PreTrainedModel, inputs_of: dict[int, Inputs], text_of: dict[int, Text]
) -> None:
    """An end token inside an accepted path ends the processors' calls too: a grammar has nothing to say after it."""
    inputs = inputs_of[1]
    inside = 0
    for token in sorted(set(text_of[1][0])):
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
