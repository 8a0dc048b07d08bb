"""Which calls run in whole steps on the device, and what happens where that cannot be."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.device_steps import Steps
from support.heads import tiny_head
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import hf_specdec
from hf_specdec import SpeculativeConfig, graphs
from hf_specdec.engine.captured.captured import CapturedStep
from hf_specdec.engine.captured.step import InFlightStep
from hf_specdec.engine.request import Request
from hf_specdec.engine.scheduler import Scheduler
from hf_specdec.generation import engines
from hf_specdec.ranks import Ranks
from hf_specdec.trees.candidate_trees import CandidateTrees
from hf_specdec.trees.capture_budget import CaptureBudget


class Halved(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores / 2


class Never(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    "options",
    [
        {"logits_processor": LogitsProcessorList([Halved()])},
        {"encoder_repetition_penalty": 1.3},
        {"stopping_criteria": StoppingCriteriaList([Never()])},
        {"max_time": 100.0},
        {"attention_mask": torch.zeros(1, 9, dtype=torch.long)},
        {"return_dict_in_generate": True, "output_scores": True},
        {"do_sample": True, "remove_invalid_values": True},
        {"assistant_model": hf_specdec.NgramDraft()},
    ],
    ids=lambda options: next(iter(options)) if isinstance(options, dict) else None,
)
def test_others_run_step_by_step(options: dict[str, Any], steps: Steps) -> None:
    target = tiny_model(dtype=torch.float32)
    call = prompts(1, 9) | {"max_new_tokens": 12, "do_sample": False, "assistant_model": noisy_copy(target, 0.05)}
    target.generate(**(call | options), tree=IRREGULAR)
    assert steps.captures == 0


@pytest.mark.slow
def test_short_texts_by_the_engine_of_long_ones(steps: Steps) -> None:
    target = tiny_model(dtype=torch.float32)
    draft, options = noisy_copy(target, 0.05), {"max_new_tokens": 12, "do_sample": False}
    for length, num_engines in ((40, 1), (9, 1), (140, 2), (9, 2)):
        text = target.generate(**prompts(1, length), **options, assistant_model=draft, tree=IRREGULAR)
        assert torch.equal(text, target.generate(**prompts(1, length), **options))
        assert len(vars(target)["_engines_of_calls"]) == num_engines


def test_an_engine_that_another_rank_has_dropped(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks make a new one of equal size: that of the call, not of the engine that some still have."""
    target = tiny_model(dtype=torch.float32)
    options = {"max_new_tokens": 12, "assistant_model": noisy_copy(target, 0.05), "tree": IRREGULAR}
    found = []
    for length in (140, 9):
        answers = iter([False])
        monkeypatch.setattr(Ranks, "on_all", lambda ranks, holds, answers=answers: next(answers, holds))
        target.generate(**prompts(1, length), do_sample=False, **options)
        found.append([key.blocks for key in vars(target)["_engines_of_calls"]])
    assert len(found[1]) == 1 and found[1][0] < found[0][0]


