"""A speculative call beside the plain one with the same options, and recorders of what a user's objects get to see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec import SpeculationMetrics


TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]"
"""Irregular, with paths of one, two and three tokens, so that rows of a batch accept different numbers."""

Options = dict[str, Any] | Callable[[], dict[str, Any]]
"""Keyword arguments of `generate`; as a function where they hold objects with state, which every call needs anew."""


def generate_plain(model: PreTrainedModel, inputs: dict[str, torch.Tensor], options: Options) -> Any:
    """Greedy `generate` without an assistant."""
    values = options() if callable(options) else options
    return model.generate(**inputs, **({"do_sample": False} | values))


def generate_with_tree(
    model: PreTrainedModel, draft: Any, inputs: dict[str, torch.Tensor], options: Options, tree: Any = TREE
) -> Any:
    """The same call, speculating."""
    values = options() if callable(options) else options
    return generate_plain(model, inputs, {**values, "assistant_model": draft, "tree": tree})


def assert_same_calls(
    model: PreTrainedModel, draft: Any, inputs: dict[str, torch.Tensor], options: Options, tree: Any = TREE
) -> tuple[torch.Tensor, SpeculationMetrics]:
    """
    Asserts that a speculative call gives the tokens of the plain one, and that it did accept draft tokens.

    Returns:
        `tuple`: the tokens, `[batch, length]`, and the metrics of the speculative call.
    """
    plain = generate_plain(model, inputs, options)
    ours = generate_with_tree(model, draft, inputs, options, tree)
    assert ours.tolist() == plain.tolist()
    metrics = hf_specdec.last_metrics()
    assert metrics.num_accepted_tokens > 0, "nothing was accepted: the test shows nothing"
    return ours, metrics


def is_ragged(metrics: SpeculationMetrics) -> bool:
    """Whether, in some step, rows accepted different numbers of tokens."""
    return any(len(set(step)) > 1 for step in zip(*metrics.accepted_per_step, strict=False))


class RecordingProcessor(LogitsProcessor):
    """Changes nothing, and keeps the `input_ids` and scores of every call."""

    def __init__(self) -> None:
        self.input_ids: list[list[list[int]]] = []
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.input_ids.append(input_ids.tolist())
        self.scores.append(scores.clone())
        return scores

    def assert_saw_the_same(self, other: RecordingProcessor) -> None:
        """Asserts that both got the same calls: the same histories, and scores that differ by rounding only."""
        assert self.input_ids == other.input_ids
        for mine, theirs in zip(self.scores, other.scores, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)  # shapes and dtypes, too


class RecordingCriterion(StoppingCriteria):
    """Never stops, and keeps the `input_ids` of every call, and how many `scores` of which shape came with them."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], Any]] = []

    def __call__(
        self, input_ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None, **kwargs: Any
    ) -> torch.Tensor:
        seen = None if scores is None else [tuple(score.shape) for score in scores]
        self.calls.append((input_ids.tolist(), seen))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class RecordingStreamer(BaseStreamer):
    """Keeps what it is given, in order; others may write into the same `log`, to show who is called first."""

    def __init__(self, log: list[Any] | None = None) -> None:
        self.log: list[Any] = [] if log is None else log

    def put(self, value: torch.Tensor) -> None:
        self.log.append(("put", value.device.type, value.tolist()))

    def end(self) -> None:
        self.log.append(("end",))
