"""Trees that grow along a grammar: what is hidden from a draft's logits, and that nothing else is proposed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from support.batches import limits
from support.grammar import NaiveMask, small_tokenizer
from support.sampling import PROMPT, VOCAB, a_draft, a_head, the_target

from hf_specdec.drafters import draft_model
from hf_specdec.drafters.features import drafter as features
from hf_specdec.drafters.growth import LevelNodes
from hf_specdec.grammar import CompiledGrammar, GrammarMask, GrowingMask


GRAMMAR = LLMatcher.grammar_from_regex("(a|b|ca)[abc](bca|cab)?[abc]{2,8}")
ENDLESS = LLMatcher.grammar_from_regex("(a|b|ca)[abc](bca|cab)?[abc]{8,}")


def a_mask() -> GrammarMask:
    return GrammarMask(CompiledGrammar(GRAMMAR, small_tokenizer(), VOCAB, [0]))


def naive(texts: list[list[int]], logits: torch.Tensor) -> torch.Tensor:
    """Logits `[texts, vocab]` after the naive mask, as they are where it allows nothing."""
    mask = NaiveMask(GRAMMAR, small_tokenizer(), 0, [0], VOCAB)
    return torch.cat([mask(torch.tensor([text]), row[None]) for text, row in zip(texts, logits, strict=True)])


@pytest.mark.parametrize("columns", [None, [1, 3, 4, 6, 7], [0, 5]], ids=["all", "some", "few"])
def test_levels(columns: list[int] | None) -> None:
    """Two rows with a grammar beside one without, and a path that the grammar does not let through."""
    ids = torch.arange(VOCAB) if columns is None else torch.tensor(columns)
    size = len(ids)
    rows = [(a_mask(), [1]), None, (a_mask(), [3])]
    growing = GrowingMask(rows, VOCAB, None if columns is None else ids)
    full = torch.full((3, VOCAB), -torch.inf)
    full[:, ids] = torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    found = growing.at_root(full[:, ids])
    tokens = torch.tensor([[0, 1], [1, 0], [1, 0]])
    nodes = LevelNodes(tokens, torch.zeros(1, 2).long(), torch.ones(1, 2, 2).bool(), torch.zeros(1, 2).long(), 0)
    below = growing.below(nodes, full[:, None, ids].expand(-1, 2, -1))
    deeper = LevelNodes(tokens, torch.tensor([[1, 0]]), nodes.ancestors, nodes.node_depths, 2)
    deepest = growing.below(deeper, full[:, None, ids].expand(-1, 2, -1))
    for row in range(3):
        if rows[row] is None:
            assert torch.equal(found[row], full[row, ids])
            continue
        own, first = rows[row][1], [int(ids[token]) for token in tokens[row]]
        paths = [own, *([*own, token] for token in first)]
        paths += [[*own, first[1 - node], first[node]] for node in range(2)]
        expected = naive(paths, full[row].expand(5, -1))[:, ids]
        expected = torch.where((expected == -torch.inf).all(dim=1, keepdim=True), full[row, ids], expected)
        assert torch.equal(torch.cat([found[row, None], below[row], deepest[row]]), expected)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", ["draft", "head"])
def test_nothing_else_is_proposed(kind: str, do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `generate` and in flight; the draft would propose other tokens."""
    target = the_target()
    draft: Any = a_draft("noisy") if kind == "draft" else a_head(None)
    owner: Any = draft_model if kind == "draft" else features
    kind_of: Any = owner.DraftModelDrafter if kind == "draft" else owner.FeatureDrafter
    texts: list[list[int]] = []
    propose = kind_of.propose

    def watched(self: Any, sequences: Any) -> Any:
        tree = propose(self, sequences)
        for row in range(0 if tree is None else sequences.batch_size):
            text = sequences.new_tokens(row) + [token for token in tree.tokens_list[row] if token >= 0]
            texts.append(text[: (*text, 0).index(0) + 1])  # anything may be below an end
        return tree

    monkeypatch.setattr(kind_of, "propose", watched)
    options: dict[str, Any] = {"assistant_model": draft, "tree": "chain:3", "do_sample": do_sample, "eos_token_id": 0}
    options |= {"grammar": ENDLESS, "tokenizer": small_tokenizer(), "max_new_tokens": 12}
    matcher = CompiledGrammar(ENDLESS, small_tokenizer(), VOCAB, [0])
    for call in ("generate", "generate_batch"):
        texts.clear()
        if call == "generate":
            target.generate(**PROMPT, pad_token_id=0, **options)
        else:
            target.generate_batch(PROMPT["input_ids"].tolist(), continuous_batching_config=limits(), **options)
        assert len(texts) >= 3
        assert all(matcher.text().num_allowed(text) == len(text) for text in texts)
