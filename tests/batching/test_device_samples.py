"""Samples of whole steps of requests in flight: exact, with a stand-in for CUDA's graphs."""

from __future__ import annotations

import copy
import itertools
from functools import cache
from typing import Any

import pytest
import torch
from support.batches import equal_options_once, limits, ragged_prompts
from support.exact import SIGNIFICANCE, Fit, combine, enumerate_tokens, fit
from support.graphs import StandIn, install_stand_in
from support.models import noisy_copy, tiny_model
from support.parity import IRREGULAR
from support.sampling import ALL_SETTINGS, LENGTH, LIMITS, PROCESSED_SETTINGS, TREE, a_draft, a_head, the_target

from hf_specdec import DynamicTree, SpeculativeConfig
from hf_specdec.drafters import growth
from hf_specdec.engine.captured import staged_rows
from hf_specdec.engine.captured.rows import InFlightRows
from hf_specdec.engine.captured.step import InFlightStep
from hf_specdec.engine.engine import Engine
from hf_specdec.verification import choosing


pytestmark = pytest.mark.filterwarnings("error:.*could not be captured")

DYNAMIC = DynamicTree(depth=4, top_k=3, num_nodes=9)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """With block tables as short as the texts: the kernel's plain version attends to all that they have room for."""
    init = Engine.__init__
    monkeypatch.setattr(Engine, "__init__", lambda *args, **options: init(*args, **options, fewest_blocks=8))
    return install_stand_in(monkeypatch, with_kernel=True)


PROMPTS = ([6], [5, 3, 7], [4, 6, 4, 5])
SAMPLES = 1_000
METHODS = {
    "rejection": {"tree": TREE},
    "target, drawn": {"tree": TREE, "draft_sampling": "sample", "verification": "target"},
    "target": {"tree": TREE, "verification": "target"},
    "target, dynamic": {"tree": DYNAMIC, "draft_sampling": "greedy"},
    "rejection, budgets": {"tree": LIMITS, "draft_sampling": "sample"},
    "off": {"tree": TREE, "disable_by_batch_size": 0},
}


def fit_requests(assistant: str, method: str, seeded: bool, settings: tuple[str, ...], samples: int = SAMPLES) -> Fit:
    """How well the first tokens of requests fit the enumeration: prompts and settings side by side, some greedy."""
    target = copy.deepcopy(the_target()).float()
    draft = copy.deepcopy(a_head(5) if assistant == "head" else a_draft(assistant)).float()
    kinds = [(number, setting) for number in range(len(PROMPTS)) for setting in settings]
    names: dict[Any, list[str]] = {kind: [] for kind in kinds}
    manager = target.init_continuous_batching(
        assistant_model=draft,
        speculative_config=SpeculativeConfig(**METHODS[method]),
        continuous_batching_config=limits(3000, max_requests_per_batch=200, max_batch_tokens=1200),
    )
    torch.manual_seed(0)
    with equal_options_once(manager):
        for sample in range(samples):
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


@cache
def expected(number: int, setting: str) -> torch.Tensor:
    ids = torch.tensor([PROMPTS[number]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return enumerate_tokens(the_target(), inputs, LENGTH, **ALL_SETTINGS[setting])


FEW = ("temperature", "top-p", "penalties")
MANY = ("plain", "temperature", "top-k", "top-p", *PROCESSED_SETTINGS)


@pytest.mark.parametrize(
    "assistant, method, settings, samples",
    [
        pytest.param("noisy", "rejection", FEW, 600, id="few settings"),
        *(
            pytest.param(*case, MANY, SAMPLES, marks=pytest.mark.slow, id="-".join(case))
            for case in itertools.product(("noisy", "head"), METHODS)
        ),
    ],
)
def test_samples_are_exact(
    assistant: str, method: str, settings: tuple[str, ...], samples: int, runs: list[InFlightStep]
) -> None:
    found = fit_requests(assistant, method, False, settings, samples)
    assert found.p_value > SIGNIFICANCE, found
    assert len(runs) > 20


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rejection", "off"])
def test_samples_with_seeds_are_exact(method: str, runs: list[InFlightStep]) -> None:
    found = fit_requests("noisy", method, True, ("plain", "temperature"))
    assert found.p_value > SIGNIFICANCE, found
    assert len(runs) > 20


@pytest.mark.parametrize("wrong", ["numbers", "warpers", "children"])
@pytest.mark.some_cases(1)
def test_wrong_samplers_are_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number for all places; the first row's temperature for all; children all tested with the root's q."""
    right = choosing.uniform
    if wrong == "numbers":
        monkeypatch.setattr(staged_rows, "uniform", lambda seed, place: right(seed, 0))
        assert fit_requests("noisy", "target", True, ("plain",), samples=500).p_value < 1e-6
    elif wrong == "warpers":
        load = InFlightRows.load

        def alike(self: InFlightRows, requests: Any, *values: Any) -> None:
            load(self, requests, *values)
            self.temperature.copy_(self.temperature[:1].expand_as(self.temperature))

        monkeypatch.setattr(InFlightRows, "load", alike)
        assert fit_requests("noisy", "target", False, ("plain", "low temperature"), samples=500).p_value < 1e-6
    else:
        index = growth.static._score_index
        monkeypatch.setattr(growth.static, "_score_index", lambda *tree: torch.zeros_like(index(*tree)))
        assert fit_requests("noisy", "rejection", False, ("plain",)).p_value < 1e-6


def test_a_seed_gives_the_text_that_the_host_would() -> None:
    target = tiny_model(dtype=torch.float32)
    draft, prompts, texts = noisy_copy(target, 0.05), ragged_prompts()[:6], []
    for graphs in (False, "auto"):
        with target.init_continuous_batching(
            assistant_model=draft,
            speculative_config=SpeculativeConfig(tree=IRREGULAR, cuda_graphs=graphs),
            continuous_batching_config=limits(60),
        ) as manager:
            names = [
                manager.add_request(prompt, max_new_tokens=20, do_sample=True, temperature=0.5, top_k=40, seed=number)
                for number, prompt in enumerate(prompts)
            ]
            texts.append([manager.get_result(name).generated_tokens for name in names])
    assert texts[0] == texts[1]
