"""Random requests side by side, with graphs and without: whole steps and steps in parts take turns."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from support.batches import assert_nothing_left, limits, text_alone
from support.goldens import trained_target
from support.graphs import install_stand_in
from support.heads import trained_head
from support.hybrids import draft_of, hybrid
from support.models import noisy_copy, tiny_model, with_fewer_positions
from support.parity import IRREGULAR
from transformers import PreTrainedModel

from hf_specdec import DynamicTree, SpeculativeConfig, TokenTree
from hf_specdec.engine.captured import stored
from hf_specdec.engine.captured.step import InFlightStep
from hf_specdec.graphs.paged import PagedGraphs


TREES: list[Any] = [
    "[(0,)]",
    IRREGULAR,
    TokenTree.chain(5),
    DynamicTree(depth=3, top_k=3, num_nodes=7),
    [(0, "[(0,)]"), (14, None), (22, IRREGULAR)],
    "auto",
]


@cache
def models(kind: str) -> tuple[PreTrainedModel, Any]:
    """A target and its draft; one that is `short` knows few positions."""
    if kind == "head":
        return trained_target(), trained_head()
    if kind == "states":
        target = hybrid("qwen3_5_text")
        texts = [text_alone(target, [token], max_new_tokens=40) for token in (5, 9)]
        return target, draft_of(texts)
    if kind == "noisy":
        target = tiny_model(dtype=torch.float32)
        return target, noisy_copy(target, 0.05)
    target = tiny_model("gpt2", dtype=torch.float32)
    return target, with_fewer_positions(target, 40)


def random_request(choice: random.Random, vocab_size: int) -> tuple[list[int], dict[str, Any], dict[str, Any]]:
    """A prompt, options that `generate` knows, and others."""
    prompt = [choice.randrange(3, vocab_size) for _ in range(choice.choice([1, 2, 5, 9, 20]))]
    options: dict[str, Any] = {"max_new_tokens": choice.choice([1, 2, 5, 12, 25, 40])}
    if choice.random() < 0.2:
        host = {"encoder_repetition_penalty": 1.3}
        options |= choice.choice([{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 3}, host])
    if choice.random() < 0.2:
        least = choice.choice([0, min(options["max_new_tokens"], 9)])
        options |= {"eos_token_id": choice.randrange(3, vocab_size), "min_new_tokens": least}
    own: dict[str, Any] = {}
    if choice.random() < 0.15:
        own["speculate"] = False
    elif choice.random() < 0.6:
        own["tree"] = choice.choice(TREES)
    if choice.random() < 0.2:
        own |= {"do_sample": True, "temperature": 0.8, "top_k": choice.choice([0, 9])}
    return prompt, options, own


@pytest.mark.filterwarnings("error:.*could not be captured")
@pytest.mark.parametrize("seed", [0, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 3))])
@pytest.mark.parametrize("kind", ["noisy", "head", "short", "states"])
@pytest.mark.some_cases(1)
def test_greedy_texts(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `generate`, whatever is beside them, and however often they lose their blocks."""
    install_stand_in(monkeypatch, with_kernel=True)
    monkeypatch.setattr(stored, "PATIENCE", 3)
    monkeypatch.setattr(PagedGraphs, "prompt_widths", [(), (4,), (4, 8, 16)][seed % 3])
    runs, launch = [], InFlightStep.launch
    monkeypatch.setattr(InFlightStep, "launch", lambda self: runs.append(self) or launch(self))
    (target, draft), choice = models(kind), random.Random(f"{kind} {seed}")
    requests = [random_request(choice, target.config.vocab_size) for _ in range(choice.randint(4, 9))]
    speculation = SpeculativeConfig(
        tree=IRREGULAR,
        disable_by_batch_size=choice.choice([None, None, 1, 3]),
        max_step_nodes=choice.choice([None, 12]),
    )
    manager = target.init_continuous_batching(
        assistant_model=draft,
        speculative_config=speculation,
        continuous_batching_config=limits(
            choice.choice([24, 40, 200]), max_requests_per_batch=choice.choice([2, 4, 8])
        ),
    )
    torch.manual_seed(seed)
    with manager:
        names = [manager.add_request(prompt, **(options | own)) for prompt, options, own in requests]
        outputs = [manager.get_result(name, timeout=120) for name in names]
    for (prompt, options, own), output in zip(requests, outputs, strict=True):
        assert output.error is None
        if not own.get("do_sample"):
            assert output.generated_tokens == text_alone(target, prompt, **options)
    assert sum(len(output.generated_tokens) for output in outputs) == manager.engine.num_tokens_generated
    by_host = any("encoder_repetition_penalty" in options for _, options, _ in requests)
    assert runs or by_host or all(options["max_new_tokens"] == 1 for _, options, _ in requests)
    assert_nothing_left(manager)
