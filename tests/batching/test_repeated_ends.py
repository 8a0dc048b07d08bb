"""Repeated steps whose texts end, fail or spoil on the way, and requests that come meanwhile."""

from __future__ import annotations

import copy
import itertools
import time
from typing import Any

import pytest
import torch
from support.batches import assert_nothing_left, limits, noted_calls, ragged_prompts, text_alone
from support.goldens import trained_prompts, trained_target
from support.graphs import StandIn, install_stand_in
from support.heads import trained_head
from support.models import noisy_copy, tiny_model
from support.parity import IRREGULAR
from transformers import StoppingCriteriaList

from hf_specdec import SpeculativeConfig, TokenTree
from hf_specdec.cache.paged_layers import PagedLayer
from hf_specdec.drafters.draft_model import CapturedDraftModel
from hf_specdec.engine.captured.running import Repeats
from hf_specdec.engine.engine import Engine
from hf_specdec.trees import DraftTree


CHAIN = TokenTree.chain(2)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return install_stand_in(monkeypatch, with_kernel=True)


@pytest.mark.slow
def test_a_text_that_ends_on_the_way(repeats: list[Repeats], monkeypatch: pytest.MonkeyPatch) -> None:
    """By an end token, a criterion, or its length: nothing is added to it, and it keeps its blocks until then."""
    target, prompts = trained_target(), trained_prompts()["prompts"][:4]
    texts = [text_alone(target, prompt, max_new_tokens=60) for prompt in prompts]
    seen: list[int] = []

    def stops(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(ids.shape[1])
        return torch.tensor([ids.shape[1] >= len(prompts[1]) + 21])

    kept, leavers = [], Repeats.leavers

    def noted(self: Repeats, outcome: Any) -> set[int]:
        left = leavers(self, outcome)
        kept.extend(len(self.part.requests[row].table.blocks) for row in left)
        return left

    monkeypatch.setattr(Repeats, "leavers", noted)
    options: list[dict[str, Any]] = [
        {"eos_token_id": texts[0][25]},
        {"stopping_criteria": StoppingCriteriaList([stops])},
        {"max_new_tokens": 31},
        {},
    ]
    manager = target.init_continuous_batching(
        assistant_model=trained_head(), tree=IRREGULAR, continuous_batching_config=limits(400)
    )
    names = [
        manager.add_request(prompt, **{"max_new_tokens": 60} | own)
        for prompt, own in zip(prompts, options, strict=True)
    ]
    with manager:
        outputs = [manager.get_result(name, timeout=60) for name in names]
    ends = [texts[0].index(texts[0][25]) + 1, 21, 31, 60]
    for output, text, end in zip(outputs, texts, ends, strict=True):
        assert output.error is None and output.generated_tokens == text[:end]
    assert seen == list(range(len(prompts[1]) + 1, len(prompts[1]) + 22))
    assert len(repeats) > 5 and kept and min(kept) > 0
    assert_nothing_left(manager)


def test_a_new_request_does_not_wait_for_others_to_end(
    repeats: list[Repeats], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A series of runs ends as soon as there is news."""
    asked, may_repeat = [], Engine._may_repeat

    def noted(self: Engine, requests: Any) -> bool:
        has_news = self.has_news()  # first: it may come at any time, and stays
        asked.append((has_news, may_repeat(self, requests)))
        return asked[-1][1]

    monkeypatch.setattr(Engine, "_may_repeat", noted)
    target, (first, second) = tiny_model(dtype=torch.float32), ragged_prompts((5, 6))
    text = text_alone(target, second, max_new_tokens=4)
    with target.init_continuous_batching(
        assistant_model=noisy_copy(target, 0.05), tree=CHAIN, continuous_batching_config=limits(2000)
    ) as manager:
        long = manager.add_request(first, max_new_tokens=2000)
        for _ in range(10):
            time.sleep(0.05)
            assert (
                manager.get_result(manager.add_request(second, max_new_tokens=4), timeout=60).generated_tokens == text
            )
        manager.cancel_request(long)
        assert manager.get_result(long, timeout=60).error == "cancelled"
    assert not any(repeated for has_news, repeated in asked if has_news)
    assert any(has_news for has_news, _ in asked) and len(repeats) > 10


@pytest.mark.parametrize("more", [0, 1, 2, 9])
@pytest.mark.some_cases(1)
def test_texts_after_their_last_position(repeats: list[Repeats], more: int) -> None:
    """A model with learned positions knows none after the last, where a run on the way may stand."""
    target = tiny_model("gpt2", dtype=torch.float32, max_position_embeddings=64)
    most, prompts = target.config.n_positions, ragged_prompts((9, 6))
    outputs = target.generate_batch(
        prompts,
        assistant_model=noisy_copy(target, 0.02),
        tree=TokenTree.chain(3),
        max_length=most + more,
        continuous_batching_config=limits(400),
    )
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert (output.error is None) == (more < 2)
        assert output.generated_tokens == text_alone(target, prompt, max_length=most + min(more, 1))
    assert repeats


@pytest.mark.parametrize("num_blocks", [8, 10, 14])
@pytest.mark.some_cases(1)
def test_few_blocks(num_blocks: int, repeats: list[Repeats], monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Where there is none for a run ahead, requests still end, if need be after another has; nobody is asked about that
    run, so that "auto" does not count it.
    """
    refused, order, has_room, may_repeat = [], [], Repeats.has_room, Engine._may_repeat

    def noted(self: Repeats) -> bool:
        free = self._target.cache.pool.num_free
        order.append(has_room(self))
        assert self._target.cache.pool.num_free == free
        refused.extend([] if order[-1] else [free])
        return order[-1]

    def asked(self: Engine, requests: Any) -> bool:
        assert order[-1] is True
        order.append("asked")
        return may_repeat(self, requests)

    monkeypatch.setattr(Repeats, "has_room", noted)
    monkeypatch.setattr(Engine, "_may_repeat", asked)
    target, prompts = tiny_model(dtype=torch.float32), ragged_prompts((5, 6, 9))
    manager = target.init_continuous_batching(
        assistant_model=noisy_copy(target, 0.02), tree=CHAIN, continuous_batching_config=limits(num_blocks)
    )
    names = [manager.add_request(prompt, max_new_tokens=20) for prompt in prompts]
    with manager:
        outputs = [manager.get_result(name, timeout=60) for name in names]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=20)
    assert repeats and refused and min(refused) < 2
    assert_nothing_left(manager)


@pytest.mark.slow
def test_what_a_text_leaves_after_its_end_does_no_harm(
    repeats: list[Repeats], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run on the way may put NaN into the blocks of a request that has ended: the next owner has them zeroed."""
    target = tiny_model(dtype=torch.float32, tie_word_embeddings=False)
    prompts = ragged_prompts((5, 9))
    texts = [text_alone(target, prompt, max_new_tokens=40) for prompt in prompts]
    used = set(sum(prompts, [])).union(texts[1])
    token = next(one for one in texts[0][8:30] if one not in used)
    end = texts[0].index(token)
    target.get_input_embeddings().weight.data[token] = torch.nan
    zeroed: list[int] = []
    zero = PagedLayer.zero
    monkeypatch.setattr(PagedLayer, "zero", lambda self, blocks, *of: (zeroed.extend(blocks), zero(self, blocks, *of)))
    with target.init_continuous_batching(
        assistant_model=copy.deepcopy(target),
        speculative_config=SpeculativeConfig(tree=CHAIN, disable_by_batch_size=0),
        continuous_batching_config=limits(13),
    ) as manager:
        for _ in range(3):
            ended = manager.get_result(
                manager.add_request(prompts[0], max_new_tokens=40, eos_token_id=token), timeout=60
            )
            assert ended.error is None and ended.generated_tokens == texts[0][: end + 1]
            del zeroed[:]
            other = manager.get_result(manager.add_request(prompts[1], max_new_tokens=40), timeout=60)
            assert other.error is None and other.generated_tokens == texts[1]
            assert len(set(zeroed)) > (5 + end) // 4  # all blocks of the ended text
    assert len(repeats) > 10
    assert_nothing_left(manager)


def test_a_spoiled_row_rests_in_the_run_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has moved it on by tokens that do not count."""
    target = tiny_model(dtype=torch.float32, tie_word_embeddings=False)
    prompts = ragged_prompts((5, 9))
    texts = [text_alone(target, prompt, max_new_tokens=40) for prompt in prompts]
    used = set(sum(prompts, [])).union(*texts)
    token = next(one for one in range(3, target.config.vocab_size) if one not in used)
    draft = copy.deepcopy(target)
    target.get_input_embeddings().weight.data[token] = torch.nan
    calls = noted_calls(monkeypatch)
    propose = CapturedDraftModel.propose

    def proposes_it(self: CapturedDraftModel, warp: Any) -> DraftTree:
        drafted = propose(self, warp)
        drafted.tokens.fill_(token)
        return drafted

    monkeypatch.setattr(CapturedDraftModel, "propose", proposes_it)
    found = target.generate_batch(
        prompts, assistant_model=draft, tree=CHAIN, max_new_tokens=40, continuous_batching_config=limits(100)
    )
    assert [one.generated_tokens for one in found.values()] == texts
    pairs = [pair for outcomes in calls for pair in itertools.pairwise(outcomes) if pair[0].spoiled]
    assert pairs
    for spoiled, on_the_way in pairs:
        assert spoiled.spoiled.keys() <= on_the_way.left_out and not on_the_way.spoiled
        assert all(on_the_way.walk.paths[row] is None for row in spoiled.spoiled)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 1000], ids=["once", "always"])
