"""Speculation by load: off while many requests run, and afterwards as if it had never been off."""

from __future__ import annotations

import copy
from itertools import accumulate
from typing import Any

import pytest
import torch
from support.batches import limits, ragged_prompts, text_alone
from support.goldens import trained_prompts, trained_target
from support.graphs import install_stand_in
from support.heads import trained_head
from support.models import noisy_copy, tiny_model
from support.parity import IRREGULAR
from transformers import PreTrainedModel

from hf_specdec import MedusaHeads, NgramDraft, SpeculativeConfig, TokenTree
from hf_specdec.batching import SpeculativeBatchingManager
from hf_specdec.cache.pending_features import PendingFeatures
from hf_specdec.drafters.features import FeatureDrafting
from hf_specdec.engine.captured.step import InFlightStep
from hf_specdec.engine.policy import LoadPolicy


SHORT, LONG = 12, 50
CAPACITY = 16


@pytest.fixture(autouse=True)
def least_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few features may wait, so that short texts fill their places."""
    monkeypatch.setattr(PendingFeatures, "LEAST_CAPACITY", CAPACITY)
    monkeypatch.setattr(PendingFeatures, "MOST_CAPACITY", CAPACITY)


def make(model: PreTrainedModel, draft: Any, limit: int | None, **options: Any) -> SpeculativeBatchingManager:
    config = SpeculativeConfig(tree=IRREGULAR, disable_by_batch_size=limit, **options)
    return model.init_continuous_batching(
        assistant_model=draft,
        speculative_config=config,
        continuous_batching_config=limits(max_requests_per_batch=4),
    )


def steps_of(manager: SpeculativeBatchingManager) -> list[tuple[int, int, int]]:
    """Running and waiting requests and draft nodes of every step that is to come; grows as they come."""
    steps: list[tuple[int, int, int]] = []
    engine, score = manager.engine, manager.engine.target.score

    def noted(requests: Any, draft: Any) -> Any:
        steps.append((len(engine.scheduler.active), len(engine.scheduler.waiting), draft.num_nodes))
        return score(requests, draft)

    engine.target.score = noted
    return steps


@pytest.mark.parametrize("counts_waiting", [False, True])
@pytest.mark.some_cases(1)
def test_steps_under_load_carry_no_drafts(counts_waiting: bool) -> None:
    model = tiny_model()
    manager = make(model, noisy_copy(model), 3, disable_counts_waiting=counts_waiting)
    steps = steps_of(manager)
    prompts = ragged_prompts()
    names = [manager.add_request(prompt, max_new_tokens=10 + 3 * number) for number, prompt in enumerate(prompts)]
    with manager:
        results = [manager.get_result(name) for name in names]
    for number, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        assert result.generated_tokens == text_alone(model, prompt, max_new_tokens=10 + 3 * number)
    for running, waiting, nodes in steps:
        assert (nodes > 0) == (running + (waiting if counts_waiting else 0) <= 3) or (nodes == 0 and running == 1)
    assert {running for running, _, nodes in steps if nodes} >= {1, 2, 3}
    assert any(waiting for running, waiting, _ in steps if running == 4)


def drafters(kind: str) -> tuple[PreTrainedModel, Any, list[list[int]]]:
    """A target, what drafts for it, and prompts."""
    if kind in ("draft", "ngram"):
        model = tiny_model()
        return (
            model,
            noisy_copy(model, 0.05) if kind == "draft" else NgramDraft(),
            ragged_prompts((20, 9, 4, 30, 7, 5)),
        )
    head = trained_head() if kind == "head" else MedusaHeads.from_pretrained(trained_head_folder())
    return trained_target(), head, trained_prompts()["prompts"][:6]


def trained_head_folder() -> Any:
    from support.goldens import TINY_TARGET

    return TINY_TARGET.parent / "medusa"


@pytest.mark.parametrize("kind", ["draft", "ngram", "head", "medusa"])
@pytest.mark.some_cases(1)
def test_acceptance_after_the_load_is_as_if_it_had_never_been(kind: str) -> None:
    """The steps of a long request once the others are gone are those of a new request with its text as the prompt."""
    model, draft, prompts = drafters(kind)
    manager = make(model, draft, 1)
    steps = steps_of(manager)
    name = manager.add_request(prompts[0], max_new_tokens=LONG)
    for prompt in prompts[1:]:
        manager.add_request(prompt, max_new_tokens=SHORT)
    with manager:
        result = manager.get_result(name)
    text, accepted = prompts[0] + result.generated_tokens, result.speculation.accepted_per_step[0]
    first = next(number for number, (_, _, nodes) in enumerate(steps) if nodes)
    assert first >= SHORT and accepted[:first] == [0] * first
    length = list(accumulate((count + 1 for count in accepted), initial=len(prompts[0])))[first]
    again = model.generate_batch(
        [text[:length]],
        assistant_model=draft,
        tree=IRREGULAR,
        max_new_tokens=LONG - (length - len(prompts[0])),
        continuous_batching_config=limits(),
    )
    (fresh,) = again.values()
    assert text == text[:length] + fresh.generated_tokens
    assert accepted[first:] == fresh.speculation.accepted_per_step[0]
    assert sum(accepted) > (10 if kind != "medusa" else 3)


def test_features_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """While speculation is off a head reads now and then, many requests together."""
    waiting, read, catch_up = [], [], FeatureDrafting._read_pending

    def noted(self: FeatureDrafting, requests: list[Any]) -> None:
        waiting.extend(self._num_pending(request) for request in self.features._places)
        read.append(len(requests))
        catch_up(self, requests)

    monkeypatch.setattr(FeatureDrafting, "_read_pending", noted)
    target = trained_target()
    with make(target, trained_head(), 0) as manager:
        for prompt in trained_prompts()["prompts"][:4]:
            manager.add_request(prompt, max_new_tokens=30)
        for _ in range(4):
            output = manager.get_result(timeout=120)
            assert output.generated_tokens == text_alone(target, output.prompt_ids, max_new_tokens=30)
    assert max(waiting) == CAPACITY and max(read) == 4
    store = manager.engine.drafting.features
    assert store is not None and not store._places and len(store._free) == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draft", "head"])
def test_whole_steps_after_the_load(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for steps on the device: a head reads what is waiting in some of them, of which none carries a tree."""
    install_stand_in(monkeypatch, with_kernel=True)
    by_host, catch_up = [], FeatureDrafting._read_pending

    def noted(self: FeatureDrafting, requests: list[Any]) -> None:
        by_host.extend(requests)
        catch_up(self, requests)

    monkeypatch.setattr(FeatureDrafting, "_read_pending", noted)
    model, draft, prompts = drafters(kind)
    model, draft = (copy.deepcopy(one).float() for one in (model, draft))
    manager = make(model, draft, 1)
    name = manager.add_request(prompts[0], max_new_tokens=90)
    for prompt in prompts[1:]:
        manager.add_request(prompt, max_new_tokens=25, speculate=prompt != prompts[2])
    with manager:
        result = manager.get_result(name)
    kinds = [kind for kind, _ in manager.engine.device_steps.stored]
    assert len(kinds) > 3 and not by_host
    assert any(one.reads for one in kinds) == (kind == "head")
    assert not any(one.reads and one.tree for one in kinds)
    text, accepted = prompts[0] + result.generated_tokens, result.speculation.accepted_per_step[0]
    first = next(number for number, count in enumerate(accepted) if count)
    assert first > 2 * CAPACITY
    length = list(accumulate((count + 1 for count in accepted), initial=len(prompts[0])))[first]
    again = model.generate_batch(
        [text[:length]],
        assistant_model=draft,
        tree=IRREGULAR,
        max_new_tokens=90 - (length - len(prompts[0])),
        continuous_batching_config=limits(),
    )
    (fresh,) = again.values()
    assert text == text[:length] + fresh.generated_tokens
    assert accepted[first:] == fresh.speculation.accepted_per_step[0]


