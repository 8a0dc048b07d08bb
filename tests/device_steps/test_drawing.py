"""What children are drawn from on the device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.processing import as_loaded
from transformers import (
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.logits_process import EpsilonLogitsWarper, EtaLogitsWarper

from hf_specdec.engine.captured import nodes, processing
from hf_specdec.engine.captured.drawing import Drawing
from hf_specdec.engine.captured.processing import Processing
from hf_specdec.verification.device_warpers import Warpers
from hf_specdec.verification.penalties import OccurrencePenalty


pytest.importorskip("triton", reason="the kernels need triton")

ROWS: list[list[LogitsProcessor]] = [
    [],
    [TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)],
    [TopPLogitsWarper(0.8)],
    [TemperatureLogitsWarper(1.3), TopKLogitsWarper(12), TopPLogitsWarper(0.6)],
    [TemperatureLogitsWarper(2.0), TopKLogitsWarper(3), TopPLogitsWarper(0.1)],
    [TopKLogitsWarper(20), TopPLogitsWarper(0.99)],
    [TopPLogitsWarper(0.0)],
    [TemperatureLogitsWarper(0.7), MinPLogitsWarper(0.2)],
    [TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)],
    [TemperatureLogitsWarper(1.7), TopHLogitsWarper(0.4)],
    [TopHLogitsWarper(1.0), TopPLogitsWarper(0.7)],
    [TypicalLogitsWarper(0.3)],
    [TemperatureLogitsWarper(0.5), TopKLogitsWarper(9), TypicalLogitsWarper(0.9)],
    [EpsilonLogitsWarper(0.04)],
    [TemperatureLogitsWarper(0.3), EpsilonLogitsWarper(0.9)],
    [EtaLogitsWarper(0.1)],
    [TemperatureLogitsWarper(3.0), TopPLogitsWarper(0.9), EtaLogitsWarper(0.02), LogitNormalization()],
    [
        SuppressTokensLogitsProcessor([3, 41, 77]),
        TemperatureLogitsWarper(1.5),
        TopHLogitsWarper(0.9),
        TopKLogitsWarper(30),
        TopPLogitsWarper(0.95),
        MinPLogitsWarper(0.01),
        TypicalLogitsWarper(0.9),
        EpsilonLogitsWarper(0.01),
        EtaLogitsWarper(0.02),
    ],
]


def differ(vocab: int) -> list[int]:
    """Rows of which other tokens are left than by transformers' warpers, or with other probabilities."""
    logits = 3.0 * torch.randn(len(ROWS), 4, vocab, generator=torch.Generator().manual_seed(0))
    found = Drawing(SimpleNamespace(), torch.ones(len(ROWS)), as_loaded(ROWS)).warp(logits)
    expected = torch.stack([LogitsProcessorList(one)(None, logits[row]) for row, one in enumerate(ROWS)])
    found, expected = (scores.log_softmax(dim=-1) for scores in (found, expected))
    return [row for row in range(len(ROWS)) if not torch.allclose(found[row], expected[row], atol=1e-5)]


@pytest.mark.parametrize("vocab", [50, 300])
def test_as_the_warpers_of_transformers(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row, with values of their own; the larger vocabulary some nodes at a time."""
    monkeypatch.setattr(nodes, "MOST_SCORES", 2 * len(ROWS) * 60)
    assert differ(vocab) == []


@pytest.mark.parametrize("wrong", ["order", "temperature"])
def test_wrong_filters_are_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another order, or of the logits as they are: wherever there is more than one filter, or a temperature."""
    if wrong == "order":
        monkeypatch.setattr(processing, "AFTER", dict(reversed(processing.AFTER.items())))
        assert differ(300) == [len(ROWS) - 1]
    else:
        monkeypatch.setattr(Processing, "_scores", lambda self, logits: logits.float())
        assert differ(300) == [7, 9, 12, 16, 17]


@pytest.mark.parametrize(
    "processors",
    [
        [MinPLogitsWarper(0.1), TemperatureLogitsWarper(0.7)],
        [MinPLogitsWarper(0.1), TopPLogitsWarper(0.9)],
        [TopKLogitsWarper(5), TopHLogitsWarper(0.5)],
        [TemperatureLogitsWarper(0.7), SuppressTokensLogitsProcessor([3])],
        [MinPLogitsWarper(0.1), MinPLogitsWarper(0.2)],
        [MinPLogitsWarper(0.1, min_tokens_to_keep=2)],
        [TypicalLogitsWarper(0.5, filter_value=-10.0)],
        [TemperatureLogitsWarper(0.7), RepetitionPenaltyLogitsProcessor(1.2)],
        [OccurrencePenalty(3, 0.5, 0.0), RepetitionPenaltyLogitsProcessor(1.2)],
        [RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=3)],
    ],
    ids=lambda processors: ", ".join(type(one).__name__ for one in processors),
)
def test_what_the_host_does(processors: list[LogitsProcessor]) -> None:
    """In another order, or with other options, than `generate` makes them."""
    assert Warpers.of(LogitsProcessorList(processors)) is None
