"""Faults that could end all requests, and are to end one: draws from nothing, drafters that break, late requests."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.batches import assert_nothing_left, limits, manager_of, ragged_prompts, text_alone
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.requests import RequestStatus

from hf_specdec import NgramDraft
from hf_specdec.batching import SpeculativeBatchingManager
from hf_specdec.cache.paged_layers import PagedLayer
from hf_specdec.drafters import Drafter
from hf_specdec.trees import DraftTree, TokenTree, Topology


PROMPTS = ragged_prompts((9, 14, 5))
POISONED = 60
"""A token that is in no other prompt."""


def check_others(manager: SpeculativeBatchingManager, target: PreTrainedModel, bad: dict[str, Any]) -> Any:
    """Runs a request that is to fail beside others, which get their texts. Returns its result."""
    with manager:
        names = manager.add_requests(PROMPTS, max_new_tokens=20, do_sample=False)
        drawn = manager.add_request(
            PROMPTS[0], max_new_tokens=20, do_sample=True, suppress_tokens=[POISONED], speculate=False
        )
        result = manager.get_result(manager.add_request(**({"max_new_tokens": 20} | bad)), timeout=60)
        assert len(manager.get_result(drawn, timeout=60).generated_tokens) == 20
        for name, prompt in zip(names, PROMPTS, strict=True):
            text = manager.get_result(name, timeout=60).generated_tokens
            assert text == text_alone(target, prompt, max_new_tokens=20)
    assert manager.background_thread_status.fatal_error is None
    assert_nothing_left(manager)
    return result


# Every two of a draft, a seed, a temperature and a warper come together.
@pytest.mark.parametrize(
    "assistant, seed, temperature, warper",
    [
        ("draft", None, 1e-39, {}),
        ("draft", 3, 1e-45, {"top_h": 0.5}),
        ("ngram", None, 1e-45, {"top_h": 0.5}),
        ("ngram", 3, 1e-39, {"top_h": 0.5}),
        ("ngram", 3, 1e-45, {}),
    ],
)
def test_a_temperature_that_leaves_nothing(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    assistant: str,
    seed: int | None,
    temperature: float,
    warper: dict[str, Any],
) -> None:
    """Also where a warper raises before anything is drawn."""
    manager = manager_of(target, draft if assistant == "draft" else NgramDraft())
    bad = {"input_ids": PROMPTS[1], "do_sample": True, "temperature": temperature, "seed": seed, **warper}
    result = check_others(manager, target, bad)
    assert result.status == RequestStatus.FAILED
    # `torch.compile`, in an earlier test perhaps, turns off the checks that `Categorical` makes.
    assert "`temperature`" in result.error or (warper and "Categorical" in result.error)


def poison(model: PreTrainedModel, value: float) -> None:
    """Gives a token this logit wherever the model reads `POISONED`."""
    read: list[torch.Tensor] = []

    def remember(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        read[:] = [kwargs["input_ids"] == POISONED]

    def spoil(module: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
        logits[..., 7].masked_fill_(read[0][:, -logits.shape[1] :], value)
        return logits

    model.register_forward_pre_hook(remember, with_kwargs=True)
    model.lm_head.register_forward_hook(spoil)


@pytest.mark.parametrize("warper", [{}, {"top_h": 0.9}, {"eta_cutoff": 0.001}], ids=str)
@pytest.mark.parametrize("of, value", [("target", torch.inf), ("draft", torch.inf), ("draft", torch.nan)])
@pytest.mark.some_cases(3)
def test_infinite_logits(
    target: PreTrainedModel, draft: PreTrainedModel, of: str, value: float, warper: dict[str, Any]
) -> None:
    """The target's end the request that draws from them; the draft's cost it its drafts."""
    target, draft = copy.deepcopy(target), copy.deepcopy(draft)
    poison(target if of == "target" else draft, value)
    bad = {"input_ids": [*PROMPTS[1], POISONED], "do_sample": True, **warper}
    manager = manager_of(target, draft)
    result = check_others(manager, target, bad)
    learnt = [overlap for shared in manager.engine.temperatures._kept.values() for overlap in shared._overlaps]
    assert all(map(math.isfinite, learnt))
    assert learnt or of == "target" or warper
    if of == "target":
        assert result.status == RequestStatus.FAILED and not result.generated_tokens
    else:
        assert result.error is None and len(result.generated_tokens) == 20


def test_infinite_logits_beside_others_with_the_same_warpers(target: PreTrainedModel) -> None:
    """Scores of all three are processed together, at their first tokens: the warper refuses all or none."""
    poisoned = copy.deepcopy(target)
    poison(poisoned, torch.inf)
    prompts, texts = ([4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, POISONED]), []
    for model in (target, poisoned):
        manager = manager_of(model, NgramDraft())
        names = [
            manager.add_request(prompt, seed=5, do_sample=True, top_h=0.9, max_new_tokens=20) for prompt in prompts
        ]
        with manager:
            *others, last = [manager.get_result(name, timeout=60) for name in names]
        assert manager.background_thread_status.fatal_error is None
        texts.append([other.generated_tokens for other in others])
    assert last.status == RequestStatus.FAILED and not last.generated_tokens
    assert texts[0] == texts[1] and POISONED not in sum(texts[0], []) and [len(text) for text in texts[0]] == [20, 20]


# ----------------------------------------------------------------------------------------------------- users' drafters


class Proposes(Drafter):
    """A user's drafter, which goes wrong where the text begins with `POISONED`."""

    def __init__(self, how: str):
        self.how = how

    def start(self, sequences: Any, request: Any) -> None:
        self.is_wrong = sequences.tokens(0, 0)[0] == POISONED

    def propose(self, sequences: Any) -> Any:
        if self.is_wrong and self.how == "no tree":
            return [1, 2]
        token = {"beyond": 61, "negative": -1}.get(self.how, 5) if self.is_wrong else 5
        rows = 2 if self.is_wrong and self.how == "two rows" else 1
        nodes = 3 if self.is_wrong and self.how == "too large" else 1
        topology = Topology.of_tree(TokenTree.chain(nodes), torch.device("cpu"))
        return DraftTree(torch.full((rows, nodes), token), topology)

    def commit(self, paths: list[list[int] | None]) -> None:
        if self.is_wrong and self.how == "commit":
            raise KeyError("of its own")