def test_prompts_that_fill_their_blocks(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows begin together, though none has a block left to grow into: a batch is no queue."""
    target, admitted = tiny_model(dtype=torch.float32), []
    admit = Scheduler.admit

    def noted(self: Scheduler, number: int | None = None) -> list[Request]:
        found = admit(self, number)
        admitted.append((len(self.active), len(self.waiting)))
        return found

    monkeypatch.setattr(Scheduler, "admit", noted)
    inputs = prompts(3, (engines.FEWEST_BLOCKS - 1) * engines.BLOCK_SIZE - 20)
    options = {"max_new_tokens": 6, "do_sample": False}
    found = target.generate(**inputs, **options, assistant_model=noisy_copy(target, 0.05), tree="chain:3")
    assert torch.equal(found, target.generate(**inputs, **options))
    assert steps.captures > 0 and admitted[0] == (3, 0)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    "config",
    [
        {"tree": "auto"},
        {"tree": [(0, IRREGULAR), (14, None), (20, "[(0,)]")]},
        {"tree": IRREGULAR, "disable_by_batch_size": 1},
        {"tree": IRREGULAR, "disable_by_batch_size": 0},
    ],
    ids=["auto", "schedule", "few rows", "no rows"],
)
@pytest.mark.some_cases(1)
def test_trees_that_change(config: dict[str, Any], batch_size: int, steps: Steps) -> None:
    """Steps are whole whatever chose their tree, or none."""
    target = tiny_model(dtype=torch.float32)
    draft, call = noisy_copy(target, 0.05), prompts(batch_size, 9, padding=batch_size > 1) | {"do_sample": False}
    end = int(target.generate(**call, max_new_tokens=24)[0, 16])
    call |= {"max_new_tokens": 24, "eos_token_id": end, "pad_token_id": 0}
    for _ in range(2):
        before = steps.replays
        text = target.generate(**call, assistant_model=draft, speculative_config=SpeculativeConfig(**config))
        assert torch.equal(text, target.generate(**call))
        lengths = [len(row) for row in hf_specdec.last_metrics().accepted_per_step]
        assert steps.replays - before >= max(lengths)


def test_a_step_that_cannot_be_captured(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, the same text, and no second try."""
    target, inputs = tiny_model(dtype=torch.float32), prompts(1, 9)
    draft = noisy_copy(target, 0.05)
    plain = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    capture = InFlightStep.capture

    def fails(self: InFlightStep, *args: Any) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(InFlightStep, "capture", fails)
    options = {"assistant_model": draft, "tree": IRREGULAR, "max_new_tokens": 20, "do_sample": False}
    with pytest.warns(UserWarning, match="could not be captured"):
        assert torch.equal(target.generate(**inputs, **options), plain)
    monkeypatch.setattr(InFlightStep, "capture", capture)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(target.generate(**inputs, **options), plain)
    assert steps.captures == 0
    # Another draft may do better.
    assert torch.equal(target.generate(**inputs, **options | {"assistant_model": noisy_copy(target, 0.1)}), plain)
    assert steps.captures == 1


@pytest.mark.parametrize("kind", ["model", "head"])
def test_captured_steps_go_with_their_models(kind: str, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Real graphs hold memory, and no Python: here the record forgets the function after it ran. Without the draft its
    engine goes, without the target all.
    """

    def forgets(run: Callable[[], Any], device: torch.device, pool: Any = None) -> Any:
        tensors = [tensor.clone() for tensor in run()]
        return lambda: None, tensors

    monkeypatch.setitem(graphs.RECORDERS, "cpu", forgets)
    target = tiny_model(dtype=torch.float32)
    draft = noisy_copy(target, 0.05) if kind == "model" else tiny_head(target)
    target.generate(**prompts(1, 9), max_new_tokens=8, do_sample=False, assistant_model=draft, tree=IRREGULAR)
    assert steps.captures == 1 and len(vars(target)["_engines_of_calls"]) == 1
    gone = weakref.ref(draft), weakref.ref(target)
    del draft
    gc.collect()
    assert gone[0]() is None and not vars(target)["_engines_of_calls"]
    del target
    gc.collect()
    assert gone[1]() is None


@pytest.mark.slow
@pytest.mark.parametrize("tree", [IRREGULAR, "auto"], ids=["fixed", "auto"])
def test_later_rounds_capture_nothing(tree: str, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Prompts of six lengths, three times each: whatever is captured, prompts included, is in the first round. Under
    "auto" the same holds as long as no capture of another tree pays.
    """
    if tree == "auto":
        monkeypatch.setattr(CaptureBudget, "allows", lambda *_: False)
    target = tiny_model(dtype=torch.float32)
    head, captured, capture = tiny_head(target), [], CapturedStep.capture

    def counted(self: CapturedStep, *args: Any) -> None:
        captured.append(self)
        capture(self, *args)

    monkeypatch.setattr(CapturedStep, "capture", counted)
    monkeypatch.setattr(CandidateTrees, "DRAFTS", (((0.9,), ((1, 1), (2, 2))),))
    rounds = []
    for _ in range(3):
        for length in (5, 9, 14, 20, 31, 40):
            target.generate(**prompts(1, length), max_new_tokens=16, do_sample=False, assistant_model=head, tree=tree)
        rounds.append(len(captured))
    assert rounds[0] == rounds[1] == rounds[2] > 0 and steps.captures > 0