def test_drafting_goes_on_after_a_spoiled_step(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one step of rest, or 2, 4, …, 16 of them if the next draft is spoiled again."""
    target = tiny_model(dtype=torch.float32, tie_word_embeddings=False)
    (prompt,) = ragged_prompts((5,))
    text = text_alone(target, prompt, max_new_tokens=70)
    token = next(one for one in range(3, target.config.vocab_size) if one not in prompt + text)
    draft = copy.deepcopy(target)
    target.get_input_embeddings().weight.data[token] = torch.nan
    calls, propose, spoils = noted_calls(monkeypatch), CapturedDraftModel.propose, []

    def proposes_it(self: CapturedDraftModel, warp: Any) -> DraftTree:
        drafted = propose(self, warp)
        if spoils.pop() if spoils else False:
            drafted.tokens.fill_(token)
        return drafted

    monkeypatch.setattr(CapturedDraftModel, "propose", proposes_it)
    with target.init_continuous_batching(
        assistant_model=draft, tree=CHAIN, continuous_batching_config=limits(200)
    ) as manager:
        first = manager.add_request(prompt, max_new_tokens=40)
        manager.get_result(first, timeout=60)  # everything has been captured
        del calls[:]
        spoils += [True] * times
        output = manager.get_result(manager.add_request(prompt, max_new_tokens=70), timeout=60)
    assert output.generated_tokens == text
    outcomes = [one for outcomes in calls for one in outcomes if not one.left_out]
    kinds = ["spoiled" if one.spoiled else "drafted" if one.drafted else "rest" for one in outcomes]
    rests = [len(list(steps)) for kind, steps in itertools.groupby(kinds) if kind == "rest"]
    assert kinds.count("drafted") > 15 if times == 1 else kinds.count("drafted") == 0
    assert rests[0] == 1 if times == 1 else rests[:5] == [1, 2, 4, 8, 16]


def test_rows_of_requests_in_flight_leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may be waiting for their places and blocks."""
    target, prompts = tiny_model(dtype=torch.float32), ragged_prompts((5, 6, 9, 7))
    calls, lengths = noted_calls(monkeypatch), (20, 30, 40, 50)
    outputs = [text_alone(target, one, max_new_tokens=most) for one, most in zip(prompts, lengths, strict=True)]
    manager = target.init_continuous_batching(
        assistant_model=noisy_copy(target, 0.02), tree=CHAIN, continuous_batching_config=limits(400)
    )
    names = [manager.add_request(one, max_new_tokens=most) for one, most in zip(prompts, lengths, strict=True)]
    with manager:
        assert [manager.get_result(name, timeout=60).generated_tokens for name in names] == outputs
    assert_nothing_left(manager)
    assert {4, 3, 2, 1} <= {len(outcomes[0].walk.paths) for outcomes in calls if outcomes}
