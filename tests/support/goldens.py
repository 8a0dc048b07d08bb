"""The trained model that comes with the tests."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import output_capturing


TINY_TARGET = Path(__file__).parent.parent / "goldens" / "tiny_target"
TEMPLATE = "{% for message in messages %}t5 t6 t7 {% endfor %}{% if add_generation_prompt %}t8{% endif %}"


_STATE: dict[str, Any] = {}
"""What the shared target was like when it was loaded."""


@lru_cache
def trained_target() -> PreTrainedModel:
    """A Llama with 512 tokens, in float32. All tests share it: none may change it (`assert_target_is_unchanged`)."""
    model = AutoModelForCausalLM.from_pretrained(TINY_TARGET).eval()
    _STATE.update(_state_of(model))
    return model


def assert_target_is_unchanged() -> None:
    """Asserts that the shared target has the config, weights and hooks that it was loaded with."""
    if _STATE:
        assert _state_of(trained_target()) == _STATE, "this test has changed the target that all share"


def _state_of(model: PreTrainedModel) -> dict[str, Any]:
    modules = list(model.modules())  # once: this runs after every test
    parameters = [one for module in modules for one in module._parameters.values() if one is not None]
    return {
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "generation": model.generation_config.to_dict(),
        "writes": [parameter._version for parameter in parameters],
        "training": [module.training for module in modules],
        "hooks": sum(len(module._forward_pre_hooks) + _num_hooks(module) for module in modules),
        "requires_grad": [parameter.requires_grad for parameter in parameters],
    }


def _num_hooks(module: torch.nn.Module) -> int:
    """Number of forward hooks; not those that transformers keeps after a call with `output_hidden_states`."""
    return sum(hook.__module__ != output_capturing.__name__ for hook in module._forward_hooks.values())


def trained_tokenizer() -> PreTrainedTokenizerBase:
    """Its tokenizer, which pads on the left: the caller's own."""
    return copy.deepcopy(_read_tokenizer())


@lru_cache
def _read_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TINY_TARGET, padding_side="left")


def trained_prompts() -> dict[str, Any]:
    """`prompts` (lists of ids of several lengths) and `greedy_64`, the ids that follow them: the caller's own."""
    return copy.deepcopy(_read_prompts())


@lru_cache
def _read_prompts() -> dict[str, Any]:
    return json.loads((TINY_TARGET / "prompts.json").read_text())


def save_chat_target(folder: Path) -> Path:
    """The trained target with a chat template that leaves no user's word in it."""
    trained_target().save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_TARGET, chat_template=TEMPLATE).save_pretrained(folder)
    return folder
