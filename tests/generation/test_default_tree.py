"""Calls for which no tree is asked: on a CPU "auto", whose choices change neither the text nor its distribution."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.exact import SIGNIFICANCE
from support.heads import tiny_head
from support.models import noisy_copy, prompts, tiny_model
from support.parity import plain_text
from support.sampling import a_draft, a_head, fit_samples

from hf_specdec import DynamicTree, NgramDraft, SpeculativeConfig, TokenTree
from hf_specdec.config import SpeculationPlan
from hf_specdec.trees import AutoTree
from hf_specdec.trees.step_times import StepTimes


TARGET = tiny_model("llama", attention_sharpness=3.0)


def drafts() -> dict[str, dict[str, Any]]:
    return {
        "n-gram": {"assistant_model": NgramDraft()},
        "draft model": {"assistant_model": noisy_copy(TARGET, 0.05), "speculative_config": SpeculativeConfig()},
        "head": {"assistant_model": tiny_head(TARGET)},
    }


@pytest.fixture
def shuffled_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measured time is another than the clock's, so that calls choose other trees."""
    numbers = itertools.count()
    add = StepTimes.add

    def shuffled(times: StepTimes, tree: Any, depth: int, num_nodes: int, propose: float | None, rest: float) -> None:
        factor = 1.0 + (next(numbers) * 7919 % 13) / (1.0 + num_nodes)
        add(times, tree, depth, num_nodes, None if propose is None else 1e-4 * factor, 1e-3 * factor)

    monkeypatch.setattr(StepTimes, "add", shuffled)


@pytest.mark.parametrize("kind", ["n-gram", "draft model", "head"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_seed_reproduces_a_call(kind: str, rows: int, shuffled_times: None) -> None:
    inputs, options, texts, trees = prompts(rows, 12, padding=True), drafts()[kind], [], []
    for _ in range(4):
        torch.manual_seed(5)
        output = TARGET.generate(
            **inputs, do_sample=True, max_new_tokens=40, return_dict_in_generate=True, pad_token_id=0, **options
        )
        texts.append(output.sequences.tolist())
        trees.append((output.speculation.num_drafts, output.speculation.num_draft_tokens))
    assert texts[0] == texts[1] == texts[2] == texts[3]
    # Not for want of other trees; n-grams find hardly anything in a random text.
    assert kind == "n-gram" or len(set(trees)) > 1


def test_draws_at_a_position_do_not_depend_on_the_draft() -> None:
    inputs, texts = prompts(1, 12), []
    for options in drafts().values():
        torch.manual_seed(5)
        texts.append(TARGET.generate(**inputs, do_sample=True, max_new_tokens=40, **options).tolist())
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("kind", ["draft model", "n-gram"])
def test_a_seed_reproduces_a_batch(kind: str, shuffled_times: None) -> None:
    requests, texts = [[5, 6, 7, 8, 5, 6, 7], [1, 2, 3], [9, 4, 9, 4, 9]], []
    for _ in range(2):
        torch.manual_seed(5)
        outputs = TARGET.generate_batch(requests, do_sample=True, max_new_tokens=30, **drafts()[kind])
        texts.append([output.generated_tokens for output in outputs.values()])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("draft", ["noisy", "head"])
@pytest.mark.parametrize("tree", [None, "auto"])
def test_the_distribution_is_the_target_s(draft: str, tree: str | None) -> None:
    assistant = a_head(5) if draft == "head" else a_draft(draft)
    assert fit_samples(SpeculativeConfig(tree=tree), assistant, "temperature").p_value > SIGNIFICANCE


@pytest.mark.parametrize("kind", ["n-gram", "draft model", "head"])
def test_greedy_texts_are_plain(kind: str, shuffled_times: None) -> None:
    inputs = prompts(3, 12, padding=True)
    expected = plain_text(TARGET, inputs, max_new_tokens=40)
    for _ in range(2):
        text = TARGET.generate(**inputs, do_sample=False, max_new_tokens=40, pad_token_id=0, **drafts()[kind])
        assert text.tolist() == expected.tolist()


def test_what_is_chosen_by_default() -> None:
    options = {"has_probabilities": True, "do_sample": True, "vocab_size": 100, "default_tree": TokenTree.chain(4)}
    on_gpu = SpeculationPlan.resolve(SpeculativeConfig(), **options)
    assert on_gpu.tree == TokenTree.chain(4) and on_gpu.uses_rejection and not on_gpu.draws_by_position
    plan = SpeculationPlan.resolve(SpeculativeConfig(), **options, on_cpu=True, prior=(0.7,))
    assert isinstance(plan.tree, AutoTree) and plan.tree.first == TokenTree.chain(4) and plan.tree.prior == (0.7,)
    assert plan.draws_children and plan.draws_by_position and not plan.uses_rejection
    asked = SpeculationPlan.resolve(SpeculativeConfig(tree="[(0,)]"), **options, on_cpu=True)
    assert asked.tree == TokenTree.chain(1) and asked.uses_rejection and not asked.draws_by_position
    tested = SpeculationPlan.resolve(SpeculativeConfig(verification="rejection"), **options, on_cpu=True)
    assert isinstance(tested.tree, AutoTree) and tested.uses_rejection


def test_a_head_s_prior_comes_from_its_training() -> None:
    from hf_specdec.drafters import as_drafter

    head = tiny_head(TARGET)
    assert as_drafter(head).prior is None
    head.config.recipe = {"held_out_top1": [0.8, 0.7]}
    assert as_drafter(head).prior == (0.8, 0.7)
    for damaged in ({"held_out_top1": 3}, {"held_out_top1": ["a"]}, {"held_out_top1": [2.0]}, {}):
        head.config.recipe = damaged
        assert as_drafter(head).prior is None


def test_n_grams_without_a_match_cost_no_drafts() -> None:
    """Of a text that never repeats itself nothing is proposed, and the drafter is not asked."""

    class Counting(NgramDraft):
        asked = 0

        def propose(self, sequences: Any) -> Any:
            Counting.asked += 1
            return super().propose(sequences)

    ids = torch.arange(20, 40)[None]
    TARGET.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=2,
        assistant_model=Counting(min_ngram=4),
        suppress_tokens=list(range(40)),
    )
    assert Counting.asked == 0


def test_an_invalid_default_tree_is_refused() -> None:
    head = tiny_head(TARGET)
    head.config.default_tree = DynamicTree(depth=1, top_k=1000, num_nodes=1000).to_dict()
    with pytest.raises(ValueError, match="rank"):
        TARGET.generate(**prompts(1, 5), max_new_tokens=5, assistant_model=head)
