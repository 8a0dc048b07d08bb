"""Logits processors at all nodes of a captured step: those of transformers, of the text that ends with each node."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from support.processing import as_loaded
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from hf_specdec.engine.captured import nodes
from hf_specdec.engine.captured.biases import RowBiases
from hf_specdec.engine.captured.nodes import Places
from hf_specdec.trees import Topology
from hf_specdec.verification.biases import MOST_BEFORE, MOST_BIASES
from hf_specdec.verification.device_warpers import Warpers
from hf_specdec.verification.penalties import OccurrencePenalty


VOCAB, NODES, DEPTH = 7, 12, 4


def processors(random_: random.Random, length: int) -> list[LogitsProcessor]:
    """Some of those that captured steps have, for a text of so many tokens, in the order of `generate`."""

    def sequences(most: int) -> list[list[int]]:
        return [random_.choices(range(1, VOCAB), k=random_.randint(1, most)) for _ in range(random_.randint(1, 5))]

    found: list[LogitsProcessor] = [
        SequenceBiasLogitsProcessor({tuple(one): random_.uniform(-3, 3) for one in sequences(3)}),
        RepetitionPenaltyLogitsProcessor(random_.choice([0.7, 1.3])),
        NoRepeatNGramLogitsProcessor(random_.choice([1, 2, 2, 3, 4, MOST_BEFORE + 1])),
        NoBadWordsLogitsProcessor(sequences(3)),
        MinLengthLogitsProcessor(length + random_.randint(0, DEPTH), [2, 3]),
        MinNewTokensLengthLogitsProcessor(length - 1, random_.randint(1, DEPTH), [3]),
        ForcedBOSTokenLogitsProcessor(4),
        ForcedEOSTokenLogitsProcessor(length + random_.randint(0, DEPTH), [2, 5]),
        SuppressTokensLogitsProcessor([6]),
        SuppressTokensAtBeginLogitsProcessor([1], length + random_.randint(0, 2)),
        OccurrencePenalty(length - 1, 0.5, 0.25),
    ]
    kept = [one for one in found if random_.random() < 0.4]
    forced = (ForcedBOSTokenLogitsProcessor, ForcedEOSTokenLogitsProcessor)
    has_forced = any(isinstance(one, forced) for one in kept)
    return [one for one in kept if not (has_forced and type(one) is OccurrencePenalty)]


class Step:
    """Rows with texts and processors of their own, and a tree of random tokens and shape."""

    def __init__(self, seed: int, rows: int = 4):
        self._random = random.Random(seed)
        lengths = [self._random.choice([1, 2, 5, 14]) for _ in range(rows)]
        self.texts = torch.tensor([[self._token() for _ in range(20)] for _ in range(rows)])
        self.lengths = torch.tensor(lengths)
        self.processors = [processors(self._random, length) for length in lengths]
        of_rows = [self._parents() for _ in range(self._random.choice([1, rows]))]
        depths = [self._depths(parents) for parents in of_rows]
        self.topology = Topology.of_parents(torch.tensor(of_rows), max(max(one) for one in depths))
        self.tokens = torch.tensor([[self._token() for _ in range(NODES)] for _ in range(rows)])
        self.tokens[:, 0] = self.texts.gather(1, self.lengths[:, None] - 1)[:, 0]
        self.logits = torch.randn(rows, NODES, VOCAB, generator=torch.Generator().manual_seed(seed))

    def _token(self) -> int:
        return self._random.randrange(1, VOCAB)

    def _parents(self) -> list[int]:
        parents = [0]
        for node in range(1, NODES):
            above = [one for one in range(node) if self._depths(parents)[one] < DEPTH]
            parents.append(self._random.choice(above))
        return parents

    def _depths(self, parents: list[int]) -> list[int]:
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def found(self) -> torch.Tensor:
        processing = as_loaded(self.processors, self.lengths, self.texts)
        return processing(self.logits, Places.of_tree(self.topology, self.tokens)).float()

    def text_of(self, row: int, node: int) -> torch.Tensor:
        """The text that ends with a node, `[1, length]`."""
        is_above = self.topology.ancestors[row if self.topology.rows > 1 else 0, node, 1:]
        return torch.cat([self.texts[row, : self.lengths[row]], self.tokens[row, 1:][is_above]])[None]

    def expected(self) -> torch.Tensor:
        found = self.logits.clone()
        for row, of_row in enumerate(self.processors):
            for node in range(NODES):
                scores = self.logits[row, node][None].clone()
                found[row, node] = LogitsProcessorList(of_row)(self.text_of(row, node), scores)[0]
        return found


SEEDS = range(60)


@pytest.mark.parametrize("most", [2**24, 3 * 4 * 20], ids=["at once", "some nodes at a time"])
@pytest.mark.some_cases(1)
def test_as_the_processors_of_transformers(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit: what is added up is added in float32."""
    monkeypatch.setattr(nodes, "MOST_SCORES", most)
    for seed in SEEDS:
        step = Step(seed)
        torch.testing.assert_close(step.found(), step.expected(), rtol=0, atol=0, msg=lambda m, s=seed: f"{s}: {m}")


