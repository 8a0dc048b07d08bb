"""Steps that run again before the host has read their last run, with a stand-in for CUDA's graphs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.batches import assert_nothing_left, limits, ragged_prompts, text_alone
from support.goldens import trained_prompts, trained_target
from support.graphs import StandIn, install_stand_in
from support.heads import tiny_head, trained_head
from support.models import noisy_copy, tiny_model
from support.parity import IRREGULAR

from hf_specdec import NgramDraft, SpeculativeConfig, TokenTree
from hf_specdec.cache.blocks import BlockPool
from hf_specdec.engine.captured import Outcome
from hf_specdec.engine.captured.keys import StepSize
from hf_specdec.engine.captured.parts import StepPart
from hf_specdec.engine.captured.rows import InFlightRows
from hf_specdec.engine.captured.running import Repeats
from hf_specdec.engine.captured.staged_rows import RowValues
from hf_specdec.engine.engine import Engine
from hf_specdec.trees.auto import Plan
from hf_specdec.trees.candidate_choice import CandidateChoice
from hf_specdec.verification import Verifier


CHAIN = TokenTree.chain(2)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return install_stand_in(monkeypatch, with_kernel=True)


@pytest.mark.parametrize(("depth", "lag"), [(0, 1), (2, 3), (2, 6)])
@pytest.mark.parametrize("keeps_features", [False, True])
@pytest.mark.some_cases(2)
def test_rows_that_move_on_are_as_if_loaded(depth: int, lag: int, keeps_features: bool) -> None:
    """Rows of requests with room and without, that rest, and that have had an error; beside padding rows."""
    manager = tiny_model("llama").init_continuous_batching(assistant_model=NgramDraft())
    names = ["lengths", "room", "kinds", "counts", "places", "slots", "slot_steps", "tail", "tables", "uniforms"]
    draws, pool, size = random.Random(depth + lag), BlockPool(60, 4), StepSize(rows=6, blocks=16, depth=depth, lag=lag)

    def values(requests: list[Any], counts: list[int], slots: list[int]) -> RowValues:
        return RowValues(
            kinds=[Verifier.GREEDY] * len(requests),
            room=[max(request.room, 0) if depth else 0 for request in requests],
            counts=counts,
            draft_slots=[-1] * len(requests),
            places=[2 + number for number in range(len(requests))],
            slots=slots,
            slot_steps=[int(keeps_features)] * len(requests),
            draft_temperature=[1.0] * len(requests),
        )

    for number in range(20):
        requests = [
            manager._admission.request(
                f"{number} {place}",
                [5] * draws.randint(8, 15),
                {"max_new_tokens": 9, "do_sample": True},
                seed=place,
                streaming=False,
            )
            for place in range(5)
        ]
        for request in requests:
            pool.reserve(request.table, 40)
        rows, fresh = (InFlightRows(size, torch.device("cpu"), 0) for _ in range(2))
        counts, slots = [draws.randint(1, lag) for _ in requests], [64 * place for place in range(5)]
        rows.load(requests, values(requests, counts, slots))
        for _ in range(3):
            accepted, new = torch.full((6,), -1), torch.full((6, depth + 1), -1)
            for row, request in enumerate(requests):
                if (row + number) % 5 == 0:  # has rested, or nothing could be drawn
                    accepted[row] = draws.choice([-1, -2])
                    continue
                taken = min(draws.randint(0, depth), max(request.room, 0))
                accepted[row] = taken
                new[row, : taken + 1] = torch.tensor([draws.randint(3, 60) for _ in range(taken + 1)])
                request.tokens += new[row, : taken + 1].tolist()
                counts[row] = taken + 1 if depth else counts[row]
                slots[row] += (taken + 1) * keeps_features
            rows.advance(accepted, new)
            fresh.load(requests, values(requests, counts, slots))
            assert all(torch.equal(getattr(rows, name), getattr(fresh, name)) for name in names)
            rows.load_changes(requests, [1.0] * len(requests))
        for request in requests:
            pool.release(request.table)


@pytest.mark.parametrize(
    "assistant, do_sample",
    [
        *((assistant, False) for assistant in ("draft", "head", "off", "auto")),
        ("draft", True),
        *(pytest.param(assistant, True, marks=pytest.mark.slow) for assistant in ("head", "off", "auto")),
    ],
)
@pytest.mark.some_cases(1)
def test_the_device_does_not_wait_for_the_host(assistant: str, do_sample: bool, repeats: list[Repeats]) -> None:
    """Most steps are launched before the last one is read, and texts are as without that."""
    target, draft, prompts = trained_target(), trained_head(), trained_prompts()["prompts"][:3]
    if assistant == "draft":
        target, prompts = tiny_model(dtype=torch.float32), ragged_prompts((9, 14, 5))
        draft = noisy_copy(target, 0.02)
    config = SpeculativeConfig(
        tree="auto" if assistant == "auto" else IRREGULAR, disable_by_batch_size=0 if assistant == "off" else None
    )
    # Nearly greedy: draws depend on how many there were before, which runs that are not needed change.
    options = {"do_sample": True, "temperature": 1e-4, "top_k": 0} if do_sample else {}
    manager = target.init_continuous_batching(
        assistant_model=draft, speculative_config=config, continuous_batching_config=limits(400)
    )
    names = [
        manager.add_request(prompt, max_new_tokens=36 + 7 * number, **options) for number, prompt in enumerate(prompts)
    ]
    with manager:
        outputs = [manager.get_result(name, timeout=100) for name in names]
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert output.error is None
        assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=36 + 7 * number)
    # "auto" tries trees first, and what it takes then is a matter of the machine's times.
    assert len(repeats) > (1 if assistant == "auto" else manager.engine.num_steps / 2)
    assert_nothing_left(manager)


@pytest.mark.slow
def test_acceptance_is_that_of_steps_one_by_one(monkeypatch: pytest.MonkeyPatch, repeats: list[Repeats]) -> None:
    """A run that is launched ahead drafts from the tokens of the run before, and reads its features."""
    target, prompts, taken = trained_target(), trained_prompts()["prompts"][:3], []
    for is_ahead in (True, False):
        if not is_ahead:
            monkeypatch.setattr(Engine, "_may_repeat", lambda self, requests: False)
        before = len(repeats)
        outputs = target.generate_batch(
            prompts,
            assistant_model=trained_head(),
            tree=IRREGULAR,
            max_new_tokens=40,
            continuous_batching_config=limits(400),
        )
        taken.append([one.speculation.accepted_per_step for one in outputs.values()])
        assert (len(repeats) > before + 10) == is_ahead
    assert taken[0] == taken[1] and sum(sum(steps) for (steps,) in taken[0]) > 30


@pytest.mark.slow
def test_requests_without_drafts_beside_a_head(repeats: list[Repeats]) -> None:
    """They have no place for features, and what steps write for them must stay where nobody reads."""
    target, prompts = tiny_model(dtype=torch.float32), ragged_prompts((9, 14))
    slots: set[int] = set()
    with target.init_continuous_batching(
        assistant_model=tiny_head(target),
        tree=IRREGULAR,
        continuous_batching_config=limits(400, max_requests_per_batch=2),
    ) as manager:
        for _ in range(2):
            name = manager.add_request(prompts[0], max_new_tokens=50, speculate=False)
            output = manager.get_result(name, timeout=100)
            assert output.error is None
            assert output.generated_tokens == text_alone(target, prompts[0], max_new_tokens=50)
            slots |= {slot for one in repeats for slot in one.step.rows.slots.tolist()}
        drafted = manager.get_result(manager.add_request(prompts[1], max_new_tokens=30), timeout=100)
        assert drafted.generated_tokens == text_alone(target, prompts[1], max_new_tokens=30)
        store = manager.engine.drafting.features
    assert len(repeats) > 80 and slots == {store.trash_slot}
    assert_nothing_left(manager)


@pytest.mark.slow
def test_draft_temperatures_are_those_learnt_last(repeats: list[Repeats], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, load_changes = [], InFlightRows.load_changes

    def noted(self: InFlightRows, requests: Any, draft_temperature: list[float]) -> None:
        load_changes(self, requests, draft_temperature)
        loaded.append((self.draft_temperature[: len(requests)].tolist(), torch.tensor(draft_temperature).tolist()))

    monkeypatch.setattr(InFlightRows, "load_changes", noted)
    target, prompts = trained_target(), trained_prompts()["prompts"][:3]
    torch.manual_seed(0)
    target.generate_batch(
        prompts,
        assistant_model=trained_head(),
        tree=IRREGULAR,
        do_sample=True,
        top_k=0,
        max_new_tokens=70,
        continuous_batching_config=limits(400),
    )
    assert all(of_device == values for of_device, values in loaded)
    assert len({tuple(values) for _, values in loaded}) > 1 and len(repeats) > 20


@pytest.mark.slow
def test_seeds_draw_the_same_step_by_step(repeats: list[Repeats], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each position has its number, however far the run on the way comes; beside a greedy request."""
    target, prompts, texts = tiny_model(dtype=torch.float32), ragged_prompts((9, 14, 5)), []
    for is_ahead in (True, False):
        if not is_ahead:
            monkeypatch.setattr(Engine, "_may_repeat", lambda self, requests: False)
        manager = target.init_continuous_batching(
            assistant_model=tiny_head(target), tree=IRREGULAR, continuous_batching_config=limits(400)
        )
        options = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.9}
        names = [manager.add_request(prompt, seed=7 + row, **options) for row, prompt in enumerate(prompts[:2])]
        manager.add_request(prompts[2], max_new_tokens=40)
        before = len(repeats)
        with manager:
            texts.append([manager.get_result(name, timeout=60).generated_tokens for name in names])
        assert (len(repeats) > before + 10) == is_ahead
    assert texts[0] == texts[1] and len(set(texts[0][0])) > 3


