"""The gate: another text is found, with its place and the gap of the logits there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.models import tiny_model
from transformers import BatchEncoding, PreTrainedModel

from hf_specdec.benchmarking.comparison import Call, compare
from hf_specdec.benchmarking.contenders import Contender, speculative
from hf_specdec.benchmarking.equality import check, differences_of, first_difference
from hf_specdec.benchmarking.prompts import EncodedPrompt


def prompt(*ids: int) -> EncodedPrompt:
    tokens = torch.tensor([ids])
    return EncodedPrompt("chat", BatchEncoding({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}))


PROMPTS = [prompt(3, 5, 7), prompt(9, 4)]


def test_equal_texts_pass(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    advanced = []
    contenders = [speculative(draft, "chain:3"), speculative(draft, "branching:2,2")]
    gate = check(target, PROMPTS, contenders, max_new_tokens=20, advance=lambda: advanced.append(1))
    assert gate.is_passed and len(advanced) == len(PROMPTS) * 3
    assert gate.identical == {"tree chain:3": 2, "tree branching:2,2": 2}


def test_another_text_does_not(target: PreTrainedModel) -> None:
    """A contender that may not write the third token of the plain text."""
    ids = PROMPTS[0].inputs["input_ids"]
    plain = target.generate(ids, max_new_tokens=8, do_sample=False)[0, 3:].tolist()
    assert plain[2] not in plain[:2]
    wrong = Contender("wrong", {"suppress_tokens": [plain[2]]})
    gate = check(target, PROMPTS[:1], [wrong], max_new_tokens=8)
    (difference,) = gate.differences
    assert not gate.is_passed and gate.identical == {"wrong": 0}
    assert (difference.contender, difference.task, difference.prompt, difference.position) == ("wrong", "chat", 0, 2)
    with torch.no_grad():
        best = target(torch.cat([ids, torch.tensor([plain[:2]])], dim=1)).logits[0, -1].topk(2).values
    assert difference.gap == pytest.approx(float(best[0] - best[1]), rel=1e-5)
    assert gate.to_dict()["differences"] == [difference.to_dict()]


def test_a_text_that_ends_early_differs_where_it_ends(target: PreTrainedModel) -> None:
    calls = [
        Call(contender=name, task="chat", prompt=0, round=0, tokens=tokens, seconds=1.0)
        for name, tokens in (("generate", [5, 6, 7]), ("short", [5, 6]))
    ]
    (difference,) = differences_of(target, PROMPTS, calls, "generate")
    assert (difference.contender, difference.position) == ("short", 2)


@pytest.mark.parametrize(
    "tokens, others, expected", [([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2), ([1, 2], [1], 1), ([], [4], 0)]
)
def test_where_texts_part(tokens: list[int], others: list[int], expected: int) -> None:
    assert first_difference(tokens, others) == first_difference(others, tokens) == expected


@pytest.mark.parametrize("masked", [-torch.inf, torch.finfo(torch.float32).min])
def test_a_tie_is_one_of_the_tokens_that_were_written(monkeypatch: pytest.MonkeyPatch, masked: float) -> None:
    """Two logits may all but tie where a third token was written, and masked ones are no measure of roundings."""
    target = tiny_model(dtype=torch.float32)
    logits = torch.full((1, 1, 8), masked)
    logits[0, 0, :3] = torch.tensor([20.0, 19.99999, 10.0])
    monkeypatch.setattr(type(target), "__call__", lambda *args, **options: SimpleNamespace(logits=logits))
    for token, is_near_tie in ((1, True), (2, False)):
        calls = [
            Call(contender=name, task="chat", prompt=0, round=0, tokens=[written], seconds=1.0)
            for name, written in (("generate", 0), ("tree", token))
        ]
        (difference,) = differences_of(target, PROMPTS, calls, "generate")
        assert difference.is_near_tie is is_near_tie and 0 < difference.rounding < 1


def test_calls_are_in_turn_and_of_every_prompt(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    advanced = []
    calls = compare(
        target,
        PROMPTS,
        [Contender("a"), speculative(draft, "chain:2")],
        temperature=0.0,
        max_new_tokens=6,
        rounds=2,
        advance=lambda: advanced.append(1),
    )
    order = [(call.round, call.prompt, call.contender) for call in calls]
    first, second = ["a", "tree chain:2"], ["tree chain:2", "a"]
    assert order == [
        (number, index, name) for number, names in enumerate((first, second)) for index in (0, 1) for name in names
    ]
    assert len(advanced) == 2 + len(calls)
    assert all(len(call.tokens) == 6 and call.seconds > 0 for call in calls)
    assert all((call.metrics is None) == (call.contender == "a") for call in calls)


def test_a_seed_reproduces_sampled_calls(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    def texts(seed: int) -> list[list[int]]:
        contenders = [Contender("a"), speculative(draft, "chain:2")]
        options = {"temperature": 1.0, "max_new_tokens": 6, "rounds": 2, "seed": seed}
        return [call.tokens for call in compare(target, PROMPTS, contenders, **options)]

    assert texts(1) == texts(1) != texts(2)
