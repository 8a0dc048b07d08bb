"""Metrics agree with the text."""

from __future__ import annotations

import threading

import pytest
from support.models import VOCAB, prompts, tiny_model
from support.parity import IRREGULAR, assert_same_text, plain_text
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec import DynamicTree, SpeculationMetrics, SpeculativeConfig, TokenTree


PROMPT = 9
NEW_TOKENS = 18

RUNS = {
    "chain": (TokenTree.chain(3), {}),
    "irregular": (TokenTree.parse(IRREGULAR), {}),
    "dynamic": (DynamicTree(depth=3, top_k=3, num_nodes=9), {}),
    "drawn": (TokenTree.from_branching((3, 2, 1)), {"do_sample": True}),
    "drawn, dynamic": (DynamicTree(depth=3, top_k=3, num_nodes=9), {"do_sample": True}),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.some_cases(5)
def test_metrics_agree_with_the_text(
    target: PreTrainedModel, draft: PreTrainedModel, batch_size: int, run: str
) -> None:
    tree, options = RUNS[run]
    out = target.generate(
        **prompts(batch_size, PROMPT, padding=True),
        max_new_tokens=NEW_TOKENS,
        assistant_model=draft,
        tree=tree,
        **{"do_sample": False} | options,
    )
    metrics = hf_specdec.last_metrics()
    assert len(metrics.accepted_per_step) == batch_size
    for row in metrics.accepted_per_step:
        # The first token comes from the prefill; each step gives what it accepted, and one more.
        assert 1 + sum(accepted + 1 for accepted in row) == out.shape[1] - PROMPT == NEW_TOKENS
        assert max(row) <= tree.depth
    steps = [accepted for row in metrics.accepted_per_step for accepted in row]
    assert metrics.num_drafts == len(steps)
    assert 0 < metrics.num_accepted_tokens == sum(steps) <= metrics.num_draft_tokens
    assert metrics.num_draft_tokens <= metrics.num_drafts * tree.num_nodes
    assert metrics.mean_acceptance_length == pytest.approx(1 + sum(steps) / len(steps))
    assert metrics.draft_acceptance_rate == pytest.approx(sum(steps) / metrics.num_draft_tokens)
    shares = [sum(accepted >= depth for accepted in steps) / len(steps) for depth in range(1, max(steps) + 1)]
    assert metrics.acceptance_per_position == pytest.approx(shares)
    assert sum(metrics.acceptance_per_position) == pytest.approx(metrics.mean_acceptance_length - 1)
    assert set(metrics.seconds) == {"prefill", "propose", "score", "accept", "commit"}
    assert min(metrics.seconds.values()) > 0


@pytest.mark.parametrize("batch_size", [1, 3])
def test_metrics_of_texts_that_end(target: PreTrainedModel, batch_size: int) -> None:
    """What is accepted behind an end is not part of the text, and does not count."""
    inputs = prompts(batch_size, PROMPT)
    text = plain_text(target, inputs, max_new_tokens=NEW_TOKENS)
    for place in range(2, 9):
        end = int(text[0, PROMPT + place])
        out = target.generate(
            **inputs,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=end,
            assistant_model=target,
            tree=TokenTree.chain(4),
        )
        metrics = hf_specdec.last_metrics()
        for row, steps in zip(out[:, PROMPT:].tolist(), metrics.accepted_per_step, strict=True):
            length = row.index(end) + 1 if end in row else len(row)
            tokens = 1 + sum(accepted + 1 for accepted in steps)
            # A step that ends in an accepted end token has no token of its own.
            assert tokens - length in (0, 1)
            assert tokens == length or (end in row and steps[-1] > 0)
        assert metrics.num_accepted_tokens == sum(map(sum, metrics.accepted_per_step))


def test_metrics_without_drafts(target: PreTrainedModel) -> None:
    out = target.generate(
        **prompts(2, PROMPT),
        max_new_tokens=6,
        do_sample=False,
        assistant_model=target,
        speculative_config=SpeculativeConfig(tree="[(0,)]", disable_by_batch_size=1),
    )
    metrics = hf_specdec.last_metrics()
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (0, 0, 0)
    assert metrics.accepted_per_step == [[0] * 5] * 2
    assert metrics.mean_acceptance_length == 1.0
    assert metrics.draft_acceptance_rate == 0.0
    assert metrics.acceptance_per_position == []
    assert out.shape[1] == PROMPT + 6


def test_last_metrics_are_those_of_the_thread(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    assert_same_text(target, prompts(1, PROMPT), draft, max_new_tokens=NEW_TOKENS)
    mine = hf_specdec.last_metrics()
    seen: list[SpeculationMetrics | None] = []

    def another_thread() -> None:
        seen.append(hf_specdec.last_metrics())
        target.generate(**prompts(1, PROMPT), max_new_tokens=4, do_sample=False)  # a plain call does not count
        seen.append(hf_specdec.last_metrics())
        target.generate(**prompts(1, PROMPT), max_new_tokens=4, do_sample=False, assistant_model=draft, tree="[(0,)]")
        seen.append(hf_specdec.last_metrics())

    thread = threading.Thread(target=another_thread)
    thread.start()
    thread.join()
    assert seen[:2] == [None, None]
    assert isinstance(seen[2], SpeculationMetrics)
    assert hf_specdec.last_metrics() is mine


def test_tokens_of_the_whole_vocabulary_can_be_drafted(target: PreTrainedModel) -> None:
    """The largest rank there is: every token is a child, so every draft is right."""
    tree = TokenTree.from_branching((VOCAB,))
    metrics = assert_same_text(target, prompts(2, PROMPT), tiny_model("llama", seed=9), tree, max_new_tokens=11)
    assert metrics.accepted_per_step == [[1] * 5] * 2
