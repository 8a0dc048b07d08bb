"""Stopping criteria of a user's own: the calls of plain `generate`, and ends where they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.calls import (
    TREE,
    RecordingCriterion,
    RecordingProcessor,
    RecordingStreamer,
    assert_same_calls,
    generate_plain,
    generate_with_tree,
    own_token,
)
from support.criteria import Custom, in_text
from transformers import MaxLengthCriteria, PreTrainedModel, StoppingCriteriaList

import hf_specdec
from hf_specdec import SpeculativeConfig


PROMPT = 12
NEW_TOKENS = 24
CHAIN = "[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]"
Inputs = dict[str, torch.Tensor]
Text = list[list[int]]


def at_places(text: Text) -> list[int]:
    """A token of every row, from a place that differs from row to row."""
    return [row[5 + 3 * number] for number, row in enumerate(text)]


SCORES = {"return_dict_in_generate": True, "output_scores": True}
Criterion = Callable[[torch.Tensor, Any, int, Text], Any]
CRITERIA: dict[str, Criterion] = {
    "by_length": lambda input_ids, scores, call, text: input_ids.shape[1] >= PROMPT + 9,
    "by_content": lambda input_ids, scores, call, text: in_text(input_ids[:, PROMPT:], *at_places(text)),
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


@pytest.mark.parametrize(
    "name, batch_size, end_token",
    [
        (name, batch_size, (number + batch_size // 2) % 2 == 1)  # both for each number of rows, one for each pair
        for number, name in enumerate(CRITERIA | CRITERIA_ON_SCORES)
        for batch_size in (1, 3)
    ],
)
@pytest.mark.some_cases(4)
def test_custom_criteria(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    name: str,
    batch_size: int,
    end_token: bool,
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
        end_tokens = {"eos_token_id": own_token(text, 0, 6)} if end_token else {}
        return {"max_new_tokens": NEW_TOKENS, "stopping_criteria": criteria, **on_scores, **end_tokens}

    plain = generate_plain(target, inputs, options)
    for assistant, tree in ((draft, TREE), (target, CHAIN)):
        ours = generate_with_tree(target, assistant, inputs, options, tree)
        text_of_plain = plain
        if name in CRITERIA_ON_SCORES:
            assert [tuple(score.shape) for score in ours.scores] == [tuple(score.shape) for score in plain.scores]
            text_of_plain, ours = plain.sequences, ours.sequences
        assert ours.tolist() == text_of_plain.tolist()
        assert recorders[-1].calls == recorders[0].calls
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
