"""Sampled requests: the enumerated distribution, whatever they share a step with, and seeds that reproduce."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support.batches import equal_options_once, limits, ragged_prompts
from support.exact import SIGNIFICANCE, Fit, combine, enumerate_tokens, fit
from support.models import noisy_copy, tiny_model
from support.sampling import (
    ALL_SETTINGS,
    LENGTH,
    LIMITS,
    TREE,
    a_draft,
    a_head,
    the_target,
)
from transformers import PreTrainedModel

from hf_specdec import NgramDraft, SpeculativeConfig, TokenTree
from hf_specdec.batching import SpeculativeBatchingManager
from hf_specdec.engine import sharing
from hf_specdec.trees import joining
from hf_specdec.verification import distribution


CHAIN = TokenTree.chain(2)
SAMPLES = 1_000
SETTINGS = ("plain", "temperature", "top-k", "repetition", "custom")
SAMPLED_PROMPTS = ([6], [5, 3, 7], [4, 6, 4, 5])


@cache
def expected_tokens(prompt: int, setting: str) -> torch.Tensor:
    """The enumerated distribution after a prompt, `[VOCAB] * LENGTH`."""
    ids = torch.tensor([SAMPLED_PROMPTS[prompt]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return enumerate_tokens(the_target(), inputs, LENGTH, **ALL_SETTINGS[setting])


def fit_requests(assistant: Any, config: SpeculativeConfig, seeded: bool, settings: tuple[str, ...] = SETTINGS) -> Fit:
    """
    How well the first tokens of requests fit their enumerated distribution: three prompts of different lengths, with
    all the settings and two trees, side by side in the steps of one manager.
    """
    target = the_target()
    manager = target.init_continuous_batching(
        assistant_model=assistant,
        speculative_config=config,
        continuous_batching_config=limits(3000, max_requests_per_batch=400, max_batch_tokens=1200),
    )
    torch.manual_seed(0)
    kinds = [(number, setting) for number in range(len(SAMPLED_PROMPTS)) for setting in settings]
    names: dict[tuple[int, str], list[str]] = {kind: [] for kind in kinds}
    with equal_options_once(manager):
        for sample in range(SAMPLES):
            number, setting = kind = kinds[sample % len(kinds)]
            names[kind].append(
                manager.add_request(
                    SAMPLED_PROMPTS[number],
                    max_new_tokens=LENGTH + 2 + sample % 7,  # so that they end one after the other
                    do_sample=True,
                    tree=(None, CHAIN)[sample % 2],
                    seed=sample if seeded else None,
                    **({"top_k": 0} | ALL_SETTINGS[setting]),
                )
            )
    with manager:
        texts = {
            kind: [manager.get_result(name).generated_tokens[:LENGTH] for name in of] for kind, of in names.items()
        }
    assert manager.state.speculation.num_accepted_tokens > SAMPLES / 10
    return combine(
        fit(torch.tensor(texts[number, setting]), expected_tokens(number, setting)) for number, setting in kinds
    )


CONFIGS = {
    "rejection": SpeculativeConfig(tree=TREE),
    "rejection, budgets": SpeculativeConfig(tree=LIMITS, draft_sampling="sample"),
    "target": SpeculativeConfig(tree=TREE, verification="target"),
    "load": SpeculativeConfig(tree=TREE, disable_by_batch_size=300),
}


@pytest.mark.parametrize(
    "config, seeded",
    [
        ("rejection", False),
        ("target", True),
        *(pytest.param(config, False, marks=pytest.mark.slow) for config in CONFIGS if config != "rejection"),
        *(pytest.param(config, True, marks=pytest.mark.slow) for config in CONFIGS if config != "target"),
    ],
)
def test_draft_models_are_exact(config: str, seeded: bool) -> None:
    found = fit_requests(a_draft("noisy"), CONFIGS[config], seeded)
    assert found.p_value > SIGNIFICANCE, found


@pytest.mark.slow
@pytest.mark.parametrize("assistant", ["head", "ngram"])
def test_others_are_exact(assistant: str) -> None:
    draft = a_head(None) if assistant == "head" else NgramDraft(min_ngram=1)
    found = fit_requests(draft, SpeculativeConfig(tree=TREE), seeded=False)
    assert found.p_value > SIGNIFICANCE, found


# ------------------------------------------------------------------------------------------------- wrong ways, caught


def test_one_number_for_all_places_of_a_text_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = distribution.uniform
    monkeypatch.setattr(distribution, "uniform", lambda seed, place: right(seed, 0))
    assert fit_requests(a_draft("noisy"), CONFIGS["target"], True, ("plain",)).p_value < 1e-9


@pytest.mark.slow
def test_another_rows_distribution_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children tested with the q of the first row that was drafted for beside them."""

    def first_rows(self: joining.JoinedDraft, row: int, node: int) -> torch.Tensor:
        return self.parts[row][0].scores_of(0, node)

    monkeypatch.setattr(joining.JoinedDraft, "scores_of", first_rows)
    assert fit_requests(a_draft("noisy"), CONFIGS["rejection"], False, ("plain",)).p_value < 1e-9