class Draws(Drafter):
    """A user's drafter with probabilities, whose drafts lack something where the text begins with `POISONED`."""

    has_probabilities = True

    def __init__(self, **wrong: Any):
        self.wrong = wrong

    def start(self, sequences: Any, request: Any) -> None:
        self.is_wrong = sequences.tokens(0, 0)[0] == POISONED

    def propose(self, sequences: Any) -> Any:
        topology = Topology.of_tree(TokenTree.chain(2), torch.device("cpu"))
        draft = DraftTree(torch.full((1, 2), 5), topology, None, torch.zeros(1, 2, 61), [[0, 1, -1]])
        return replace(draft, **self.wrong) if self.is_wrong else draft


@pytest.mark.parametrize(
    "how, words",
    {
        "commit": "KeyError: 'of its own'",
        "beyond": "token 61",
        "negative": "token -1",
        "two rows": "2 rows for 1",
        "too large": "3 nodes",
        "no tree": "returned list",
    }.items(),
)
def test_a_fault_in_a_users_drafter(target: PreTrainedModel, how: str, words: str) -> None:
    bad = {"input_ids": [POISONED, *PROMPTS[1]], "do_sample": False}
    result = check_others(manager_of(target, Proposes(how), tree="[(0,)]"), target, bad)
    assert result.status == RequestStatus.FAILED and words in result.error


CHAIN = Topology.of_tree(TokenTree.chain(2), torch.device("cpu"))
WRONG_DRAFTS: dict[str, tuple[dict[str, Any], str]] = {
    "no scores": ({"scores": None}, "no `scores`"),
    "no index": ({"score_index": None}, "`score_index`"),
    "an index of floats": ({"score_index": torch.tensor([[0.0, 1.0, -1.0]])}, "torch.float32"),
    "no distribution of a parent": ({"score_index": [[0, -1, -1]]}, "children of node 1"),
    "scores over another vocabulary": ({"scores": torch.zeros(1, 2, 50)}, "for 50 tokens"),
    "a vocabulary of other columns": ({"vocabulary": torch.arange(50), "vocab_size": 61}, "61 columns"),
    "a vocabulary beyond": ({"vocabulary": torch.arange(1, 62), "vocab_size": 61}, "61 columns"),
    "NaN": ({"scores": torch.full((1, 2, 61), torch.nan)}, "are NaN"),
    "infinity": ({"scores": torch.zeros(1, 2, 61).index_fill(2, torch.tensor(4), torch.inf)}, "infinite"),
    "another topology": ({"topology": Topology.of_tree(TokenTree.chain(1), torch.device("cpu"))}, "2 `tokens`"),
    "parents beyond": ({"topology": replace(CHAIN, parents=torch.tensor([[0, 0, 7]]))}, "[0, 0, 7]"),
    "parents after": ({"topology": replace(CHAIN, parents=torch.tensor([[0, 2, 0]]))}, "[0, 2, 0]"),
    "int32 parents": ({"topology": replace(CHAIN, parents=torch.tensor([[0, 0, 1]]).int())}, "torch.int32"),
    "ancestors of others": ({"topology": replace(CHAIN, ancestors=CHAIN.ancestors[:, 1:, 1:])}, "3 nodes"),
    "valid of another shape": ({"valid": torch.ones(1, 3, dtype=torch.bool)}, "`valid`"),
    "valid of integers": ({"valid": torch.ones(1, 2, dtype=torch.long)}, "torch.int64"),
    "float tokens": ({"tokens": torch.full((1, 2), 5.0)}, "torch.float32"),
    "int32 tokens": ({"tokens": torch.full((1, 2), 5).int()}, "torch.int32"),
    "three dimensions": ({"tokens": torch.full((1, 2, 1), 5)}, "3 dimensions"),
}


