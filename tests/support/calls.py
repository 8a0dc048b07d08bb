"""A speculative call beside the plain one with the same options, and recorders of what a user's objects get to see."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec import SpeculationMetrics

from .models import prompts
from .plain import greedy_text


TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]"
"""Irregular, with paths of one, two and three tokens, so that rows of a batch accept different numbers."""

Options = dict[str, Any] | Callable[[], dict[str, Any]]
"""Keyword arguments of `generate`; as a function where they hold objects with state, which every call needs anew."""


def generate_plain(model: PreTrainedModel, inputs: dict[str, torch.Tensor], options: Options) -> Any:
    """Greedy `generate` without an assistant."""
    values = options() if callable(options) else options
    return greedy_text(model, inputs, **values)


def generate_with_tree(
    model: PreTrainedModel, draft: Any, inputs: dict[str, torch.Tensor], options: Options, tree: Any = TREE
) -> Any:
    """The same call, speculating."""
    values = options() if callable(options) else options
    return generate_plain(model, inputs, {**values, "assistant_model": draft, "tree": tree})


def new_tokens(model: PreTrainedModel, inputs: dict[str, torch.Tensor], count: int) -> list[list[int]]:
    """The first `count` tokens that plain greedy `generate` writes for every row, for options to act on."""
    return generate_plain(model, inputs, {"max_new_tokens": count})[:, inputs["input_ids"].shape[1] :].tolist()


def telling_prompts(model: PreTrainedModel, batch_size: int, length: int = 12) -> dict[str, torch.Tensor]:
    """
    Prompts `[batch, length]` after which this model repeats itself little, so that options have something to act on:
    of many random ones those with the most varied texts, which differ from row to row. In larger batches later
    rows have more padding on their left.
    """
    ids = torch.zeros(batch_size, length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    taken: set[int] = set()
    for row in range(batch_size):
        pads = row * length // (2 * batch_size)
        candidates = prompts(64, length - pads, seed=row)
        texts = new_tokens(model, candidates, 24)
        best = max(range(len(texts)), key=lambda number: len(set(texts[number]) - taken))
        taken |= set(texts[best])
        ids[row, pads:] = candidates["input_ids"][best]
        mask[row, pads:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def own_token(text: list[list[int]], row: int, place: int) -> int:
    """A token that a row writes for the first time at `place` or soon after (else before), and no other row writes."""
    others = {token for number, tokens in enumerate(text) if number != row for token in tokens}
    first = {token: text[row].index(token) for token in text[row] if token not in others}
    assert first, "rows are too much alike"
    return min(first, key=lambda token: (first[token] < place, abs(first[token] - place)))


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
    steps = zip_longest(*metrics.accepted_per_step)  # None: the row has ended
    return any(len(set(step) - {None}) > 1 for step in steps)


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
