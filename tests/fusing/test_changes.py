"""Modules that do more than they seem to, and those that change after they were fused, run by their own forwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from support.batches import limits
from support.fused import fused_kinds, fused_logits, logits
from support.graphs import install_stand_in
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR
from torch import nn
from transformers.models.llama import modeling_llama

from hf_specdec import SpeculativeConfig, kernels
from hf_specdec.forwards.outputs import over_trees
from hf_specdec.fusing import fused_layers, switch


pytest.importorskip("triton", reason="the kernels need triton")

WITHOUT_ONE_MLP = {"LlamaRMSNorm": 5, "LlamaAttention": 2, "LlamaMLP": 1}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels in their plain versions."""
    monkeypatch.setitem(kernels.DEVICES, "cpu", (torch.float32, torch.bfloat16, torch.float16))


@pytest.fixture
def llama() -> Any:
    return tiny_model("llama", dtype=torch.float32)


class ScalesInput(modeling_llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = 0.5 * x
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class HasTwoInputs(modeling_llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x.roll(1, dims=1)))


class ClampsAt100(modeling_llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=100.0)) * self.up_proj(x))


class Learns(modeling_llama.LlamaMLP):
    """Its factor is a tensor that may change in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * self.act_fn.factor


@pytest.mark.parametrize("kind", [ScalesInput, HasTwoInputs, ClampsAt100, Learns])
def test_mlps_that_do_more(kind: type, llama: Any) -> None:
    mlp = llama.model.layers[0].mlp
    mlp.__class__ = kind
    mlp.act_fn.factor = nn.Parameter(torch.ones(()))
    mlp.gate_proj.weight.data *= 1e4
    assert fused_kinds(llama) == WITHOUT_ONE_MLP
    mlp.act_fn.factor.data *= 2
    assert torch.equal(fused_logits(llama), logits(llama))


class Asserts(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        assert hidden_states.dim() == 3
        return super().forward(hidden_states)


def test_modules_that_take_no_numbers_of_ours(llama: Any) -> None:
    llama.model.norm.__class__ = Asserts
    assert fused_kinds(llama)["LlamaRMSNorm"] == 4
    assert torch.equal(fused_logits(llama), logits(llama))


class Rounds(modeling_llama.LlamaMLP):
    """Its activation is computed in float32, whatever its layers return."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).float()) * self.up_proj(x))


class Half(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).bfloat16()


def test_layers_of_another_dtype(llama: Any) -> None:
    """What was tried in one dtype is no promise for another one."""
    mlp = llama.model.layers[0].mlp
    mlp.__class__, mlp.gate_proj.__class__ = Rounds, Half
    assert fused_kinds(llama) == WITHOUT_ONE_MLP | {"Rounds": 1}
    assert torch.equal(fused_logits(llama), logits(llama))


