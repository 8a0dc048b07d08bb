"""Block heads that estimate their acceptance: what they tell, and calls that choose trees by it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.batches import ragged_prompts, text_alone
from support.exact import SIGNIFICANCE
from support.heads import CONFIDENCE_KINDS, RecordingBlockDrafter, block_from_scratch, tiny_block_head
from support.models import prompts, tiny_model
from support.parity import plain_text
from support.sampling import fit_samples, the_target
from transformers import PreTrainedModel

from hf_specdec import BlockHead, DynamicTree, SpeculativeConfig, TokenTree
from hf_specdec.engine.host_step import RequestStep
from hf_specdec.metrics import metrics_of_last_call
from hf_specdec.trees.auto_choice import AutoChoice


TREES = (
    TokenTree.chain(1),
    None,
    TokenTree.parse("[(0,), (1,), (0,0), (0,1)]"),
    TokenTree.chain(3),
    TokenTree.chain(2),
)


def a_target() -> PreTrainedModel:
    return tiny_model("llama", seed=1, dtype=torch.float32)


@pytest.fixture
def confidences(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The draft's confidence in every step; "auto" then takes the next of `TREES`, whatever that was."""
    calls, trees = [], itertools.cycle(TREES)

    def refine(choice: AutoChoice, confidences: Any, most_nodes: int | None = None) -> TokenTree | DynamicTree | None:
        calls.append(confidences)
        choice._confidences, tree = confidences, next(trees)
        if choice.tree is not None and (tree is None or most_nodes is None or tree.num_nodes <= most_nodes):
            choice.tree = tree
        return choice.tree

    monkeypatch.setattr(AutoChoice, "_chosen", lambda choice: TokenTree.chain(2))
    monkeypatch.setattr(AutoChoice, "refine", refine)
    return calls


def chances_from_scratch(head: BlockHead, target: PreTrainedModel, ids: torch.Tensor) -> list[float]:
    """The estimates along the greedy chain after a text."""
    states, base = block_from_scratch(head, target, ids)
    found, carried, parent = [], None, ids[None, -1:]
    for level in range(base.shape[1]):
        here = slice(level, level + 1)
        found.append(head.confidence_logits(states[:, here], parent).sigmoid().item())
        logits, carried = head.conditional_logits(base[:, here], states[:, here], parent, carried)
        parent = logits.argmax(dim=-1)
        parent = parent if head.target_ids is None else head.target_ids[parent]
    return found


@pytest.mark.parametrize("kind", CONFIDENCE_KINDS)
@torch.no_grad()
def test_confidences(kind: str, confidences: list[Any]) -> None:
    target = a_target()
    drafter = RecordingBlockDrafter(tiny_block_head(target, **CONFIDENCE_KINDS[kind]))
    lengths = drafter.lengths  # calls draft with shallow copies
    ids = target.generate(
        **prompts(1, 9), do_sample=False, max_new_tokens=16, assistant_model=drafter, tree="auto", pad_token_id=0
    )
    assert len(confidences) > 5
    for length, its in zip(lengths, confidences, strict=True):
        expected = chances_from_scratch(drafter.head, target, ids[0, : length[0]])
        assert 0 < len(its[0]) <= len(expected)
        assert its[0] == pytest.approx(expected[: len(its[0])], abs=1e-4)


@pytest.mark.parametrize("kind", CONFIDENCE_KINDS)
def test_greedy_texts_are_plain(kind: str, confidences: list[Any]) -> None:
    target = a_target()
    head, inputs = tiny_block_head(target, **CONFIDENCE_KINDS[kind]), prompts(3, 9, padding=True)
    expected = plain_text(target, inputs, max_new_tokens=24)
    text = target.generate(
        **inputs, do_sample=False, max_new_tokens=24, pad_token_id=0, assistant_model=head, tree="auto"
    )
    assert text.tolist() == expected.tolist()
    assert len(confidences) > 4 and metrics_of_last_call().num_drafts > 0


@pytest.mark.parametrize("kind", ["markov"])
def test_requests(kind: str, confidences: list[Any]) -> None:
    target, batch = a_target(), ragged_prompts((5, 9, 2))
    head = tiny_block_head(target, **CONFIDENCE_KINDS[kind])
    outputs = target.generate_batch(batch, max_new_tokens=20, do_sample=False, assistant_model=head, tree="auto")
    assert len(confidences) > 4
    for prompt, output in zip(batch, outputs.values(), strict=True):
        assert output.error is None and output.generated_tokens == text_alone(target, prompt, max_new_tokens=20)


@pytest.mark.slow
def test_a_chosen_tree_stays_within_the_limit_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """K/V of nodes beyond the blocks of a request would be lost. Every step is a trial of the head's own tree."""
    target, batch = a_target(), ragged_prompts((5, 9, 2, 3, 7, 12))
    head = tiny_block_head(target, anchor_first=True, has_confidence_head=True)
    head.config.default_tree = {"depth": 4, "top_k": 16, "num_nodes": 60}

    def chosen(choice: AutoChoice) -> Any:
        choice._is_trial = True
        return choice.limits.first

    sizes = []
    propose = RequestStep.propose

    def proposed(step: RequestStep) -> Any:
        draft = propose(step)
        sizes.append(draft.num_nodes)
        return draft

    monkeypatch.setattr(AutoChoice, "_chosen", chosen)
    monkeypatch.setattr(RequestStep, "propose", proposed)
    config = SpeculativeConfig(tree="auto", max_step_nodes=12)
    outputs = target.generate_batch(
        batch, max_new_tokens=60, do_sample=False, assistant_model=head, speculative_config=config
    )
    assert 0 < max(sizes) <= 12
    for prompt, output in zip(batch, outputs.values(), strict=True):
        assert output.error is None and output.generated_tokens == text_alone(target, prompt, max_new_tokens=60)


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["auto", "rejection"])
def test_the_distribution_is_the_target_s(verification: Any, confidences: list[Any]) -> None:
    head = tiny_block_head(the_target(), **CONFIDENCE_KINDS["markov"])
    config = SpeculativeConfig(tree="auto", verification=verification)
    assert fit_samples(config, head, "temperature").p_value > SIGNIFICANCE
    assert confidences


def test_a_head_without_confidence_is_not_asked(confidences: list[Any]) -> None:
    target = a_target()
    head = tiny_block_head(target, anchor_first=True)
    target.generate(**prompts(1, 9), do_sample=False, max_new_tokens=16, assistant_model=head, tree="auto")
    assert not confidences
