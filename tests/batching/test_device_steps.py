"""Whole steps of requests in flight, with a stand-in for CUDA's graphs; `test_cuda.py` runs real ones."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from support.batches import assert_nothing_left, limits, ragged_prompts, text_alone
from support.exact import SIGNIFICANCE, Fit, combine, enumerate_tokens, fit
from support.goldens import trained_prompts, trained_target
from support.graphs import StandIn, install_stand_in
from support.heads import trained_head
from support.models import noisy_copy, tiny_model
from support.parity import IRREGULAR
from support.sampling import ALL_SETTINGS, LENGTH, LIMITS, TREE, a_draft, a_head, the_target
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_specdec import DynamicTree, NgramDraft, SpeculativeConfig, TokenTree
from hf_specdec.batching import distribution
from hf_specdec.batching.device_steps import rows, runner
from hf_specdec.batching.device_steps.step import InFlightStep
from hf_specdec.drafters import DraftModelDrafter, growth
from hf_specdec.drafters.growth import LevelNodes
from hf_specdec.trees.auto import AutoTree, Plan
from hf_specdec.trees.auto_menu import MenuChoice, TreeMenu


pytestmark = pytest.mark.filterwarnings("error:.*could not be captured")

DYNAMIC = DynamicTree(depth=4, top_k=3, num_nodes=9)
CHAIN = TokenTree.chain(2)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return install_stand_in(monkeypatch, with_kernel=True)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[InFlightStep]:
    """The whole steps that have run, one after the other."""
    found: list[InFlightStep] = []
    launch = InFlightStep.launch

    def counted(self: InFlightStep) -> Any:
        found.append(self)
        return launch(self)

    monkeypatch.setattr(InFlightStep, "launch", counted)
    return found


def config_of(tree: Any, graphs: bool | str = "auto", **options: Any) -> SpeculativeConfig:
    return SpeculativeConfig(tree=tree, cuda_graphs=graphs, **options)


# -------------------------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("kind", ["draft", "head"])
@pytest.mark.parametrize("tree", [IRREGULAR, DYNAMIC, "auto", None], ids=["static", "dynamic", "auto", "off"])
def test_steps_are_whole(tree: Any, kind: str, runs: list[InFlightStep]) -> None:
    """Once the first have let both caches take their memory."""
    target = copy.deepcopy(the_target()).float()
    draft = (a_head(None) if kind == "head" else noisy_copy(target, 0.05)).float()
    options = {"disable_by_batch_size": 0} if tree is None else {}
    manager = target.init_continuous_batching(
        assistant_model=draft,
        speculative_config=config_of(tree or CHAIN, **options),
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
    assert tree is None or sum(step.part.drafter is not None for step in runs) > 2
    assert_nothing_left(manager)


def test_those_that_cannot_be(runs: list[InFlightStep]) -> None:
    """A request with a processor of its own, a drafter of a user's: the host's part of steps."""

    class Mine(DraftModelDrafter):
        def run_level(self, nodes: LevelNodes) -> torch.Tensor:
            return super().run_level(nodes).flip(-1)

    target = tiny_model(dtype=torch.float32)
    draft, prompts = noisy_copy(target, 0.05), ragged_prompts((5, 6))
    halves = LogitsProcessorList([lambda ids, scores: scores / 2])
    for assistant, options in (
        (draft, {"repetition_penalty": 1.3}),
        (draft, {"logits_processor": halves}),
        (Mine(draft), {}),
        (NgramDraft(min_ngram=1), {}),
    ):
        before = [step for step in runs if step.part.drafter is not None]
        call = {"assistant_model": assistant, "tree": CHAIN, "continuous_batching_config": limits()}
        outputs = target.generate_batch(prompts, max_new_tokens=20, **call, **options)
        for prompt, output in zip(prompts, outputs.values(), strict=True):
            assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=20, **options)
        assert [step for step in runs if step.part.drafter is not None] == before


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


# ------------------------------------------------------------------------------------------------------------- sampled

PROMPTS = ([6], [5, 3, 7], [4, 6, 4, 5])
SAMPLES = 1_500
METHODS = {
    "rejection": {"tree": TREE},
    "target, drawn": {"tree": TREE, "draft_sampling": "sample", "verification": "target"},
    "target": {"tree": TREE, "verification": "target"},
    "target, dynamic": {"tree": DYNAMIC, "draft_sampling": "greedy"},
    "rejection, budgets": {"tree": LIMITS, "draft_sampling": "sample"},
    "off": {"tree": TREE, "disable_by_batch_size": 0},
}


def fit_requests(assistant: str, method: str, seeded: bool, settings: tuple[str, ...]) -> Fit:
    """How well the first tokens of requests fit the enumeration: prompts and settings side by side, some greedy."""
    target = copy.deepcopy(the_target()).float()
    draft = copy.deepcopy(a_head(5) if assistant == "head" else a_draft(assistant)).float()
    kinds = [(number, setting) for number in range(len(PROMPTS)) for setting in settings]
    names: dict[Any, list[str]] = {kind: [] for kind in kinds}
    manager = target.init_continuous_batching(
        assistant_model=draft,
        speculative_config=config_of(**METHODS[method]),
        continuous_batching_config=limits(3000, max_requests_per_batch=200, max_batch_tokens=400),
    )
    torch.manual_seed(0)
    for sample in range(SAMPLES):
        number, setting = kind = kinds[sample % len(kinds)]
        names[kind].append(
            manager.add_request(
                PROMPTS[number],
                max_new_tokens=LENGTH + 2 + sample % 7,  # so that they end one after the other
                do_sample=True,
                seed=sample if seeded else None,
                **({"top_k": 0} | ALL_SETTINGS[setting]),
            )
        )
        if sample % 50 == 0:
            manager.add_request([3, 4], do_sample=False, max_new_tokens=4, speculate=sample % 100 == 0)
    with manager:
        texts = {
            kind: [manager.get_result(name).generated_tokens[:LENGTH] for name in of] for kind, of in names.items()
        }
    return combine(fit(torch.tensor(texts[number, setting]), expected(number, setting)) for number, setting in kinds)


def expected(number: int, setting: str) -> torch.Tensor:
    ids = torch.tensor([PROMPTS[number]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return enumerate_tokens(the_target(), inputs, LENGTH, **ALL_SETTINGS[setting])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("assistant", ["noisy", "head"])
def test_samples_are_exact(assistant: str, method: str, runs: list[InFlightStep]) -> None:
    found = fit_requests(assistant, method, False, ("plain", "temperature", "top-k", "top-p"))
    assert found.p_value > SIGNIFICANCE, found
    assert len(runs) > 20


@pytest.mark.parametrize("method", ["rejection", "off"])
def test_samples_with_seeds_are_exact(method: str, runs: list[InFlightStep]) -> None:
    found = fit_requests("noisy", method, True, ("plain", "temperature"))
    assert found.p_value > SIGNIFICANCE, found
    assert len(runs) > 20


@pytest.mark.parametrize("wrong", ["numbers", "warpers", "children"])
def test_wrong_samplers_are_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number for all places; the first row's temperature for all; children all tested with the root's q."""
    right = distribution.uniform
    if wrong == "numbers":
        monkeypatch.setattr(rows, "uniform", lambda seed, place: right(seed, 0))
        assert fit_requests("noisy", "target", True, ("plain",)).p_value < 1e-6
    elif wrong == "warpers":
        load = rows.InFlightRows.load

        def alike(self: rows.InFlightRows, requests: Any, *values: Any) -> None:
            load(self, requests, *values)
            self.temperature.copy_(self.temperature[:1].expand_as(self.temperature))

        monkeypatch.setattr(rows.InFlightRows, "load", alike)
        assert fit_requests("noisy", "target", False, ("plain", "low temperature")).p_value < 1e-6
    else:
        index = growth._score_index
        monkeypatch.setattr(growth, "_score_index", lambda *tree: torch.zeros_like(index(*tree)))
        assert fit_requests("noisy", "rejection", False, ("plain",)).p_value < 1e-6


