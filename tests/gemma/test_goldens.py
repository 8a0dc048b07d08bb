"""An assistant of Gemma 4 against numbers of transformers: logits, hidden states, and the drafts of every step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from support.goldens import TINY_TARGET
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdec import GemmaAssistant
from hf_specdec.drafters import ObservedDrafter, as_drafter
from hf_specdec.gemma.modeling_gemma import SharedKV


GOLDEN = TINY_TARGET.parent / "gemma4_assistant"


@cache
def the_pair() -> tuple[PreTrainedModel, GemmaAssistant, dict[str, torch.Tensor]]:
    """Target, assistant and expected arrays; no test may change them."""
    target = AutoModelForCausalLM.from_pretrained(GOLDEN / "target").eval()
    assistant = GemmaAssistant.from_pretrained(GOLDEN / "assistant").eval()
    return target, assistant, load_file(GOLDEN / "golden.safetensors")


@torch.no_grad()
def largest_difference() -> float:
    """Of logits and states of the chain after the prompt."""
    _, assistant, expected = the_pair()
    shared = {}
    for kind in assistant.layer_kinds:
        last = slice(-(assistant.window(kind) or 24), None)
        shared[kind] = SharedKV(*(expected[f"kv_{kind}_{name}"][:, :, last] for name in ("keys", "values")))
    states, differences = expected["feature"][:, -1:], []
    position = torch.tensor([[expected["input_ids"].shape[1]]])
    for place, embedding in enumerate(expected["chain_input_embeds"]):
        output = assistant(states, embedding[None, None], position, shared)
        states = output.hidden_states
        differences += [
            states[0, 0] - expected["chain_hidden"][place],
            output.logits[0, 0] - expected["chain_logits"][place],
        ]
    return max(float(difference.abs().max()) for difference in differences)


def test_hidden_states_and_logits() -> None:
    assert largest_difference() < 1e-4


def test_every_step_drafts_what_the_reference_drafts() -> None:
    target, assistant, expected = the_pair()
    steps: list[tuple[list[int], int]] = []
    drafter = ObservedDrafter(
        as_drafter(assistant), lambda tree, paths: steps.append((tree.tokens_list[0], len(paths[0] or ())))
    )
    inputs, new = expected["input_ids"], expected["output_ids"].shape[1] - expected["input_ids"].shape[1]
    output = target.generate(inputs, max_new_tokens=new, do_sample=False, assistant_model=drafter, tree="chain:3")
    assert output[:, : expected["greedy_ids"].shape[1]].equal(expected["greedy_ids"])
    drafted, accepted = expected["step_draft_tokens"].tolist(), expected["step_accept_length"].tolist()
    assert [tokens for tokens, _ in steps][: len(drafted)] == drafted[: len(steps)]
    assert [number for _, number in steps][: len(accepted) - 1] == accepted[:-1]


def shorter_window(monkeypatch: pytest.MonkeyPatch, assistant: GemmaAssistant) -> None:
    monkeypatch.setattr(assistant, "window", lambda kind: 16 if kind == "sliding_attention" else None)


def no_norm_after_attention(monkeypatch: pytest.MonkeyPatch, assistant: GemmaAssistant) -> None:
    for layer in assistant.model.layers:
        monkeypatch.setitem(layer._modules, "post_attention_layernorm", nn.Identity())


def no_last_norm(monkeypatch: pytest.MonkeyPatch, assistant: GemmaAssistant) -> None:
    monkeypatch.setitem(assistant.model._modules, "norm", nn.Identity())


@pytest.mark.parametrize("mistake", [shorter_window, no_norm_after_attention, no_last_norm])
def test_mistakes_are_seen(mistake: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch, the_pair()[1])
    assert largest_difference() > 0.1
