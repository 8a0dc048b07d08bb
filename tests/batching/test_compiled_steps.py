"""Compiled steps of requests in flight: the same texts, by a compiler that only traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.batches import limits, ragged_prompts, text_alone
from support.goldens import trained_prompts, trained_target
from support.graphs import StandIn, install_stand_in
from support.heads import trained_head
from support.models import noisy_copy, tiny_model
from support.parity import IRREGULAR
from torch._dynamo.utils import counters

from hf_specdec import SpeculativeConfig, forward


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(forward, "COMPILER", "eager")
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=256):  # the stand-in replays by running the code again
        yield install_stand_in(monkeypatch, with_kernel=True, counts=False)
    torch._dynamo.reset()


def compiled(**options: Any) -> dict[str, Any]:
    config = SpeculativeConfig(tree=IRREGULAR, compile=True)
    return {"speculative_config": config, "continuous_batching_config": limits(), "max_new_tokens": 20} | options


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_draft_models(family: str, stand_in: StandIn, recwarn: pytest.WarningsRecorder) -> None:
    target, prompts = tiny_model(family, dtype=torch.float32), ragged_prompts((5, 6))
    outputs = target.generate_batch(prompts, assistant_model=noisy_copy(target, 0.05), **compiled())
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=20)
    assert counters["stats"]["unique_graphs"] >= 4 and stand_in.replays > 3
    assert not [one for one in recwarn if "could not be" in str(one.message)]


def test_heads(stand_in: StandIn, recwarn: pytest.WarningsRecorder) -> None:
    target, prompts, found = trained_target(), trained_prompts()["prompts"][:2], []
    for config in (SpeculativeConfig(tree=IRREGULAR, cuda_graphs=False), compiled()["speculative_config"]):
        options = compiled(max_new_tokens=40, speculative_config=config)
        outputs = target.generate_batch(prompts, assistant_model=trained_head(), **options).values()
        found.append([(output.generated_tokens, output.speculation.accepted_per_step) for output in outputs])
    assert found[0] == found[1] and counters["stats"]["unique_graphs"] >= 4
    assert not [one for one in recwarn if "could not be" in str(one.message)]


def test_models_that_cannot_be_traced(stand_in: StandIn) -> None:
    """One warning, and whole steps all the same."""
    target, prompts = tiny_model("mixtral", dtype=torch.float32), ragged_prompts((5, 6))
    draft = noisy_copy(tiny_model(dtype=torch.float32), 0.05)
    with pytest.warns(UserWarning, match="A step of MixtralForCausalLM could not be compiled"):
        outputs = target.generate_batch(prompts, assistant_model=draft, **compiled())
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=20)
    assert stand_in.replays > 3
