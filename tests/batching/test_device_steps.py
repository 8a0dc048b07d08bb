"""Whole steps of requests in flight, with a stand-in for CUDA's graphs; `test_cuda.py` runs real ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.batches import assert_nothing_left, limits, ragged_prompts, text_alone
from support.goldens import trained_prompts, trained_target
from support.graphs import StandIn, install_stand_in
from support.heads import tiny_head, trained_head
from support.hybrids import draft_of, hybrid
from support.models import noisy_copy, tiny_model
from support.parity import IRREGULAR
from support.sampling import a_head, the_target
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_specdec import DynamicTree, NgramDraft, SpeculativeConfig, TokenTree
from hf_specdec.drafters import DraftModelDrafter
from hf_specdec.drafters.growth import LevelNodes
from hf_specdec.engine.captured import stored
from hf_specdec.engine.captured.step import InFlightStep


pytestmark = pytest.mark.filterwarnings("error:.*could not be captured")

DYNAMIC = DynamicTree(depth=4, top_k=3, num_nodes=9)
CHAIN = TokenTree.chain(2)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return install_stand_in(monkeypatch, with_kernel=True)


# -------------------------------------------------------------------------------------------------------------- greedy


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["draft", "head"])
@pytest.mark.parametrize("tree", [IRREGULAR, DYNAMIC, "auto", None], ids=["static", "dynamic", "auto", "off"])
@pytest.mark.some_cases(2)
def test_steps_are_whole(tree: Any, kind: str, runs: list[InFlightStep]) -> None:
    """Once the first have let both caches take their memory."""
    target = copy.deepcopy(the_target()).float()
    draft = copy.deepcopy(a_head(None)).float() if kind == "head" else noisy_copy(target, 0.05)
    options = {"disable_by_batch_size": 0} if tree is None else {}
    manager = target.init_continuous_batching(
        assistant_model=draft,
        speculative_config=SpeculativeConfig(tree=tree or CHAIN, **options),
        continuous_batching_config=limits(),
    )
    prompts = [[4, 5, 6], [7] * 9, [3, 4]]
    with manager:
        names = manager.add_requests(prompts, max_new_tokens=40) or list(range(3))
        outputs = [manager.get_result(timeout=60) for _ in names]
    texts = {tuple(output.prompt_ids): output.generated_tokens for output in outputs}
    assert [texts[tuple(prompt)] for prompt in prompts] == [
        text_alone(target, prompt, max_new_tokens=40) for prompt in prompts
    ]
    assert len(runs) >= manager.engine.num_steps - 4 > 4
    # Where "auto" has tried one, it may stay without a tree.
    assert tree is None or sum(step.kind.tree is not None for step in runs) > (0 if tree == "auto" else 2)
    assert_nothing_left(manager)


def test_custom_processors_and_drafters_run_on_the_host(runs: list[InFlightStep]) -> None:
    """A request with a processor of its own, a drafter of a user's: the host's part of steps."""

    class Mine(DraftModelDrafter):
        def run_level(self, nodes: LevelNodes) -> torch.Tensor:
            return super().run_level(nodes).flip(-1)

    target = tiny_model(dtype=torch.float32)
    draft, prompts = noisy_copy(target, 0.05), ragged_prompts((5, 6))
    halves = LogitsProcessorList([lambda ids, scores: scores / 2])
    for assistant, options in (
        (draft, {"encoder_repetition_penalty": 1.3}),
        (draft, {"logits_processor": halves}),
        (Mine(draft), {}),
        (NgramDraft(min_ngram=1), {}),
    ):
        before = [step for step in runs if step.draft.drafter is not None]
        call = {"assistant_model": assistant, "tree": CHAIN, "continuous_batching_config": limits()}
        outputs = target.generate_batch(prompts, max_new_tokens=20, **call, **options)
        for prompt, output in zip(prompts, outputs.values(), strict=True):
            assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=20, **options)
        assert [step for step in runs if step.draft.drafter is not None] == before


def test_a_users_criterion_ends_a_text_within_a_step(runs: list[InFlightStep]) -> None:
    """It sees every token in order, and what the device has accepted behind the end does not count."""
    target, (prompt, other) = tiny_model(dtype=torch.float32), ragged_prompts((5, 9))
    text = text_alone(target, prompt, max_new_tokens=30)
    seen: list[int] = []

    def stops(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(ids.shape[1])
        return torch.tensor([ids.shape[1] >= len(prompt) + 11])

    with target.init_continuous_batching(
        assistant_model=target, tree=TokenTree.chain(4), continuous_batching_config=limits()
    ) as manager:
        beside = manager.add_request(other, max_new_tokens=30)
        name = manager.add_request(prompt, max_new_tokens=30, stopping_criteria=StoppingCriteriaList([stops]))
        output = manager.get_result(name)
        assert manager.get_result(beside).generated_tokens == text_alone(target, other, max_new_tokens=30)
    assert output.generated_tokens == text[:11] and seen == list(range(len(prompt) + 1, len(prompt) + 12))
    taken = output.speculation.accepted_per_step[0]
    assert sum(taken) + len(taken) + 1 >= 11 and output.speculation.num_accepted_tokens == sum(taken) <= 10
    assert len(runs) > 2


# -------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("kind", ["greedy", "sampled", "states"])
@pytest.mark.some_cases(2)
def test_nan_ends_its_request_alone(kind: str, runs: list[InFlightStep]) -> None:
    """Others with the same blocks, or in the same place of the states, later, too."""
    if kind == "states":
        target = copy.deepcopy(hybrid("qwen3_5_text"))
    else:
        target = tiny_model(dtype=torch.float32, tie_word_embeddings=False)
    prompts = ragged_prompts((5, 9, 12))
    texts = [text_alone(target, prompt, max_new_tokens=40) for prompt in prompts]
    draft = draft_of(texts) if kind == "states" else copy.deepcopy(target)
    others = set(sum(prompts, [])).union(*map(set, texts[1:]))
    token = next(one for one in texts[0][8:30] if one not in others)
    target.get_input_embeddings().weight.data[token] = torch.nan
    options = {"do_sample": True, "temperature": 1e-3, "top_k": 0} if kind == "sampled" else {}
    with target.init_continuous_batching(
        assistant_model=draft, tree=CHAIN, continuous_batching_config=limits(60)
    ) as manager:
        for _ in range(2):
            names = [manager.add_request(prompts[0], max_new_tokens=40, **options)]
            names += [manager.add_request(prompt, max_new_tokens=40) for prompt in prompts[1:]]
            outputs = [manager.get_result(name, timeout=60) for name in names]
            assert "NaN" in outputs[0].error
            assert outputs[0].generated_tokens == texts[0][: texts[0].index(token) + 1]
            assert [output.generated_tokens for output in outputs[1:]] == texts[1:]
    assert_nothing_left(manager)
    assert len(runs) > 10


@pytest.mark.slow
def test_a_budget_smaller_than_the_trees_depth(stand_in: StandIn) -> None:
    """A head's own tree is cut to fewer nodes than it has levels."""
    target, prompts = tiny_model(dtype=torch.float32), ragged_prompts((5, 9, 3, 7))
    tree = DynamicTree(depth=8, top_k=10, num_nodes=59)
    config = SpeculativeConfig(tree=tree, max_step_nodes=24)
    manager = target.init_continuous_batching(
        assistant_model=tiny_head(target), speculative_config=config, continuous_batching_config=limits()
    )
    with manager:
        names = manager.add_requests(prompts, max_new_tokens=20)
        outputs = [manager.get_result(name, timeout=60) for name in names]
        assert manager.engine.device_steps.works and stand_in.replays > 5
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=20)