@pytest.mark.slow
def test_anothers_processors_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are taken to do the same although one's temperature is another."""
    monkeypatch.setattr(sharing, "sharing_key", lambda processors: (len(processors),))
    settings = ("temperature", "low temperature")
    assert fit_requests(a_draft("noisy"), CONFIGS["target"], False, settings).p_value < 1e-9


# --------------------------------------------------------------------------------------------------------------- seeds


def sampled(manager: SpeculativeBatchingManager, prompt: list[int], **options: Any) -> list[int]:
    options = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.4, "top_k": 0, "seed": 11} | options
    return manager.get_result(manager.add_request(prompt, **options)).generated_tokens


def manager_of(model: PreTrainedModel, draft: Any, tree: Any, **options: Any) -> SpeculativeBatchingManager:
    config = SpeculativeConfig(tree=tree, **options)
    return model.init_continuous_batching(
        assistant_model=draft, speculative_config=config, continuous_batching_config=limits(60)
    )


def test_a_seed_gives_the_same_text_in_any_company() -> None:
    """Alone, with others, with any tree or none, while load switches speculation on and off, and computed anew."""
    model = tiny_model()
    draft, prompts = noisy_copy(model, 0.05), ragged_prompts()
    with manager_of(model, draft, TREE) as manager:
        alone = sampled(manager, prompts[0])
        assert manager.state.speculation.num_accepted_tokens > 2
        assert sampled(manager, prompts[0]) == alone
        assert sampled(manager, prompts[0], speculate=False) == alone
        assert sampled(manager, prompts[0], tree=CHAIN) == alone
        assert sampled(manager, prompts[0], tree="auto") == alone
        assert sampled(manager, prompts[0], seed=12) != alone
        manager.add_requests(prompts * 2, max_new_tokens=40, do_sample=True, temperature=1.3)
        assert sampled(manager, prompts[0]) == alone
    assert manager.state.num_preemptions > 0
    with manager_of(model, draft, TREE, disable_by_batch_size=4) as manager:
        manager.add_requests(prompts, max_new_tokens=20)
        assert sampled(manager, prompts[0]) == alone
    with manager_of(model, NgramDraft(), TREE) as manager:
        assert sampled(manager, prompts[0]) == alone


def test_torchs_seed_reproduces_a_batch() -> None:
    model = tiny_model()
    draft, prompts = noisy_copy(model), ragged_prompts()
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        options = {"do_sample": True, "max_new_tokens": 20, "continuous_batching_config": limits()}
        outputs = model.generate_batch(prompts, assistant_model=draft, tree=TREE, **options)
        texts.append([output.generated_tokens for output in outputs.values()])
    assert texts[0] == texts[1] != texts[2]


def test_a_seed_refuses_rejection() -> None:
    model = tiny_model()
    manager = manager_of(model, noisy_copy(model), TREE, verification="rejection")
    with pytest.raises(ValueError, match="`seed=3` with `verification='rejection'`"):
        manager.add_request([4, 5], do_sample=True, seed=3)
    manager.add_request([4, 5], do_sample=True)


def test_numbers_of_places_are_uniform_and_unrelated() -> None:
    numbers = torch.tensor([[distribution.uniform(seed, place) for place in range(100)] for seed in range(200)])
    assert 0 < numbers.min() and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01 and abs(numbers.var() - 1 / 12) < 0.003
    correlations = torch.corrcoef(numbers) - torch.eye(200), torch.corrcoef(numbers.T) - torch.eye(100)
    assert all(correlation.abs().mean() < 0.09 for correlation in correlations)
    scores = torch.tensor([[0.0, -torch.inf, 1.0]]).expand(3, -1)
    ends = torch.tensor([1e-17, 0.2689, 1 - 1e-16], dtype=torch.float64)
    assert distribution.draw_with(scores, ends).tolist() == [0, 0, 2]