@pytest.mark.parametrize("name", WRONG_DRAFTS)
@pytest.mark.some_cases(6)
def test_a_fault_in_what_a_users_drafter_draws(target: PreTrainedModel, name: str) -> None:
    wrong, words = WRONG_DRAFTS[name]
    manager = manager_of(target, Draws(**wrong), tree="[(0,), (0, 0)]")
    bad = {"input_ids": [POISONED, *PROMPTS[1]], "do_sample": True}
    result = check_others(manager, target, bad)
    assert result.status == RequestStatus.FAILED and words in result.error
    learnt = [overlap for shared in manager.engine.temperatures._kept.values() for overlap in shared._overlaps]
    assert all(map(math.isfinite, learnt))


NOTHING: dict[str, dict[str, Any]] = {
    "no nodes": vars(DraftTree.empty(1, torch.device("cpu"))),
    "no valid nodes": {"valid": torch.zeros(1, 2, dtype=torch.bool), "scores": None, "score_index": None},
}


@pytest.mark.parametrize("nothing", NOTHING.values(), ids=NOTHING)
def test_a_users_drafter_that_draws_nothing(target: PreTrainedModel, nothing: dict[str, Any]) -> None:
    """It is no fault: there is nothing whose distribution were missing."""
    bad = {"input_ids": [POISONED, *PROMPTS[1]], "do_sample": True}
    result = check_others(manager_of(target, Draws(**nothing), tree="[(0,), (0, 0)]"), target, bad)
    assert result.error is None and len(result.generated_tokens) == 20


# ------------------------------------------------------------------------------------- what comes at the wrong moment


class Box:
    """An inbox, into which something comes right after somebody has found it empty."""

    def __init__(self, inbox: Any, event: Callable[[], None]):
        self.inbox, self.event = inbox, event
        self.put, self.get, self.get_nowait = inbox.put, inbox.get, inbox.get_nowait

    def empty(self) -> bool:
        is_empty = self.inbox.empty()
        if is_empty and self.event is not None:
            event, self.event = self.event, None
            event()
        return is_empty


def test_cancelled_before_it_was_seen(target: PreTrainedModel) -> None:
    manager = manager_of(target, NgramDraft())

    def add_and_cancel() -> None:
        manager.add_request(PROMPTS[0], request_id="short-lived", max_new_tokens=100)
        manager.cancel_request("short-lived")

    manager._loop.inbox._new = Box(manager._loop.inbox._new, add_and_cancel)
    with manager:
        result = manager.get_result(timeout=20)
        assert (result.request_id, result.error) == ("short-lived", "cancelled")
        name = manager.add_request(PROMPTS[1], max_new_tokens=10, do_sample=False)
        assert manager.get_result(name).generated_tokens == text_alone(target, PROMPTS[1], max_new_tokens=10)
        assert manager.get_result(timeout=0.1) is None
        manager.stop(timeout=20)
        assert not manager.is_running()
    assert_nothing_left(manager)


def test_added_before_the_stop_and_not_yet_seen(target: PreTrainedModel) -> None:
    manager = manager_of(target, NgramDraft())

    def add_and_stop() -> None:
        manager.add_request(PROMPTS[0], request_id="late", max_new_tokens=10, do_sample=False)
        manager.stop(block=False)

    manager._loop.inbox._new = Box(manager._loop.inbox._new, add_and_stop)
    manager.start()
    manager.join(timeout=20)
    assert manager.get_result("late").generated_tokens == text_alone(target, PROMPTS[0], max_new_tokens=10)
    assert_nothing_left(manager)