def test_norms_of_another_size(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module's own forward refuses the input, or broadcasts its weight; the kernel would read past its end."""
    llama.model.norm, short = modeling_llama.LlamaRMSNorm(1), llama.model.layers[0].input_layernorm
    input = torch.randn(2, 7)
    expected = llama.model.norm(input)
    monkeypatch.setattr(import_module("hf_specdec_kernels.rms_norm"), "unchecked", None)  # would fail
    with torch.no_grad(), fused_layers(llama):
        assert torch.equal(llama.model.norm(input), expected)
        with pytest.raises(RuntimeError, match="must match"):
            short(input)


def times_two(states: torch.Tensor) -> torch.Tensor:
    return states * 1.0


class Scales(modeling_llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return times_two(self.factor * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


def change_factor(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp.factor = 0.5


def change_activation(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp.act_fn = nn.GELU()


def change_function_of_activation(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp.act_fn.function = nn.functional.relu


def change_forward_of_activation(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp.act_fn.forward = torch.sin


def change_function_of_file(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "times_two", lambda states: states * 2.0)


class Function(nn.Module):
    """An activation that is given as a function."""

    function = staticmethod(nn.functional.silu)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.function(input)


@pytest.mark.parametrize(
    "change",
    [
        change_factor,
        change_activation,
        change_function_of_activation,
        change_forward_of_activation,
        change_function_of_file,
    ],
)
def test_mlps_that_change(change: Callable[..., None], llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = llama.model.layers[0].mlp
    mlp.__class__, mlp.factor, mlp.act_fn = Scales, 1.0, Function()
    before = logits(llama)
    assert torch.equal(fused_logits(llama), before)
    assert fused_kinds(llama) == WITHOUT_ONE_MLP | {"Scales": 1}
    change(mlp, monkeypatch)
    assert torch.equal(fused_logits(llama), logits(llama)) and not torch.equal(logits(llama), before)
    assert fused_kinds(llama) == WITHOUT_ONE_MLP


def test_functions_under_the_rotary_embedding_that_change(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, turn = fused_logits(llama), modeling_llama.rotate_half
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda states: -turn(states))
    assert torch.equal(fused_logits(llama), logits(llama)) and not torch.equal(logits(llama), before)


def test_hooks_run(llama: Any) -> None:
    """Those of parts that a fused forward would pass by, too."""
    expected, called = fused_logits(llama), []
    handle = llama.model.layers[0].mlp.act_fn.register_forward_hook(lambda *args: called.append("activation"))
    assert torch.equal(fused_logits(llama), expected)
    assert called == ["activation"]
    handle.remove()
    with torch.nn.modules.module.register_module_forward_hook(lambda module, *args: called.append(type(module))):
        fused_logits(llama)
    assert type(llama.model.layers[0].mlp.act_fn) in called
    assert fused_kinds(llama)["LlamaMLP"] == 2


def test_gradients_inside(llama: Any) -> None:
    with torch.no_grad(), fused_layers(llama):
        with torch.enable_grad():
            llama(**prompts(2, 9)).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in llama.parameters())


def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models whose modules are looked at."""
    models: list[nn.Module] = []
    look = switch.fused_forwards
    monkeypatch.setattr(switch, "fused_forwards", lambda model: models.append(model) or look(model))
    return models


def test_modules_are_looked_at_once_for_a_call(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    models, expected = looked_at(monkeypatch), logits(llama)
    for _ in range(2):
        with over_trees(llama), over_trees(llama):
            for _ in range(3):
                assert torch.equal(fused_logits(llama), expected)
    assert len(models) == 2
    with over_trees(llama):
        fused_logits(llama)
        with over_trees(llama):  # another call, before which something may have changed
            fused_logits(llama)
        fused_logits(llama)
    assert len(models) == 4 and not switch._calls
    fused_logits(llama), fused_logits(llama)
    assert len(models) == 6


@pytest.mark.parametrize("path", ["generate", "manager"])
def test_changes_between_calls(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_model("llama", dtype=torch.float32)
    draft, prompt = noisy_copy(target, 0.05), prompts(1, 9)
    install_stand_in(monkeypatch, with_kernel=True)
    models = looked_at(monkeypatch)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    config = SpeculativeConfig(tree=IRREGULAR)

    def write(**assistant: Any) -> list[int]:
        if path == "generate" or not assistant:
            return target.generate(**prompt, **options, **assistant)[0, 9:].tolist()
        ids = prompt["input_ids"].tolist()
        outputs = target.generate_batch(ids, continuous_batching_config=limits(), **options, **assistant)
        return next(iter(outputs.values())).generated_tokens

    for activation in (nn.functional.silu, functools.partial(torch.mul, other=-0.7)):
        for layer in target.model.layers:
            layer.mlp.act_fn = Function()
            layer.mlp.act_fn.function = activation
        models.clear()
        plain = write()
        assert write(assistant_model=draft, speculative_config=config) == plain
        assert 0 < len(models) <= 4 and target in models
