"""The draft's temperature: what is chosen, and that drawing is worth it even with a bad draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.goldens import TINY_TARGET, trained_prompts, trained_target

import hf_specdec
from hf_specdec import DynamicTree, EagleHead, SpeculativeConfig, TokenTree
from hf_specdec.verification import DraftTemperature


def observed(p_scores: torch.Tensor, q_scores: torch.Tensor, steps: int = 6) -> float:
    """What is chosen for a target and a draft with these scores, seen a few times."""
    temperature = DraftTemperature()
    for _ in range(steps):
        temperature.observe(p_scores.double().softmax(dim=-1), temperature.apply(q_scores))
    return temperature.value


SCORES = 3 * torch.randn(4, 200, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("factor", [0.35, 0.5, 0.7, 1.0, 1.4])
def test_finds_the_temperature_that_makes_q_the_target(factor: float) -> None:
    assert observed(SCORES, SCORES * factor) == factor


def test_a_flat_draft_of_a_sure_target_is_sharpened() -> None:
    assert observed(20 * SCORES, 0.1 * SCORES) == min(DraftTemperature.GRID)


def test_tokens_outside_the_support() -> None:
    """Warpers leave -inf; the scale does not move them."""
    scores = SCORES.masked_fill(SCORES < 0, -torch.inf)
    assert observed(scores, 0.5 * scores) == 0.5


def test_looks_often_at_first_and_seldom_later() -> None:
    temperature = DraftTemperature()
    looks = [step for step in range(1, 65) if temperature.begin_step()]
    assert looks == [1, 3, 5, 7, 9, 11, 13, 15, 17, 33, 49]
    assert not any(DraftTemperature(0.5, adapts=False).begin_step() for _ in range(20))


# ------------------------------------------------------------------------------------------------- in `generate` calls


PROMPTS = torch.tensor([prompt[:16] for prompt in trained_prompts()["prompts"] if len(prompt) >= 16] * 2)
HEAD = EagleHead.from_pretrained(TINY_TARGET.parent / "speculators_eagle3")


def accepted(tree: Any, **config: Any) -> float:
    torch.manual_seed(0)
    trained_target().generate(
        PROMPTS,
        attention_mask=torch.ones_like(PROMPTS),
        do_sample=True,
        top_k=0,
        max_new_tokens=40,
        assistant_model=HEAD,
        speculative_config=SpeculativeConfig(tree=tree, **config),
    )
    return hf_specdec.last_metrics().mean_acceptance_length


@pytest.mark.parametrize(
    "tree",
    [TokenTree.chain(4), TokenTree.from_branching((3, 2, 1)), DynamicTree(depth=5, top_k=4, num_nodes=16)],
    ids=["chain", "tree", "budgets"],
)
def test_drawing_from_a_bad_draft_is_hardly_worse_than_its_best_tokens(tree: Any) -> None:
    """The head is much flatter than its target: drawn from as it is, it accepts far less."""
    best = accepted(tree, draft_sampling="greedy") - 1
    drawn = accepted(tree, draft_sampling="sample", verification="rejection") - 1
    as_it_is = accepted(tree, draft_sampling="sample", verification="rejection", draft_temperature=1.0) - 1
    assert drawn > 0.88 * best
    assert drawn > 1.1 * as_it_is


def test_a_seed_reproduces_a_run() -> None:
    tree = TokenTree.from_branching((3, 2, 1))
    texts = []
    for _ in range(2):
        torch.manual_seed(3)
        texts.append(
            trained_target().generate(PROMPTS, do_sample=True, assistant_model=HEAD, tree=tree, max_length=60)
        )
    assert texts[0].tolist() == texts[1].tolist()


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "low", True])
def test_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="`draft_temperature` must be None or a positive number"):
        SpeculativeConfig(draft_temperature=value)
