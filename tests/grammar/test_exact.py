"""Texts drawn with a grammar against the enumerated distribution of `generate` with the mask as a processor."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from support.exact import SIGNIFICANCE, Fit, enumerate_tokens, fit, sample_tokens
from support.grammar import NaiveMask, small_tokenizer
from support.sampling import LENGTH, METHODS, PROMPT, VOCAB, a_draft, the_target
from transformers import LogitsProcessorList

from hf_specdec import SpeculativeConfig, last_metrics
from hf_specdec.drafters.growth import Draws
from hf_specdec.grammar import GrowingMask
from hf_specdec.grammar.texts import GrammarText
from hf_specdec.trees.forced import ForcedDraft


ROWS = 600
CHOICE = LLMatcher.grammar_from_regex("(a|b|ca)[abc](bca|cab)?[abc]{8,}")
"""Some tokens or all."""
FORCED = LLMatcher.grammar_from_regex("[abc]bca[abc]{8,}")
"""Two forced tokens after the first one."""


@cache
def expected(grammar: str) -> torch.Tensor:
    mask = NaiveMask(grammar, small_tokenizer(), PROMPT["input_ids"].shape[1], [0], VOCAB)
    return enumerate_tokens(the_target(), PROMPT, LENGTH, logits_processor=LogitsProcessorList([mask]))


def sampled(config: SpeculativeConfig, assistant: Any, grammar: str, rows: int = ROWS) -> Fit:
    tokens = sample_tokens(
        the_target(),
        PROMPT,
        rows,
        LENGTH,
        assistant_model=assistant,
        speculative_config=config,
        grammar=grammar,
        tokenizer=small_tokenizer(),
        eos_token_id=0,
    )
    return fit(tokens[0], expected(grammar))


@pytest.mark.parametrize(
    "method, grammar",
    [
        ("rejection, irregular", CHOICE),
        ("rejection, budgets", FORCED),
        ("rejection, chain", FORCED),
        ("target, drawn", CHOICE),
        ("target, best tokens", FORCED),
    ],
)
@pytest.mark.some_cases(1)
def test_every_method(method: str, grammar: str):
    found = sampled(METHODS[method], a_draft("noisy"), grammar)
    assert found.p_value > SIGNIFICANCE, found
    assert found.detectable < 0.35
    assert last_metrics().num_accepted_tokens > 0


@pytest.mark.slow
def test_default_trees():
    """Random numbers belong to positions there."""
    assert sampled(SpeculativeConfig(), a_draft("noisy"), CHOICE).p_value > SIGNIFICANCE


@pytest.fixture
def proposes_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains that the grammar does not force, beside children that are drawn."""
    monkeypatch.setattr(GrammarText, "forced", lambda self, most: [1, 6, 3][:most])


@pytest.mark.slow
@pytest.mark.usefixtures("proposes_anything")
@pytest.mark.parametrize("method", ["rejection, irregular", "target, drawn"])
def test_proposed_tokens_need_not_be_forced(method: str):
    found = sampled(METHODS[method], a_draft("noisy"), CHOICE)
    assert found.p_value > SIGNIFICANCE, found


@pytest.mark.slow
@pytest.mark.usefixtures("proposes_anything")
def test_proposed_tokens_are_no_drawn_ones(monkeypatch: pytest.MonkeyPatch):
    """A wrong version: what the grammar proposes counts as drawn from the draft's distribution."""
    monkeypatch.setattr(ForcedDraft, "is_drawn", lambda self, node: True)
    monkeypatch.setattr(ForcedDraft, "scores_of", lambda self, row, node: _scores_or_none(self, row, node))
    found = sampled(METHODS["rejection, irregular"], a_draft("noisy"), CHOICE, rows=2 * ROWS)
    assert found.p_value < SIGNIFICANCE


def test_q_is_what_the_grammar_leaves(monkeypatch: pytest.MonkeyPatch):
    """A wrong version: children are drawn after the mask, and verified as if drawn before it."""
    before: list[torch.Tensor] = []
    masked = GrowingMask._masked
    monkeypatch.setattr(GrowingMask, "_masked", lambda self, logits: before.append(logits) or masked(self, logits))

    def of_tree(self: Draws) -> dict[str, Any]:
        scores = torch.cat([self._warp(logits) for logits in before], dim=1)
        before.clear()
        return {"scores": scores}

    monkeypatch.setattr(Draws, "of_tree", of_tree)
    found = sampled(METHODS["rejection, irregular"], a_draft("noisy"), CHOICE)
    assert found.p_value < SIGNIFICANCE, found


def _scores_or_none(draft: ForcedDraft, row: int, node: int) -> torch.Tensor:
    try:
        return draft.drafted.scores_of(row, node)
    except (IndexError, ValueError):  # a node that the drafter does not know
        return torch.zeros(VOCAB)
