"""Compiled steps: the same texts, by a compiler that only traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.device_steps import Steps, install
from support.goldens import trained_prompts, trained_target
from support.heads import BLOCK_KINDS, tiny_block_head, trained_head
from support.hybrids import draft_of, hybrid
from support.merges import noted_merges
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR
from torch._dynamo.utils import counters

import hf_specdec
from hf_specdec import SpeculativeConfig
from hf_specdec.compiling import layers


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of calls in each merge of linear layers."""
    return noted_merges(monkeypatch)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, merged: list[int]) -> Iterator[Steps]:
    pytest.importorskip("triton", reason="the kernels need triton")
    monkeypatch.setattr(layers, "COMPILER", "eager")
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=256):  # the stand-in replays by running the code again
        yield install(monkeypatch, with_kernel=True, dispatches=True)
    torch._dynamo.reset()


SMALL = "[(0,), (1,), (0, 0)]"
"""Few levels: tracing takes a second and more for each."""


class NotTraced(torch.nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return torch.nn.functional.silu(states)


def compiled(tree: Any = IRREGULAR) -> SpeculativeConfig:
    return SpeculativeConfig(tree=tree, compile=True)


COMPILED = ("llama", "qwen3", "gemma3_text", "gpt2", "qwen3_5_text")


@pytest.mark.slow  # as most here: tracing takes minutes on a slow core
@pytest.mark.parametrize("family", COMPILED)
def test_draft_models(family: str, steps: Steps, merged: list[int], recwarn: pytest.WarningsRecorder) -> None:
    has_states = family == "qwen3_5_text"  # its layers are compiled, and not the whole model
    target = hybrid(family) if has_states else tiny_model(family, dtype=torch.float32)
    draft = draft_of([]) if has_states else noisy_copy(target, 0.05)
    for length in (9, 14):
        inputs = prompts(2, length, padding=True)
        plain = target.generate(**inputs, max_new_tokens=20, do_sample=False)
        options = {"max_new_tokens": 20, "do_sample": False, "assistant_model": draft}
        assert torch.equal(plain, target.generate(**inputs, **options, speculative_config=compiled(SMALL)))
    # The target's shape, and the draft's: levels, and catching up.
    assert counters["stats"]["unique_graphs"] >= 3 and steps.captures == 1
    assert {2, 3} <= set(merged) or family == "gpt2"  # which has no `linear` for queries, keys and values
    assert not [one for one in recwarn if "could not be" in str(one.message)]


def test_a_small_draft_model(steps: Steps, recwarn: pytest.WarningsRecorder) -> None:
    """The least that can be compiled: a layer of each, and one token drafted."""
    target = tiny_model(dtype=torch.float32, num_hidden_layers=1)
    options = {"max_new_tokens": 8, "do_sample": False, "assistant_model": noisy_copy(target, 0.05)}
    text = target.generate(**prompts(1, 9), **options, speculative_config=compiled("[(0,)]"))
    assert torch.equal(text, target.generate(**prompts(1, 9), max_new_tokens=8, do_sample=False))
    assert counters["stats"]["unique_graphs"] >= 2 and steps.captures == 1 and steps.replays > 1
    assert not [one for one in recwarn if "could not be" in str(one.message)]


@pytest.mark.slow
def test_heads(steps: Steps, recwarn: pytest.WarningsRecorder) -> None:
    """Their features come out of the compiled forward."""
    target, head = trained_target(), trained_head()
    ids = torch.tensor([prompt[:8] for prompt in trained_prompts()["prompts"][:2]])
    options = {"max_new_tokens": 24, "do_sample": False, "assistant_model": head}
    found = []
    for config in (SpeculativeConfig(tree=SMALL, cuda_graphs=False), compiled(SMALL)):
        text = target.generate(ids, attention_mask=torch.ones_like(ids), **options, speculative_config=config)
        found.append((text.tolist(), hf_specdec.last_metrics().accepted_per_step))
    assert found[0] == found[1] and steps.captures == 1
    assert counters["stats"]["unique_graphs"] >= 3
    assert not [one for one in recwarn if "could not be" in str(one.message)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(BLOCK_KINDS))
def test_block_heads(kind: str, steps: Steps, recwarn: pytest.WarningsRecorder) -> None:
    """One graph reads the context, another one is the block's."""
    target = tiny_model("llama", seed=1, dtype=torch.float32)
    head, inputs = tiny_block_head(target, **BLOCK_KINDS[kind]), prompts(2, 9, padding=True)
    options = {"max_new_tokens": 16, "do_sample": False}
    text = target.generate(**inputs, **options, assistant_model=head, speculative_config=compiled(SMALL))
    assert text.equal(target.generate(**inputs, **options))
    assert counters["stats"]["unique_graphs"] >= 3 and steps.captures == 1
    assert not [one for one in recwarn if "could not be" in str(one.message)]


@pytest.mark.slow
def test_short_prompts_take_the_compiled_step_of_long_ones(steps: Steps) -> None:
    """Also if an uncompiled call has captured a step over less memory in between."""
    target = tiny_model(dtype=torch.float32)
    draft = noisy_copy(target, 0.05)
    for length, config in ((140, compiled()), (9, SpeculativeConfig(tree=IRREGULAR)), (9, compiled())):
        inputs = prompts(1, length)
        plain = target.generate(**inputs, max_new_tokens=12, do_sample=False)
        options = {"max_new_tokens": 12, "do_sample": False, "assistant_model": draft, "speculative_config": config}
        assert torch.equal(plain, target.generate(**inputs, **options))
    assert steps.captures == 2


@pytest.mark.slow
def test_models_that_cannot_be_traced(steps: Steps) -> None:
    """One warning, and whole steps all the same."""
    target = tiny_model(dtype=torch.float32)
    inputs, draft = prompts(1, 9), noisy_copy(target, 0.05)
    target.model.layers[1].mlp.act_fn = NotTraced()
    options = {"max_new_tokens": 12, "do_sample": False, "assistant_model": draft, "speculative_config": compiled()}
    with pytest.warns(UserWarning, match="could not be compiled"):
        text = target.generate(**inputs, **options)
    assert torch.equal(text, target.generate(**inputs, max_new_tokens=12, do_sample=False))
    assert steps.captures == 1


@pytest.mark.slow
def test_shorter_texts_are_not_compiled_for(steps: Steps) -> None:
    """Steps for longer texts serve them."""
    target = tiny_model(dtype=torch.float32)
    draft = noisy_copy(target, 0.05)
    for num_tokens, captures in ((60, 1), (12, 1), (250, 2), (60, 2)):
        options = {**prompts(1, 9), "max_new_tokens": num_tokens, "do_sample": False}
        text = target.generate(**options, assistant_model=draft, speculative_config=compiled())
        assert torch.equal(text, target.generate(**options))
        assert steps.captures == captures
    target.generate(**options, assistant_model=draft, speculative_config=SpeculativeConfig(tree=IRREGULAR))
    target.generate(
        **options | {"max_new_tokens": 12}, assistant_model=draft, speculative_config=SpeculativeConfig(tree=IRREGULAR)
    )
    assert steps.captures == 3  # what is not compiled is a step of its own, and serves a third of its length


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"encoder_repetition_penalty": 1.3}, "a logits processor is none of those of captured steps"),
        ({"max_time": 100.0}, "the stopping criterion MaxTimeCriteria is asked after every token"),
        ({"return_dict_in_generate": True, "output_scores": True}, "scores are recorded"),
        ({"assistant_model": hf_specdec.NgramDraft()}, "NgramDraft drafts on the host"),
    ],
    ids=["processor", "criterion", "scores", "ngram"],
)
def test_calls_whose_steps_are_not_whole(options: dict[str, Any], reason: str, steps: Steps) -> None:
    target = tiny_model(dtype=torch.float32)
    call = {"max_new_tokens": 12, "do_sample": False, "assistant_model": noisy_copy(target, 0.05)} | options
    with pytest.warns(UserWarning, match=f"`compile=True` has no effect: the steps of this call .*, since {reason}"):
        target.generate(**prompts(1, 9), **call, speculative_config=compiled())
    assert steps.captures == 0


def test_without_graphs() -> None:
    with pytest.raises(ValueError, match="`compile=True` is for steps in CUDA graphs"):
        SpeculativeConfig(compile=True, cuda_graphs=False)