def test_a_failed_capture_falls_back_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: InFlightStep, *args: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(InFlightStep, "capture", fails)
    target, prompts = tiny_model(dtype=torch.float32), ragged_prompts((5, 9))
    with pytest.warns(UserWarning, match="A step of LlamaForCausalLM could not be captured .* when stream is captur"):
        outputs = target.generate_batch(
            prompts,
            assistant_model=noisy_copy(target, 0.05),
            tree=IRREGULAR,
            max_new_tokens=24,
            continuous_batching_config=limits(),
        )
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=24)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "states"])
def test_a_failed_capture_of_a_second_part_falls_back_to_the_host(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first has done does not count, and a head still has the features that it needs."""
    capture, captured = InFlightStep.capture, []

    def fails_for_chains(self: InFlightStep, *args: Any) -> None:
        if self.kind.tree == CHAIN:
            assert captured
            raise RuntimeError("out of memory")
        captured.append(self)
        capture(self, *args)

    monkeypatch.setattr(InFlightStep, "capture", fails_for_chains)
    target, prompts = trained_target(), trained_prompts()["prompts"][:2]
    draft = trained_head()
    if kind == "states":
        target, prompts = hybrid("qwen3_5_text"), ragged_prompts((5, 9))
        draft = draft_of([text_alone(target, prompt, max_new_tokens=60) for prompt in prompts])
    with (
        pytest.warns(UserWarning, match="could not be captured"),
        target.init_continuous_batching(
            assistant_model=draft, tree=IRREGULAR, continuous_batching_config=limits()
        ) as manager,
    ):
        names = [manager.add_request(prompts[0], max_new_tokens=60)]
        manager.get_result(manager.add_request(prompts[0], max_new_tokens=8))
        names.append(manager.add_request(prompts[1], max_new_tokens=30, tree=CHAIN))
        outputs = [manager.get_result(name, timeout=60) for name in names]
    for prompt, output, length in zip(prompts, outputs, (60, 30), strict=True):
        assert output.error is None
        assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=length)


# --------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.slow
def test_a_larger_graph_serves_until_a_size_has_come_often(
    runs: list[InFlightStep], stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "PATIENCE", 8)
    target, prompts = tiny_model(dtype=torch.float32), ragged_prompts((5, 6, 7, 8))
    manager = target.init_continuous_batching(
        assistant_model=noisy_copy(target, 0.05), tree=CHAIN, continuous_batching_config=limits()
    )
    with manager:
        manager.add_requests(prompts, max_new_tokens=40)
        for _ in prompts:
            manager.get_result(timeout=60)
        assert 4 in [step.rows.size.rows for step in runs]
        del runs[:]
        name = manager.add_request(prompts[0], max_new_tokens=80)
        assert manager.get_result(name, timeout=60).generated_tokens == text_alone(
            target, prompts[0], max_new_tokens=80
        )
    sizes = [step.rows.size.rows for step in runs]
    assert sizes[0] > 1 and sizes[-1] == 1 and sorted(sizes, reverse=True) == sizes


def test_moved_weights_are_captured_anew() -> None:
    """Nothing is captured into memory whose graphs are gone."""
    target, (prompt,) = tiny_model(dtype=torch.float32), ragged_prompts((9,))
    manager = target.init_continuous_batching(
        assistant_model=noisy_copy(target, 0.05), tree=CHAIN, continuous_batching_config=limits()
    )
    for seed in (5, 6):
        with manager:
            output = manager.get_result(manager.add_request(prompt, max_new_tokens=24), timeout=60)
            assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=24)
            assert manager.engine.device_steps.stored
        pool = manager.engine.device_steps._pool
        pool._handle = "used"
        for parameter, source in zip(
            target.parameters(), tiny_model(seed=seed, dtype=torch.float32).parameters(), strict=True
        ):
            parameter.data = source.data.clone()
    with manager:
        manager.get_result(manager.add_request(prompt, max_new_tokens=2), timeout=60)
    assert pool._handle != "used"


def test_the_least_recently_used_graph_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored.CapturedSteps, "MOST", 2)
    target, prompts = tiny_model(dtype=torch.float32), ragged_prompts((5, 6, 7, 8))
    with target.init_continuous_batching(
        assistant_model=noisy_copy(target, 0.05), continuous_batching_config=limits()
    ) as manager:
        for number, prompt in enumerate(prompts):
            manager.add_request(prompt, tree=TokenTree.chain(number + 1), max_new_tokens=20)
            manager.get_result(timeout=60)
        assert len(manager.engine.device_steps.stored) == 2
