"""Rows of a `generate` call whose texts have ended, while the steps of the others go on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.batches import noted_calls, ragged_prompts, text_alone
from support.goldens import trained_prompts, trained_target
from support.graphs import StandIn, install_stand_in
from support.heads import trained_head
from support.models import noisy_copy, tiny_model
from support.parity import IRREGULAR

from hf_specdec import SpeculativeConfig, TokenTree
from hf_specdec.compat import CACHE
from hf_specdec.engine.captured.running import Repeats
from hf_specdec.engine.engine import Engine


CHAIN = TokenTree.chain(2)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return install_stand_in(monkeypatch, with_kernel=True)


@pytest.fixture
def rested(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Of every run that was launched ahead the rows that rest in it, which have no blocks and are not verified."""
    found: list[set[int]] = []
    launch = Repeats.launch

    def noted(self: Repeats) -> None:
        launch(self)
        over = {row for row, request in enumerate(self._own) if request.is_over}
        rows = self.step.rows
        assert not rows.tables[list(over)].any() and not rows.kinds[list(over)].any()
        assert all(rows.tables[row].any() and rows.kinds[row] for row in {*range(len(self._own))} - over)
        found.append(over)

    monkeypatch.setattr(Repeats, "launch", noted)
    return found


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Prompts as inputs of `generate`, padded on the left with token 0."""
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def with_an_end(target: Any, prompts: list[list[int]], length: int) -> tuple[int, list[list[int]]]:
    """A token that ends these greedy texts of `length` tokens in several places, and the texts up to it."""
    texts = [text_alone(target, prompt, max_new_tokens=length, eos_token_id=None) for prompt in prompts]

    def cut(token: int) -> list[list[int]]:
        return [text[: text.index(token) + 1] if token in text else text for text in texts]

    token = max(dict.fromkeys(sum(texts, [])), key=lambda one: (len(set(map(len, cut(one)))), sum(map(len, cut(one)))))
    return token, cut(token)


@pytest.mark.parametrize("tree", [IRREGULAR, "auto", "none"])
def test_rows_of_ended_texts_rest(tree: Any, rested: list[set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the runs that follow their rows have no blocks, and nothing is loaded anew, while the step is as large."""
    target, prompts = trained_target(), trained_prompts()["prompts"][:4]
    token, texts = with_an_end(target, prompts, 60)
    assert len(set(map(len, texts))) > 2
    speculation = {"tree": IRREGULAR, "disable_by_batch_size": 0} if tree == "none" else {"tree": tree}
    options = {"assistant_model": trained_head(), "speculative_config": SpeculativeConfig(**speculation)}
    for _ in range(2):
        calls = noted_calls(monkeypatch)
        found = target.generate(**padded(prompts), **options, max_new_tokens=60, eos_token_id=token, pad_token_id=0)
        for row, text in zip(found[:, max(map(len, prompts)) :].tolist(), texts, strict=True):
            assert row[: len(text)] == text and not any(row[len(text) :])
    if tree != "auto":  # whose trials come in between
        assert max(map(len, rested)) >= 2
        steps = [len(outcomes) for outcomes in calls if outcomes]
        assert max(steps) > 0.8 * sum(steps)  # one series, but for the first steps


@pytest.mark.parametrize(
    ("tree", "options"),
    [(IRREGULAR, {"do_sample": True}), pytest.param(TokenTree.chain(40), {}, marks=pytest.mark.slow)],
    ids=["drawn", "deep"],
)
def test_rows_that_leave_at_once(tree: Any, options: dict[str, Any], rested: list[set[int]]) -> None:
    """
    What torch's generator gives them may not depend on how long a series of runs is; and a tree may be deeper than the
    column that is free at the end of block tables.
    """
    target, prompts = trained_target(), trained_prompts()["prompts"][:4]
    length = 60 if options else 16
    token, _ = with_an_end(target, prompts, length)
    draft = trained_head() if options else noisy_copy(target, 1.0)
    torch.manual_seed(0)
    found = target.generate(
        **padded(prompts),
        assistant_model=draft,
        tree=tree,
        max_new_tokens=length,
        eos_token_id=token,
        pad_token_id=0,
        **options,
    )
    assert (found[:, -1] == 0).any() and len(rested) > 3 and not any(rested)


def with_a_token_of_nan() -> tuple[Any, list[list[int]], int, int]:
    """A target, prompts, a token that the first text alone has, whose embedding is NaN, and where it stands there."""
    target, prompts = tiny_model(dtype=torch.float32, tie_word_embeddings=False), ragged_prompts((9, 9, 9, 9))
    texts = [text_alone(target, prompt, max_new_tokens=80, eos_token_id=None) for prompt in prompts]
    token = next(one for one in texts[0][4:] if one not in set(sum(prompts, [])).union(*texts[1:]))
    target.get_input_embeddings().weight.data[token] = torch.nan
    return target, prompts, token, texts[0].index(token)


PLAIN = SpeculativeConfig(tree=CHAIN, disable_by_batch_size=0)


def test_a_call_ends_with_the_first_row_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do not run to their ends before the call goes on by the host."""
    target, prompts, _, _ = with_a_token_of_nan()
    asked, may_repeat = [], Engine._may_repeat

    def noted(self: Engine, requests: Any) -> bool:
        asked.append(any(request.error is not None for request in requests))
        return may_repeat(self, requests)

    monkeypatch.setattr(Engine, "_may_repeat", noted)
    options = {"max_new_tokens": 100, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    plain = target.generate(**padded(prompts), **options)
    found = target.generate(
        **padded(prompts), assistant_model=copy.deepcopy(target), speculative_config=PLAIN, **options
    )
    assert torch.equal(found, plain) and asked.count(True) <= 1 and 60 < len(asked) < 90


def test_what_is_handed_back_of_an_ended_row(rested: list[set[int]]) -> None:
    """The run on the way may have left NaN behind its end: the K/V before it stay."""
    target, prompts, token, end = with_a_token_of_nan()
    options: dict[str, Any] = {"max_new_tokens": 100, "pad_token_id": 0, "eos_token_id": token, "do_sample": False}
    options["return_dict_in_generate"] = True
    plain = target.generate(**padded(prompts), **options)
    found = target.generate(
        **padded(prompts), assistant_model=copy.deepcopy(target), speculative_config=PLAIN, **options
    )
    assert torch.equal(found.sequences, plain.sequences) and sum(map(bool, rested)) > 10
    for ours, theirs in zip(found[CACHE].layers, plain[CACHE].layers, strict=True):
        kept = slice(len(prompts[0]) + end)
        torch.testing.assert_close(ours.keys[:, :, kept], theirs.keys[:, :, kept])
        torch.testing.assert_close(ours.values[:, :, kept], theirs.values[:, :, kept])


def test_rows_rest_no_longer_where_the_others_may_speculate(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = trained_target(), trained_prompts()["prompts"][:4]
    token, texts = with_an_end(target, prompts, 60)
    disable = len(texts) - 1
    config = SpeculativeConfig(tree=IRREGULAR, disable_by_batch_size=disable)
    calls = noted_calls(monkeypatch)
    target.generate(
        **padded(prompts),
        assistant_model=trained_head(),
        speculative_config=config,
        max_new_tokens=60,
        eos_token_id=token,
        pad_token_id=0,
    )
    outcomes = [one for outcomes in calls for one in outcomes]
    assert not outcomes[0].drafted and any(one.drafted for one in outcomes)
    left = [len(one.walk.paths) - len(one.left_out) for one in outcomes if not one.drafted]
    assert not set(left) & set(range(1, disable))
