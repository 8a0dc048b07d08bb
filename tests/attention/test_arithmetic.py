"""Which models' attention the kernel computes: found by running it, not by names."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from support.models import LATENT, UNEQUAL, tiny_model
from transformers import PreTrainedModel

from hf_specdec.attention import supports_switching
from hf_specdec.attention.arithmetic import is_known
from hf_specdec.attention.functions import kernel_options


pytest.importorskip("hf_specdec_kernels")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {}) for name in ("llama", "gemma2", "gemma3_text", "gpt_oss", "gpt2", "phi")
} | UNEQUAL


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flash_attention_2"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.some_cases(16)
def test_families(name: str, implementation: str, is_paged: bool) -> None:
    family, values = MODELS[name]
    assert is_known(tiny_model(family, **values), implementation, is_paged)


@pytest.mark.parametrize("name", LATENT)
def test_latents_are_not_read_in_place(name: str) -> None:
    """Layers would expand all blocks of a paged cache."""
    family, values = LATENT[name]
    model = tiny_model(family, **values)
    assert is_known(model, "sdpa", is_paged=False) and not is_known(model, "sdpa", is_paged=True)


def test_models_with_an_attention_of_their_own() -> None:
    """GPT-J before transformers 5.24."""
    model = tiny_model("gptj")
    assert is_known(model, "eager") is supports_switching(model)


@pytest.mark.parametrize("is_paged", [False, True])
def test_large_heads(is_paged: bool) -> None:
    """Layers whose heads are too large for the kernel have the operator's plain version, each for itself."""
    family, values = UNEQUAL["gemma4"]
    model = tiny_model(family, **values | {"global_head_dim": 520})
    assert is_known(model, "sdpa", is_paged)


def scaled(right: Any) -> Any:
    """Scores are a little larger."""
    return lambda *args, scaling=None, **options: right(*args, scaling=1.02 * scaling, **options)


def without_cap(right: Any) -> Any:
    return lambda *args, softcap=None, **options: right(*args, **options)


def without_mask(right: Any) -> Any:
    return lambda module, query, key, value, mask, **options: right(module, query, key, value, None, **options)


def without_sinks(right: Any) -> Any:
    """Asks for sinks, and leaves them out."""

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **options: Any) -> Any:
        groups = module.num_key_value_groups
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        weights = (query @ key.transpose(2, 3) * scaling + mask).softmax(-1)
        return (weights @ value).transpose(1, 2), weights

    return attend


def of_two_shapes(right: Any) -> Any:
    return lambda *args, **options: (right(*args, **options)[0].flatten(2), None)


@pytest.mark.parametrize(
    "family, other",
    [
        ("llama", scaled),
        ("llama", without_mask),
        ("llama", of_two_shapes),
        ("gemma2", without_cap),
        ("gpt_oss", without_sinks),
    ],
)
def test_another_arithmetic(family: str, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "eager_attention_forward", other(module.eager_attention_forward))
    assert not is_known(model, "eager") and is_known(tiny_model(family), "sdpa")


def test_sdpa_leaves_out_caps_and_sinks() -> None:
    sinks = torch.ones(4)
    options = {"scaling": 0.5, "softcap": 30.0, "s_aux": sinks, "dropout": 0.0}
    assert kernel_options("eager", options) == {"scale": 0.5, "softcap": 30.0, "sinks": sinks}
    assert kernel_options("sdpa", options) == {"scale": 0.5, "softcap": None, "sinks": None}


def test_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_specdec.attention import arithmetic

    model: PreTrainedModel = tiny_model()
    assert is_known(model, "eager")
    monkeypatch.setattr(arithmetic, "layers_of", None)
    assert is_known(model, "eager")