def test_a_seed_gives_the_text_that_the_host_would() -> None:
    target = tiny_model(dtype=torch.float32)
    draft, prompts, texts = noisy_copy(target, 0.05), ragged_prompts(), []
    for graphs in (False, "auto"):
        with target.init_continuous_batching(
            assistant_model=draft,
            speculative_config=config_of(IRREGULAR, graphs),
            continuous_batching_config=limits(60),
        ) as manager:
            names = [
                manager.add_request(prompt, max_new_tokens=25, do_sample=True, temperature=0.5, top_k=40, seed=number)
                for number, prompt in enumerate(prompts)
            ]
            texts.append([manager.get_result(name).generated_tokens for name in names])
    assert texts[0] == texts[1]


# -------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("do_sample", [False, True])
def test_nan_ends_its_request_alone(do_sample: bool, runs: list[InFlightStep]) -> None:
    """Others with the same blocks later, too."""
    target = tiny_model(dtype=torch.float32, tie_word_embeddings=False)
    draft, prompts = copy.deepcopy(target), ragged_prompts((5, 9, 12))
    texts = [text_alone(target, prompt, max_new_tokens=40) for prompt in prompts]
    others = set(sum(prompts, [])).union(*map(set, texts[1:]))
    token = next(one for one in texts[0][8:30] if one not in others)
    target.get_input_embeddings().weight.data[token] = torch.nan
    options = {"do_sample": True, "temperature": 1e-3, "top_k": 0} if do_sample else {}
    with target.init_continuous_batching(
        assistant_model=draft, tree=CHAIN, continuous_batching_config=limits(60)
    ) as manager:
        for _ in range(2):
            names = [manager.add_request(prompts[0], max_new_tokens=40, **options)]
            names += [manager.add_request(prompt, max_new_tokens=40) for prompt in prompts[1:]]
            outputs = [manager.get_result(name, timeout=60) for name in names]
            assert "NaN" in outputs[0].error
            text = outputs[0].generated_tokens  # a draft may have named the token before
            assert text == texts[0][: len(text)] and len(text) <= texts[0].index(token) + 1
            assert [output.generated_tokens for output in outputs[1:]] == texts[1:]
    assert_nothing_left(manager)
    assert len(runs) > 10


