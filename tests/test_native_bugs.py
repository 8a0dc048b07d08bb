"""
What transformers' own assisted generation gets wrong, done right. Each test says in its report (the property
`native_is_right` of the JUnit file) whether transformers still has the fault; it fails for ours alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.calls import TREE, Options, assert_same_calls, generate_plain, telling_prompts
from support.models import prompts
from support.tokenizer import tiny_tokenizer
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria
from transformers.generation.stopping_criteria import StopStringCriteria

import hf_specdec


PROMPT = 12
NEW_TOKENS = 24
CHAIN = "[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]"
Inputs = dict[str, torch.Tensor]
Note = Callable[[str, object], None]


@pytest.fixture(scope="module")
def perfect_draft(target: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(target)


def note_native(note: Note, model: PreTrainedModel, draft: PreTrainedModel, inputs: Inputs, options: Options) -> None:
    """Writes down whether transformers' own assisted generation gives the text of plain `generate`."""
    plain = generate_plain(model, inputs, options)
    try:
        values = options() if callable(options) else options
        native = generate_plain(model, inputs, {**values, "assistant_model": draft}).tolist()
    except Exception as error:  # whatever it dies of: this is for information only
        native = repr(error)
    note("native_is_right", native == plain.tolist())


class StopAtLength(StoppingCriteria):
    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("length", range(2, 9))
def test_custom_criteria_do_not_overshoot(
    target: PreTrainedModel, perfect_draft: PreTrainedModel, record_property: Note, length: int
) -> None:
    """A draft that is always right, so that several tokens are accepted behind the one that stops."""
    options = {"max_new_tokens": NEW_TOKENS, "stopping_criteria": [StopAtLength(PROMPT + length)]}
    text, _ = assert_same_calls(target, perfect_draft, prompts(1, PROMPT), options, CHAIN)
    assert text.shape[1] == PROMPT + length
    note_native(record_property, target, perfect_draft, prompts(1, PROMPT), options)


LETTERS_ONLY = {"suppress_tokens": [0, 1, 2, 3]}


def written(target: PreTrainedModel, inputs: Inputs) -> str:
    """What plain `generate` says, in letters."""
    text = generate_plain(target, inputs, {"max_new_tokens": NEW_TOKENS, **LETTERS_ONLY})
    return tiny_tokenizer().decode(text[0, PROMPT:])


@pytest.mark.parametrize("start", [5, 8, 11])
def test_stop_string_criteria_do_not_overshoot(
    target: PreTrainedModel, perfect_draft: PreTrainedModel, record_property: Note, start: int
) -> None:
    tokenizer, inputs = tiny_tokenizer(), telling_prompts(target, 1, PROMPT)
    stop_string = written(target, inputs)[start : start + 5]
    options = lambda: {  # noqa: E731
        "max_new_tokens": NEW_TOKENS,
        "stopping_criteria": [StopStringCriteria(tokenizer, stop_string)],
        **LETTERS_ONLY,
    }
    text, _ = assert_same_calls(target, perfect_draft, inputs, options, CHAIN)
    assert stop_string in tokenizer.decode(text[0, PROMPT:])
    assert stop_string not in tokenizer.decode(text[0, PROMPT:-1])
    note_native(record_property, target, perfect_draft, inputs, options)


def test_stop_strings_do_not_raise(
    target: PreTrainedModel, perfect_draft: PreTrainedModel, record_property: Note
) -> None:
    inputs = telling_prompts(target, 1, PROMPT)
    stop_strings = [written(target, inputs)[9:14]]
    options = {"max_new_tokens": NEW_TOKENS, "stop_strings": stop_strings, "tokenizer": tiny_tokenizer()}
    options |= LETTERS_ONLY
    text, _ = assert_same_calls(target, perfect_draft, inputs, options, CHAIN)
    assert text.shape[1] < PROMPT + NEW_TOKENS
    note_native(record_property, target, perfect_draft, inputs, options)