@pytest.mark.slow
def test_auto_learns_from_steps_what_they_were(repeats: list[Repeats], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last run on the way has a tree as well, though nobody is left in it."""
    ran, learnt, left, take, end_step = [], [], [], Outcome.take, CandidateChoice.end_whole_step

    def noted(self: Outcome, part: StepPart, *args: Any) -> None:
        take(self, part, *args)
        ran.append(part.tree)
        left.append(len(self.left_out))

    def end_noted(self: CandidateChoice, tree: Any, *args: Any) -> None:
        learnt.append((tree, ran[-1]))
        end_step(self, tree, *args)

    # Whatever the machine's times are, a tree is planned.
    monkeypatch.setattr(CandidateChoice, "plan", lambda self, **_: Plan(self.candidates[0], 1.0))
    monkeypatch.setattr(CandidateChoice, "worth", lambda self, tree: float(tree == self.candidates[0]))
    monkeypatch.setattr(Outcome, "take", noted)
    monkeypatch.setattr(CandidateChoice, "end_whole_step", end_noted)
    target, prompts = tiny_model(dtype=torch.float32), ragged_prompts((9, 14, 5, 12))
    with target.init_continuous_batching(
        assistant_model=tiny_head(target), tree="auto", continuous_batching_config=limits(400)
    ) as manager:
        for prompt in prompts:
            manager.get_result(manager.add_request(prompt, max_new_tokens=50), timeout=60)
    assert len(learnt) > 40 and all(tree == of_step for tree, of_step in learnt)
    assert len(repeats) > 10 and any(count and tree is not None for count, tree in zip(left, ran, strict=True))