def test_added_while_the_manager_dies(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look whether it lives and the queue: refused, not left where nobody takes it from."""
    manager = manager_of(target, NgramDraft())
    prepare = manager._admission.request

    def fail() -> None:
        raise MemoryError("out of it")

    def prepare_and_die(*args: Any, **options: Any) -> Any:
        request = prepare(*args, **options)
        monkeypatch.setattr(manager._admission, "request", prepare)
        manager.engine.step = fail
        manager.add_request(PROMPTS[0], max_new_tokens=4)
        manager.join(timeout=20)
        return request

    monkeypatch.setattr(manager._admission, "request", prepare_and_die)
    manager.start()
    with pytest.raises(RuntimeError, match="ended with an error"):
        manager.add_request(PROMPTS[1], max_new_tokens=4)
    assert len(manager._loop.inbox) == 0


def test_streaming_results_are_told_once_and_as_they_were(target: PreTrainedModel) -> None:
    """Results of a step come while the next one runs, in which their request may fail, or lose its blocks."""

    class Fails(NgramDraft):
        calls = 0

        def propose(self, sequences: Any) -> Any:
            type(self).calls += 1
            if type(self).calls == 5:
                raise ValueError("the fifth")
            return super().propose(sequences)

    with target.init_continuous_batching(
        assistant_model=Fails(min_ngram=1), tree=TokenTree.chain(2), continuous_batching_config=limits()
    ) as manager:
        manager.add_request([4, 5, 6, 4, 5, 6], max_new_tokens=40, streaming=True)
        found = []
        while not found or found[-1].status != RequestStatus.FAILED:
            found.append(manager.get_result(timeout=60))
        assert manager.get_result(timeout=0.5) is None
        assert {result.status for result in found[:-1]} == {RequestStatus.DECODING}
    with target.init_continuous_batching(
        assistant_model=NgramDraft(min_ngram=1),
        tree=TokenTree.chain(2),
        continuous_batching_config=limits(14, block_size=4),
    ) as manager:
        for prompt in ragged_prompts((6, 7, 8)):
            manager.add_request(prompt, max_new_tokens=30, streaming=True)
        found = []
        while sum(result.is_finished() for result in found) < 3:
            found.append(manager.get_result(timeout=60))
    assert manager.state.num_preemptions > 0
    assert {result.status for result in found} == {RequestStatus.DECODING, RequestStatus.FINISHED}


def test_a_cancellation_is_of_the_request_that_was_open(target: PreTrainedModel) -> None:
    """Not of a later one with the same name."""
    manager = manager_of(target, NgramDraft())
    manager.cancel_request("mine")
    manager.add_request(PROMPTS[0], "mine", max_new_tokens=6)
    with manager:
        assert manager.get_result("mine", timeout=60).error is None
        manager.cancel_request("mine")
        manager.add_request(PROMPTS[0], "mine", max_new_tokens=6)
        assert manager.get_result("mine", timeout=60).error is None


def test_nan_of_a_prompt_that_was_not_read_to_its_end(target: PreTrainedModel) -> None:
    """A cancelled request leaves its blocks to others, whose texts are as ever."""
    target, draft = copy.deepcopy(target), copy.deepcopy(target)
    with torch.no_grad():
        target.get_input_embeddings().weight[POISONED] = torch.nan
    manager = manager_of(target, draft, continuous_batching_config=limits(num_blocks=20, max_batch_tokens=16))
    engine = manager.engine
    bad = manager._admission.request("bad", [POISONED] * 20, {"max_new_tokens": 4})
    with engine.running():
        engine.scheduler.add(bad)
        list(engine.step())
        blocks = set(bad.table.blocks)
        assert 0 < engine.target.cache.length_of(bad.table) < 20
        engine.end(bad)
    assert all(not blocks & cache.clean_blocks for cache in (engine.target.cache, engine.drafting.cache))
    # The short ones have its blocks, of which they fill few slots while they are in one forward with the long one.
    prompts = [PROMPTS[0][:3], PROMPTS[2], PROMPTS[1]]
    options = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": [POISONED]}
    with manager:
        names = manager.add_requests(prompts, speculate=False, **options)
        outputs = [manager.get_result(name, timeout=60) for name in names]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.error is None
        assert output.generated_tokens == text_alone(target, prompt, **options)


def test_results_come_even_if_the_device_is_lost(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request in the middle of its prompt, and others: nobody waits for ever."""
    manager = manager_of(target, NgramDraft(), continuous_batching_config=limits(max_batch_tokens=8))
    lost: list[bool] = []
    zero = PagedLayer.zero

    def zero_if_there(self: PagedLayer, *args: Any) -> None:
        if lost:
            raise RuntimeError("device-side assert triggered")
        zero(self, *args)

    def lose(*_: Any) -> Any:
        lost.append(True)
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(PagedLayer, "zero", zero_if_there)
    read = manager.engine.target.read
    manager.engine.target.read = lambda chunk: lose() if manager.engine.num_tokens_read else read(chunk)
    names = manager.add_requests([list(range(4, 30)), PROMPTS[0], PROMPTS[1]], max_new_tokens=4)
    with manager:
        for name in names:
            result = manager.get_result(name, timeout=20)
            assert result is not None and "device-side assert" in result.error
    assert len(manager._loop.inbox) == 0