@pytest.mark.parametrize("only_new_tokens", [False, True], ids=["whole_text", "only_new_tokens"])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.some_cases(2)
def test_a_cache_is_reused_over_turns(
    target: PreTrainedModel, draft: PreTrainedModel, record_property: Note, batch_size: int, only_new_tokens: bool
) -> None:
    """
    Three turns of a conversation on one cache, the text so far given again or only what is new of it. The cache holds
    after every turn what it holds after plain `generate`.
    """

    def converse(**options: Any) -> tuple[list[list[list[int]]], list[int], DynamicCache, int]:
        cache = DynamicCache(config=target.config)
        inputs = prompts(batch_size, PROMPT, padding=batch_size > 1)
        text, mask = inputs["input_ids"], inputs["attention_mask"]
        turns, lengths, accepted = [], [], 0
        for turn in range(3):
            given = text[:, cache.get_seq_length() :] if only_new_tokens else text
            out = target.generate(
                input_ids=given,
                attention_mask=mask,
                past_key_values=cache,
                do_sample=False,
                max_new_tokens=9,
                **options,
            )
            new = out[:, given.shape[1] :]
            turns.append(new.tolist())
            lengths.append(cache.get_seq_length())
            if "tree" in options:
                accepted += hf_specdec.last_metrics().num_accepted_tokens
            text = torch.cat([text, new, prompts(batch_size, 4, seed=10 + turn)["input_ids"]], dim=1)
            mask = torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
        return turns, lengths, cache, accepted

    plain_turns, plain_lengths, plain_cache, _ = converse()
    turns, lengths, cache, accepted = converse(assistant_model=draft, tree=TREE)
    assert turns == plain_turns
    assert lengths == plain_lengths
    assert accepted > 0
    # What padding holds is nobody's business: it is never attended to.
    visible = torch.nn.functional.pad(
        prompts(batch_size, PROMPT, padding=batch_size > 1)["attention_mask"].bool(),
        (0, cache.get_seq_length() - PROMPT),
        value=True,
    )
    for ours, plains in zip(cache.layers, plain_cache.layers, strict=True):
        for name in ("keys", "values"):
            mine, theirs = (getattr(layer, name).transpose(1, 2)[visible] for layer in (ours, plains))
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    if batch_size == 1:
        try:
            native_turns = converse(assistant_model=draft)[0]
        except Exception as error:  # for information only
            native_turns = repr(error)
        record_property("native_is_right", native_turns == plain_turns)


def test_the_prompt_is_not_put_into_the_cache_twice(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """After a call the cache covers all tokens but the last, which no forward has seen."""
    cache = DynamicCache(config=target.config)
    options = {"max_new_tokens": 9, "past_key_values": cache}
    text = target.generate(**prompts(1, PROMPT), **options, do_sample=False, assistant_model=draft, tree=TREE)
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    assert cache.get_seq_length() == text.shape[1] - 1
    again = torch.cat([text, torch.tensor([[7, 8, 9]])], dim=1)
    target.generate(again, **options, do_sample=False, assistant_model=draft, tree=TREE)
    assert cache.get_seq_length() == text.shape[1] + 3 + 9 - 1


@pytest.mark.parametrize("beside", [(), ("input_ids",), ("attention_mask",), ("input_ids", "attention_mask")], ids=str)
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.some_cases(3)
def test_inputs_embeds(
    target: PreTrainedModel, draft: PreTrainedModel, record_property: Note, batch_size: int, beside: tuple[str, ...]
) -> None:
    """Without `input_ids` the draft does not know the prompt; it drafts from the new text alone."""
    tokens = prompts(batch_size, PROMPT, padding=batch_size > 1 and "attention_mask" in beside)
    embeds = target.get_input_embeddings()(tokens["input_ids"]).detach()
    inputs = {"inputs_embeds": embeds} | {name: tokens[name] for name in beside}
    options = {"max_new_tokens": NEW_TOKENS}
    text, _ = assert_same_calls(target, draft, inputs, options)
    assert text.shape[1] == NEW_TOKENS + (PROMPT if "input_ids" in beside else 0)
    if batch_size == 1:
        note_native(record_property, target, draft, inputs, options)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("scale", [0.6, 1.5, 3.0])
@pytest.mark.some_cases(2)
def test_classifier_free_guidance(
    target: PreTrainedModel, draft: PreTrainedModel, record_property: Note, scale: float, batch_size: int
) -> None:
    """The processor keeps a cache of its own, which must see every token of the text once, and no other."""
    inputs = prompts(batch_size, PROMPT, padding=batch_size > 1)
    options = {"max_new_tokens": NEW_TOKENS, "guidance_scale": scale}
    text, _ = assert_same_calls(target, draft, inputs, options)
    assert text.tolist() != generate_plain(target, inputs, {"max_new_tokens": NEW_TOKENS}).tolist()
    if batch_size == 1:
        note_native(record_property, target, draft, inputs, options)