def test_one_that_fails_to_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_second_part_of_a_step_fails_to_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with (
        pytest.warns(UserWarning, match="could not be captured"),
        target.init_continuous_batching(
            assistant_model=trained_head(), tree=IRREGULAR, continuous_batching_config=limits()
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


def test_a_larger_graph_serves_until_a_size_has_come_often(
    runs: list[InFlightStep], stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PATIENCE", 8)
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


@pytest.mark.parametrize("kind", ["draft", "head"])
@pytest.mark.parametrize("tree", [TREE, "auto"], ids=["static", "auto"])
def test_warming_up(tree: Any, kind: str) -> None:
    """All sizes are there before the first request, which finds nothing else changed."""
    target = copy.deepcopy(the_target()).float()
    draft = (a_head(None) if kind == "head" else noisy_copy(target, 0.05)).float()
    manager = target.init_continuous_batching(
        assistant_model=draft, tree=tree, continuous_batching_config=limits(400, max_requests_per_batch=5)
    )
    manager.warmup()
    with manager:
        name = manager.add_request([4, 5, 6], max_new_tokens=12)
        output = manager.get_result(name, timeout=120)
        assert output.generated_tokens == text_alone(target, [4, 5, 6], max_new_tokens=12)
        state, steps = manager.state, set(manager.engine.device_steps._steps)
        assert state.num_generation_tokens == 12 and state.speculation.num_drafts == output.speculation.num_drafts
        for count in (5, 3, 1):
            manager.add_requests([[4, 5, 6]] * count, max_new_tokens=12, **({"do_sample": True} if count == 3 else {}))
            for _ in range(count):
                assert manager.get_result(timeout=60).error is None
        assert {size.rows for _, size in steps} == {1, 2, 4, 6}
        assert set(manager.engine.device_steps._steps) == steps
        with pytest.raises(RuntimeError, match="`warmup`: the manager is running already"):
            manager.warmup()
    assert_nothing_left(manager)


def test_warming_up_with_stop_strings() -> None:
    """They need the tokenizer that requests bring along."""
    target = tiny_model(dtype=torch.float32)
    config = copy.deepcopy(target.generation_config)
    config.stop_strings = ["stop"]
    manager = target.init_continuous_batching(
        config,
        assistant_model=noisy_copy(target),
        tree=CHAIN,
        continuous_batching_config=limits(400, max_requests_per_batch=2),
    )
    assert len(manager._requests_of_nobody(2, do_sample=True)) == 2


def test_warming_up_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, and a manager that serves all the same."""

    def fails(*args: Any) -> Any:
        raise RuntimeError("nothing works")

    target = tiny_model(dtype=torch.float32)
    manager = target.init_continuous_batching(
        assistant_model=noisy_copy(target), tree=CHAIN, continuous_batching_config=limits(400)
    )
    monkeypatch.setattr(manager, "_requests_of_nobody", fails)
    manager.warmup()
    with pytest.warns(UserWarning, match="could not warm up, and starts cold: RuntimeError: nothing works"), manager:
        output = manager.get_result(manager.add_request([4, 5], max_new_tokens=9), timeout=60)
    assert output.generated_tokens == text_alone(target, [4, 5], max_new_tokens=9)
    assert_nothing_left(manager)


def test_warming_up_where_there_are_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_model()  # in float64
    manager = target.init_continuous_batching(assistant_model=NgramDraft(), continuous_batching_config=limits())
    manager.warmup()
    with manager:
        assert manager.get_result(manager.add_request([4, 5], max_new_tokens=3)).error is None
        assert manager.engine.num_steps < 5


@pytest.mark.parametrize("others", [CHAIN, DYNAMIC], ids=["static", "dynamic"])
def test_auto_beside_a_request_with_a_tree_of_its_own(others: Any) -> None:
    """It plans, and rows that were not drafted for count as no refusals."""
    target = tiny_model(dtype=torch.float32)
    draft = copy.deepcopy(target)
    with target.init_continuous_batching(
        assistant_model=draft, tree="auto", continuous_batching_config=limits()
    ) as manager:
        names = [manager.add_request([4, 5, 6], max_new_tokens=200, **own) for own in ({}, {"tree": others})]
        for name in names:
            assert manager.get_result(name, timeout=120).error is None
        choices = manager.engine.choices
        assert all(table.chances()[0][0] > 0.9 for table in choices._acceptance.values())
        assert all(not choice._to_try for (_, size), choice in choices._auto.items() if size == 2)


def test_weights_that_move_between_two_sessions() -> None:
    """Nothing is captured into memory whose graphs are gone."""
    target, (prompt,) = tiny_model(dtype=torch.float32), ragged_prompts((9,))
    manager = target.init_continuous_batching(
        assistant_model=noisy_copy(target, 0.05), tree=CHAIN, continuous_batching_config=limits()
    )
    for seed in (5, 6):
        with manager:
            output = manager.get_result(manager.add_request(prompt, max_new_tokens=24), timeout=60)
            assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=24)
            assert manager.engine.device_steps._steps
        pool = manager.engine.device_steps._pool
        pool._handle = "used"
        for parameter, source in zip(
            target.parameters(), tiny_model(seed=seed, dtype=torch.float32).parameters(), strict=True
        ):
            parameter.data = source.data.clone()
    with manager:
        assert pool._handle is None


def test_the_least_recently_used_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MOST_STEPS", 2)
    target, prompts = tiny_model(dtype=torch.float32), ragged_prompts((5, 6, 7, 8))
    with target.init_continuous_batching(
        assistant_model=noisy_copy(target, 0.05), continuous_batching_config=limits()
    ) as manager:
        for number, prompt in enumerate(prompts):
            manager.add_request(prompt, tree=TokenTree.chain(number + 1), max_new_tokens=20)
            manager.get_result(timeout=60)
        assert len(manager.engine.device_steps._steps) == 2


def test_auto_takes_few_trees(runs: list[InFlightStep]) -> None:
    """Each has a graph of its own."""
    target = tiny_model(dtype=torch.float32)
    with target.init_continuous_batching(
        assistant_model=noisy_copy(target, 0.05), tree="auto", continuous_batching_config=limits()
    ) as manager:
        for _ in range(6):
            manager.add_request([4, 5, 6], max_new_tokens=100)
            manager.get_result(timeout=60)
        kinds = {kind.tree for kind, _ in manager.engine.device_steps._steps}
    assert 2 < len(kinds) <= len(TreeMenu(AutoTree()).trees) + 2 and len(runs) > 60


def test_auto_captures_nothing_once_it_is_warm(
    runs: list[InFlightStep], stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it changes to, however far a head is behind, and however long prompts are."""
    target = trained_target()
    manager = target.init_continuous_batching(
        assistant_model=trained_head(),
        tree="auto",
        continuous_batching_config=limits(400, max_requests_per_batch=4, max_batch_tokens=256),
    )
    manager.warmup()
    with manager:
        manager.get_result(manager.add_request([4, 5, 6], max_new_tokens=2), timeout=300)
        captures, choice = stand_in.captures, random.Random(0)
        menu = [None, *TreeMenu(AutoTree()).trees]
        monkeypatch.setattr(MenuChoice, "begin_step", lambda self, length: choice.choice(menu))
        prompts = [(prompt * 9)[: 5 + 30 * number] for number, prompt in enumerate(trained_prompts()["prompts"][:6])]
        for prompt in prompts:
            manager.add_request(prompt, max_new_tokens=60)
        for _ in prompts:
            output = manager.get_result(timeout=120)
            assert output.generated_tokens == text_alone(target, output.prompt_ids, max_new_tokens=60)
    assert stand_in.captures == captures
    assert len({step.kind.tree for step in runs[-40:]}) > 4


def test_probes_of_auto_carry_their_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head is further behind by then than the probe is deep: it reads first, and the probe comes one step later."""
    monkeypatch.setattr(MenuChoice, "plan", lambda self: Plan(None, 1.0))
    monkeypatch.setattr(MenuChoice, "worth", lambda self, tree: float(tree is None))
    monkeypatch.setattr(MenuChoice, "_cost_of_probe", lambda self: 0.0)
    monkeypatch.setattr(MenuChoice, "_looked_at", lambda self: None)
    carried, run = [], runner.DeviceSteps.run

    def noted(self: runner.DeviceSteps, requests: Any, groups: Any) -> Any:
        outcome = run(self, requests, groups)
        carried.append("-" if not groups else "tree" if outcome is None or outcome.drafted else "reads")
        return outcome

    monkeypatch.setattr(runner.DeviceSteps, "run", noted)
    target, head = trained_target(), trained_head()
    manager = target.init_continuous_batching(
        assistant_model=head, tree="auto", continuous_batching_config=limits(400, max_requests_per_batch=2)
    )
    prompt = trained_prompts()["prompts"][0]
    with manager:
        output = manager.get_result(manager.add_request(prompt, max_new_tokens=150), timeout=100)
    assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=150)
    assert carried.count("reads") > 2
    assert all(carried[step + 1] == "tree" for step, what in enumerate(carried[:-1]) if what == "reads")


def test_auto_within_a_budget_and_beside_other_trees(runs: list[InFlightStep]) -> None:
    """It chooses among the trees that are within each row's share; those of a schedule are captured as they are."""
    target = tiny_model(dtype=torch.float32)
    draft = noisy_copy(target, 0.02)
    manager = target.init_continuous_batching(
        assistant_model=draft,
        speculative_config=config_of([(0, "auto"), (40, DYNAMIC)], max_step_nodes=12),
        continuous_batching_config=limits(400, max_requests_per_batch=2),
    )
    manager.warmup()
    with warnings.catch_warnings(), manager:
        warnings.simplefilter("error")
        manager.get_result(manager.add_request([4, 5, 6], max_new_tokens=2), timeout=300)
        first = len(runs)
        for prompt in ([4, 5, 6], [7, 8]):
            manager.add_request(prompt, max_new_tokens=60)
        for _ in range(2):
            output = manager.get_result(timeout=120)
            assert output.generated_tokens == text_alone(target, output.prompt_ids, max_new_tokens=60)
    trees = [step.kind.tree for step in runs[first:] if step.kind.tree is not None]
    menu, sizes = TreeMenu(AutoTree()).trees, {tree.num_nodes for tree in trees}
    assert max(sizes) <= 12 and any(isinstance(tree, DynamicTree) for tree in trees)
    assert all(tree in menu for tree in trees if isinstance(tree, TokenTree)) and len(sizes) > 1


def test_auto_learns_of_sampled_steps_apart(runs: list[InFlightStep]) -> None:
    """They accept less: what greedy ones accept is not believed of them, nor the other way round."""
    target = tiny_model(dtype=torch.float32)
    with target.init_continuous_batching(
        assistant_model=noisy_copy(target, 0.05), tree="auto", continuous_batching_config=limits()
    ) as manager:
        acceptance, found = manager.engine.choices._acceptance, []
        for options in ({"do_sample": False}, {"do_sample": True, "temperature": 3.0}):
            manager.get_result(manager.add_request([4, 5, 6], max_new_tokens=100, **options), timeout=120)
            found.append({draws: table.chances() for (_, draws), table in acceptance.items()})
    assert found[0].keys() == {False} and found[1].keys() == {False, True}
    assert found[0][False] == found[1][False] != found[1][True]