@pytest.mark.slow
def test_at_the_nodes_of_a_path() -> None:
    """Level by level, as log-probabilities need them."""
    for seed in SEEDS:
        step = Step(seed)
        processing, expected = as_loaded(step.processors, step.lengths, step.texts), step.expected()
        for row in range(4):
            of_row = step.topology.ancestors[row if step.topology.rows > 1 else 0]
            node = NODES - 1
            path = of_row[node].nonzero()[:, 0]
            new = torch.full((4, DEPTH + 1), -1)
            new[row, : len(path) - 1] = step.tokens[row, path[1:]]
            places = Places.of_path(new, len(path) - 1)
            found = processing(step.logits[:, node : node + 1], places)[row, 0].float()
            assert torch.equal(found, expected[row, node])


@pytest.mark.parametrize("wrong", ["another row", "ancestors ignored", "text ignored", "order"])
@pytest.mark.some_cases(1)
def test_wrong_versions_are_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong == "another row":
        load = RowBiases.load
        monkeypatch.setattr(RowBiases, "load", lambda self, biases: load(self, biases[1:] + biases[:1]))
    elif wrong == "order":
        last = Places.last_tokens
        monkeypatch.setattr(Places, "last_tokens", lambda self, *rest: last(self, *rest).flip(2))
    elif wrong == "text ignored":
        last = Places.last_tokens
        monkeypatch.setattr(Places, "last_tokens", lambda self, texts, *rest: last(self, 0 * texts, *rest))
    else:
        of_tree = Places.of_tree
        monkeypatch.setattr(Places, "of_tree", lambda *of: of_tree(*of)._replace(paths=0 * of_tree(*of).paths - 1))
    steps = [Step(seed) for seed in SEEDS]
    assert sum(not torch.equal(step.found(), step.expected()) for step in steps) > 20


@pytest.mark.parametrize(
    "processors",
    [
        [SequenceBiasLogitsProcessor({(1,): 1.0}), SequenceBiasLogitsProcessor({(2,): 1.0})],
        [RepetitionPenaltyLogitsProcessor(1.2), SequenceBiasLogitsProcessor({(1,): 1.0})],
        [SequenceBiasLogitsProcessor({(1,): math.inf})],
        [SequenceBiasLogitsProcessor({(1,): 1e39})],
        [SequenceBiasLogitsProcessor({(VOCAB,): 1.0})],
        [NoBadWordsLogitsProcessor([[1] * (MOST_BEFORE + 2)])],
        [NoBadWordsLogitsProcessor([[token] for token in range(MOST_BIASES + 1)])],
        [NoRepeatNGramLogitsProcessor(MOST_BEFORE + 2)],
        [NoRepeatNGramLogitsProcessor(2), NoRepeatNGramLogitsProcessor(3)],
        [ForcedEOSTokenLogitsProcessor(9, 2), NoRepeatNGramLogitsProcessor(2)],
        [ForcedEOSTokenLogitsProcessor(9, 2), OccurrencePenalty(3, 0.5, 0.0)],
    ],
    ids=lambda processors: ", ".join(type(one).__name__ for one in processors),
)
def test_what_the_host_does(processors: list[Any]) -> None:
    """What is not exact here, or has no bound."""
    assert Warpers.of(LogitsProcessorList(processors), VOCAB) is None


def test_what_looks_at_padding_is_the_host_s() -> None:
    """Plain `generate` takes padding for tokens of the text."""
    for one in (NoRepeatNGramLogitsProcessor(2), NoBadWordsLogitsProcessor([[1, 2]])):
        assert Warpers.of(LogitsProcessorList([one])) is not None
        assert Warpers.of(LogitsProcessorList([one]), padding=1) is None
    assert Warpers.of(LogitsProcessorList([NoBadWordsLogitsProcessor([[1]])]), padding=1) is not None