@pytest.mark.slow
@pytest.mark.parametrize("length", [CAPACITY - 2, CAPACITY, CAPACITY + 1])
def test_rows_that_end_as_speculation_comes_back(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside rows with trees one that can use none, with as many features waiting as there may be."""
    install_stand_in(monkeypatch, with_kernel=True)
    target, head, prompts = drafters("head")
    target, head = (copy.deepcopy(one).float() for one in (target, head))
    with make(target, head, 2) as manager:
        for number, more in enumerate((0, 0, 1, 20)):
            manager.add_request(prompts[number][:8], max_new_tokens=length + more)
        for _ in range(4):
            output = manager.get_result(timeout=120)
            most = len(output.generated_tokens)
            assert output.generated_tokens == text_alone(target, output.prompt_ids, max_new_tokens=most)
    assert manager.state.speculation.num_drafts > 0 and len(manager.engine.device_steps.stored) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "depth, is_first",
    [
        (CAPACITY // 2 + 1, False),
        (CAPACITY - 2, True),
        (CAPACITY - 2, False),
        (CAPACITY // 2 + 1, True),
    ],
)
def test_rows_that_rest_beside_deep_trees(depth: int, is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their step writes as many features as the tree has levels: into no other's place, and not past the last."""
    install_stand_in(monkeypatch, with_kernel=True)
    target, head, prompts = drafters("head")
    target, head = (copy.deepcopy(one).float() for one in (target, head))
    written, launch = [], InFlightStep.launch

    def noted(self: InFlightStep) -> None:
        before = self._store.held.clone()
        launch(self)
        changed = (self._store.held != before).flatten(1).any(dim=1).nonzero().flatten().tolist()
        written.append({*changed} <= {*self.rows.places.tolist(), PendingFeatures.TRASH})

    monkeypatch.setattr(InFlightStep, "launch", noted)
    late = [(0, None), (10**6, TokenTree.chain(2))]
    options = [{"tree": late}, {}, {"speculate": False}][:: 1 if is_first else -1]
    with target.init_continuous_batching(
        assistant_model=head,
        tree=TokenTree.chain(depth),
        continuous_batching_config=limits(400, max_requests_per_batch=3),
    ) as manager:
        for prompt, own in zip(prompts, options, strict=False):
            manager.add_request(prompt, max_new_tokens=40, **own)
        for _ in options:
            output = manager.get_result(timeout=120)
            assert output.generated_tokens == text_alone(target, output.prompt_ids, max_new_tokens=40)
        store = manager.engine.drafting.features
    assert len(written) > 20 and all(written)
    assert store is not None and not store.held[store.DUMMY].any() and store.held[store.TRASH].any()


def test_the_limit() -> None:
    assert all(LoadPolicy().speculates(running, 99) for running in (0, 1, 1000))
    policy = LoadPolicy(disable_by_batch_size=4)
    assert [policy.speculates(running, 9) for running in (0, 4, 5)] == [True, True, False]
    policy = LoadPolicy(disable_by_batch_size=4, counts_waiting=True)
    assert [policy.speculates(2, waiting) for waiting in (0, 2, 3)] == [True, True, False]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"disable_counts_waiting": 1}, ("`disable_counts_waiting`", "1")),
        ({"max_step_nodes": 0}, ("`max_step_nodes`", "0", "from 1 on")),
        ({"max_step_nodes": 2.5}, ("`max_step_nodes`", "2.5")),
    ],
)
def test_refusals(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        SpeculativeConfig(**options)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("options", [{"disable_counts_waiting": True}, {"max_step_nodes": 8}])
def test_generate_has_no_queue_and_no_budget(options: dict[str, Any]) -> None:
    """What has no meaning there is refused, not ignored."""
    model = tiny_model()
    config = SpeculativeConfig(tree="[(0,)]", **options)
    with pytest.raises(ValueError, match=f"`{next(iter(options))}.*generate_batch"):
        model.generate(torch.tensor([[4, 5]]), assistant_model=model, speculative_config=config)
