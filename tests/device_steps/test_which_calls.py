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
        {"repetition_penalty": 1.2},
        {"stopping_criteria": StoppingCriteriaList([Never()])},
        {"max_time": 100.0},
        {"return_dict_in_generate": True, "output_scores": True},
        {"speculative_config": SpeculativeConfig(tree=IRREGULAR, disable_by_batch_size=3)},
        {"speculative_config": SpeculativeConfig(tree="auto")},
        {"do_sample": True, "min_p": 0.1},
        {"assistant_model": hf_specdec.NgramDraft()},
    ],
    ids=lambda options: next(iter(options)) if isinstance(options, dict) else None,
)
def test_others_run_step_by_step(options: dict[str, Any], steps: Steps) -> None:
    target = tiny_model(dtype=torch.float32)
    call = prompts(1, 9) | {"max_new_tokens": 12, "do_sample": False, "assistant_model": noisy_copy(target, 0.05)}
    if "speculative_config" not in options:
        call["tree"] = IRREGULAR
    target.generate(**(call | options))
    assert steps.captures == 0


def test_a_step_that_cannot_be_captured(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, the same text, and no second try."""
    target, inputs = tiny_model(dtype=torch.float32), prompts(1, 9)
    draft = noisy_copy(target, 0.05)
    plain = target.generate(**inputs, max_new_tokens=20, do_sample=False)

    works, tries = graphs.RECORDERS["cpu"], []

    def fails_at_first(run: Callable[[], Any], device: torch.device, pool: Any = None) -> Any:
        tries.append(run)
        if len(tries) > 1:
            return works(run, device, pool)
        run()
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setitem(graphs.RECORDERS, "cpu", fails_at_first)
    options = {"assistant_model": draft, "tree": IRREGULAR, "max_new_tokens": 20, "do_sample": False}
    with pytest.warns(UserWarning, match="could not be captured"):
        assert torch.equal(target.generate(**inputs, **options), plain)
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
    steps go, without the target all.
    """

    def forgets(run: Callable[[], Any], device: torch.device) -> Any:
        run()
        return lambda: rows_end(), []

    def rows_end() -> None:
        for step in store.steps.values():
            step.rows.report.fill_(-1)
            step.rows.report[:, 1] = 0
            step.rows.report[:, 0], step.rows.report[:, 2] = 0, 5

    monkeypatch.setitem(graphs.RECORDERS, "cpu", forgets)
    target = tiny_model(dtype=torch.float32)
    draft = noisy_copy(target, 0.05) if kind == "model" else tiny_head(target)
    store = graphs.GraphStore(512)
    monkeypatch.setattr(graphs.stores, "GraphStore", lambda capacity: store if not store._layers else Other(capacity))
    Other = type("Other", (type(store),), {})
    target.generate(**prompts(1, 9), max_new_tokens=8, do_sample=False, assistant_model=draft, tree=IRREGULAR)
    assert len(store.steps) == 1
    gone = weakref.ref(draft), weakref.ref(target)
    del draft
    gc.collect()
    assert gone[0]() is None and not store.steps
    del target
    gc.collect()
    assert gone[1]() is None
