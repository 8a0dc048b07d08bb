"""Every logits processor of `generate`: the text is plain `generate`'s, token for token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.calls import RecordingProcessor, assert_same_calls, generate_plain, is_ragged
from support.models import VOCAB, prompts
from support.processors import Alternates, BansTokenBeforeLast, Text
from transformers import PreTrainedModel, SynthIDTextWatermarkingConfig, WatermarkingConfig


NEW_TOKENS = 18
Inputs = dict[str, torch.Tensor]


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


OPTIONS: dict[str, Callable[[Text], dict[str, Any]]] = {
    "repetition_penalty": lambda text: {"repetition_penalty": 1.4},
    "repetition_reward": lambda text: {"repetition_penalty": 0.7},
    "no_repeat_ngram_size": lambda text: {"no_repeat_ngram_size": 2},
    "encoder_repetition_penalty": lambda text: {"encoder_repetition_penalty": 1.4},
    "encoder_no_repeat_ngram_size": lambda text: {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": lambda text: {"bad_words_ids": [text[0][2:3], text[-1][4:6], text[0][7:10]]},
    "sequence_bias": lambda text: {"sequence_bias": {(text[0][2],): -4.0, (40,): 0.5, tuple(text[-1][4:6]): -30.0}},
    "min_length": lambda text: {"min_length": 20, "eos_token_id": [row[3] for row in text]},
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
    target: PreTrainedModel,
    draft: PreTrainedModel,
    name: str,
    batch_size: int,
    inputs_of: dict[int, Inputs],
    text_of: dict[int, Text],
) -> None:
    inputs = inputs_of[batch_size]
    values = (OPTIONS | INVISIBLE_TO_GREEDY)[name](text_of[batch_size])
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
        without = text_of[batch_size]
        if "eos_token_id" in values:
            ending = {"max_new_tokens": NEW_TOKENS, "eos_token_id": values["eos_token_id"]}
            without = generate_plain(target, inputs, ending)[:, 12:].tolist()
        assert text[:, 12:].tolist() != without, "the option changes nothing"


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
    target: PreTrainedModel,
    draft: PreTrainedModel,
    batch_size: int,
    inputs_of: dict[int, Inputs],
    text_of: dict[int, Text],
) -> None:
    """Processors of every kind in one list, in the order in which `generate` puts them."""
    end_tokens = [row[3] for row in text_of[batch_size]]
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
