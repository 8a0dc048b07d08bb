"""Streamers get the calls of plain `generate`, as soon as tokens are known."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from support.calls import TREE, Options, RecordingStreamer, assert_same_calls, generate_with_tree, is_ragged, own_token
from support.criteria import Custom
from support.models import noisy_copy
from transformers import (
    AsyncTextIteratorStreamer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

import hf_specdec


PROMPT = 12
NEW_TOKENS = 24
CHAIN = "[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]"
Inputs = dict[str, torch.Tensor]
Text = list[list[int]]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("end_token", [False, True])
def test_streamers_get_the_calls_of_plain_generate(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    end_token: bool,
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
            "eos_token_id": end_tokens if end_token else None,
            "streamer": RecordingStreamer(log),
            "stopping_criteria": [criterion],
        }

    text, metrics = assert_same_calls(target, draft, inputs_of[batch_size], options)
    plain, ours = logs
    assert ours == plain
    assert ours[0] == ("put", "cpu", text[:, :PROMPT].tolist()) and ours[-1] == ("end",)
    assert is_ragged(metrics) or batch_size == 1


@pytest.mark.parametrize("assistant", ["self", "ngram"])
def test_streamers_beside_other_drafts(
    target: PreTrainedModel, assistant: str, inputs_of: dict[int, Inputs], text_of: dict[int, Text]
) -> None:
    """The prompt, then token by token, then the end, whichever draft writes."""
    recorder = RecordingStreamer()
    draft = {"self": target, "ngram": hf_specdec.NgramDraft(min_ngram=1)}[assistant]
    generate_with_tree(target, draft, inputs_of[1], {"max_new_tokens": NEW_TOKENS, "streamer": recorder})
    prompt, *tokens, end = recorder.log
    assert prompt == ("put", "cpu", inputs_of[1]["input_ids"].tolist()) and end == ("end",)
    assert tokens == [("put", "cpu", [token]) for token in text_of[1][0]]
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


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


def test_a_streamer_that_writes_into_its_tokens(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """The text stays as it is, as in plain `generate`."""

    class Overwrites(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            value.fill_(0)

        def end(self) -> None:
            pass

    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    call = {"max_new_tokens": 12, "do_sample": False}
    text = target.generate(**inputs, **call, assistant_model=draft, tree="[(0,), (0, 0)]", streamer=Overwrites())
    assert torch.equal(text, target.generate(**inputs, **call))
