"""Fused layers: which modules are fused, that they compute what they did, and that models are left as they were."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fused import fused_kinds, fused_logits, logits
from support.graphs import install_stand_in
from support.hybrids import hybrid, is_known
from support.interpreted import run_interpreted
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR
from torch import nn
from transformers.models.llama import modeling_llama

import hf_specdec
from hf_specdec import kernels
from hf_specdec.fusing import fused_layers, own_layers, switch


pytest.importorskip("triton", reason="the kernels need triton")

NORMS = import_module("hf_specdec_kernels.rms_norm")
FUSED = {
    "llama": {"LlamaRMSNorm": 5, "LlamaAttention": 2, "LlamaMLP": 2},
    "qwen3": {"Qwen3RMSNorm": 9, "Qwen3Attention": 2, "Qwen3MLP": 2},
    "gemma": {"GemmaRMSNorm": 5, "GemmaAttention": 2, "GemmaMLP": 2},
    "olmo2": {"Olmo2RMSNorm": 9, "Olmo2Attention": 2, "Olmo2MLP": 2},
    "glm": {"GlmRMSNorm": 5, "GlmAttention": 2, "GlmMLP": 2},
    "cohere": {"CohereAttention": 2, "CohereMLP": 2},
    "gpt2": {},
}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels in their plain versions."""
    monkeypatch.setitem(kernels.DEVICES, "cpu", (torch.float32, torch.bfloat16, torch.float16))


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def llama(request: pytest.FixtureRequest) -> Any:
    return tiny_model("llama", dtype=request.param)


def replaced(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if "forward" in vars(module)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FUSED)
def test_families(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits are those of the model's own modules, and all that are known run by the operators."""
    model = tiny_model(family, dtype=dtype)
    expected = logits(model)
    assert fused_kinds(model) == FUSED[family]
    called: Counter[str] = Counter()
    for name in ("rms_norm", "gated_product", "rotary"):
        operator = import_module(f"hf_specdec_kernels.{name}").unchecked

        def counted(*args: Any, name: str = name, operator: Any = operator) -> Any:
            called[name] += 1
            return operator(*args)

        monkeypatch.setattr(import_module(f"hf_specdec_kernels.{name}"), "unchecked", counted)
    assert torch.equal(fused_logits(model), expected)
    kinds = {"rms_norm": "Norm", "gated_product": "MLP", "rotary": "Attention"}
    wanted = {op: sum(count for kind, count in FUSED[family].items() if kinds[op] in kind) for op in kinds}
    assert called == {op: count for op, count in wanted.items() if count}
    assert not replaced(model)


GATED = {
    "qwen3_next": ("Qwen3NextRMSNormGated", ("rounded", "silu", False)),
    "kimi_linear": ("KimiLinearRMSNormGated", ("exact", "sigmoid", False)),
    "mamba2": ("MambaRMSNormGated", ("rounded", "silu", True)),
}
"""The class of a family's gated norms; and scaling, activation and order, as bfloat16 shows them."""


@pytest.mark.parametrize("family", GATED)
def test_gated_norms(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits are those of the model's own modules. Without eps, or with another order, they are not."""
    if not is_known(family):
        pytest.skip("This release of transformers does not have the family.")
    name, way = GATED[family]
    model = copy.deepcopy(hybrid(family)).to(torch.bfloat16)
    number = fused_kinds(model)[name]
    norm = next(module for module in model.modules() if type(module).__name__ == name)
    states, gate = (1e-3 * torch.randn(2, 5, len(norm.weight)).to(torch.bfloat16) for _ in range(2))
    norm.weight.data.normal_()
    called: list[Any] = []
    package = import_module("hf_specdec_kernels.gated_rms_norm")
    right = package.unchecked
    changes: list[tuple[int, Any]] = [(3, 0.0), (7, not way[2]), (6, {"silu": "sigmoid", "sigmoid": "silu"}[way[1]])]
    for change in (None, *changes):

        def changed(*args: Any, change: tuple[int, Any] | None = change) -> Any:
            called.append(args[4:])
            given = list(args)
            if change is not None:
                given[change[0]] = change[1]
            return right(*given)

        monkeypatch.setattr(package, "unchecked", changed)
        with torch.no_grad():
            own = norm(states, gate)
            with fused_layers(model):
                assert torch.equal(norm(states, gate), own) == (change is None)
    size = len(norm.weight)  # 5.17 has no groups
    assert set(called) == {(size // getattr(norm, "group_size", size), *way)}
    model.float()
    monkeypatch.setattr(package, "unchecked", lambda *args: called.append(args) or right(*args))
    called.clear()
    assert torch.equal(fused_logits(model), logits(model))
    assert len(called) == number and not replaced(model)


@pytest.mark.parametrize("operator", ["rms_norm", "gated_product", "rotary"])
def test_wrong_operators_show(operator: str, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    package = import_module(f"hf_specdec_kernels.{operator}")
    right = package.unchecked

    def wrong(*args: Any) -> Any:
        if operator == "rms_norm":
            return right(args[0], args[1], 0.0, args[3])  # without eps
        return right(*args[:-1], "gelu_tanh") if operator == "gated_product" else right(*args[:4], "pairs", args[5])

    monkeypatch.setattr(package, "unchecked", wrong)
    assert not torch.equal(fused_logits(llama), logits(llama))


class RoundedLater(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        states = hidden_states.double()
        states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * states + 1e-2).to(hidden_states.dtype)


class Clamped(modeling_llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7.0)) * self.up_proj(x))


class Scaled(modeling_llama.LlamaMLP):
    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_other_arithmetic_is_left_alone(llama: Any) -> None:
    """Each module is tried by itself: of two layers of one class, one may be another."""
    llama.model.norm.__class__ = RoundedLater
    for layer, kind in zip(llama.model.layers, (Clamped, Scaled), strict=True):
        layer.mlp.__class__ = kind
    llama.model.layers[0].mlp.act_fn = nn.GELU()
    llama.model.layers[1].mlp.scale = 0.5
    assert fused_kinds(llama) == {"LlamaRMSNorm": 4, "LlamaAttention": 2}
    assert torch.equal(fused_logits(llama), logits(llama))
    llama.model.layers[1].mlp = copy.deepcopy(llama.model.layers[1].mlp)
    llama.model.layers[1].mlp.scale = 1.0  # a part has changed, and is tried again
    assert fused_kinds(llama) == {"LlamaRMSNorm": 4, "LlamaAttention": 2, "Scaled": 1}


def test_replaced_functions_are_left_alone(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards of a module or a class, and the function of a model file, that somebody else has put there."""
    called: list[str] = []

    def noted(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            called.append(name)
            return function(*args, **options)

        return call

    fused_logits(llama)
    llama.model.norm.forward = own = noted("norm", llama.model.norm.forward)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", noted("mlp", modeling_llama.LlamaMLP.forward))
    monkeypatch.setattr(
        modeling_llama.LlamaAttention, "forward", noted("attention", modeling_llama.LlamaAttention.forward)
    )
    rotary = noted("rotary", modeling_llama.apply_rotary_pos_emb)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotary)
    monkeypatch.setattr(modeling_llama, "repeat_kv", noted("repeat_kv", modeling_llama.repeat_kv))
    llama.set_attn_implementation("eager")
    fused_logits(llama)
    assert Counter(called) == {"norm": 1, "mlp": 2, "attention": 2, "rotary": 2, "repeat_kv": 4}
    assert vars(llama.model.norm)["forward"] is own and replaced(llama) == [llama.model.norm]


def test_restored_after_an_error(llama: Any) -> None:
    with pytest.raises(ZeroDivisionError), torch.no_grad(), fused_layers(llama), fused_layers(llama):
        assert len(replaced(llama)) == 9
        raise ZeroDivisionError
    assert not replaced(llama)


def test_only_our_forwards_are_fused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of other threads, of copies, and where gradients are recorded."""
    expected, found = logits(llama), []
    with torch.no_grad(), fused_layers(llama):
        monkeypatch.setattr(NORMS, "unchecked", None)  # would fail
        thread = threading.Thread(target=lambda: found.append(logits(llama)))
        thread.start()
        thread.join()
        copies = copy.deepcopy(llama), pickle.loads(pickle.dumps(llama))
        for one in copies:
            assert not any(vars(module)["forward"].__self__ is not module for module in replaced(one))
    for one in copies:
        found.append(logits(one))
    with fused_layers(llama):
        assert not replaced(llama)
        llama(**prompts(2, 9)).logits.sum().backward()
    assert llama.model.norm.weight.grad is not None
    assert len(found) == 3 and all(torch.equal(one, expected) for one in found)


def test_layers_that_run_compiled_are_left_alone(llama: Any) -> None:
    """A thread that runs them compiled waits for fused forwards of others, also over a model that shares layers."""
    other, begins, ends = copy.copy(llama), threading.Event(), threading.Event()
    seen: list[int] = []

    def compiled() -> None:
        begins.set()
        with own_layers(other):
            seen.append(len(replaced(llama)))
            with torch.no_grad(), fused_layers(llama):
                seen.append(len(replaced(llama)))
            ends.wait(10)

    thread = threading.Thread(target=compiled)
    with torch.no_grad(), fused_layers(llama):
        assert len(replaced(llama)) == 9
        thread.start()
        assert begins.wait(10)
        thread.join(0.1)
        assert not seen
    until = time.monotonic() + 10
    while len(seen) < 2 and time.monotonic() < until:
        thread.join(0.01)
    with torch.no_grad(), fused_layers(llama):
        assert not replaced(llama)
    ends.set()
    thread.join()
    with torch.no_grad(), fused_layers(llama), own_layers(llama):  # in one thread none waits for itself
        assert len(replaced(llama)) == 9
    assert seen == [0, 0] and not replaced(llama) and not switch._compiled


def test_other_dtypes_run_by_the_module() -> None:
    """Weights of another dtype than the states, and a model that is converted later."""
    model = tiny_model("llama", dtype=torch.float32)
    model.model.norm.to(torch.bfloat16)
    assert fused_kinds(model)["LlamaRMSNorm"] == 4
    assert torch.equal(fused_logits(model), logits(model))
    model.to(torch.float16)
    assert fused_kinds(model)["LlamaRMSNorm"] == 5
    assert torch.equal(fused_logits(model), logits(model))


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "no graphs"])
def test_calls(cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculative calls are fused where kernels run, and write the plain text."""
    target = tiny_model("qwen3", dtype=torch.float32)
    draft, called = noisy_copy(target, 0.05), []
    expected = target.generate(**prompts(2, 9), max_new_tokens=12, do_sample=False)
    install_stand_in(monkeypatch, with_kernel=True)
    norm = NORMS.unchecked
    monkeypatch.setattr(NORMS, "unchecked", lambda *args: called.append(1) or norm(*args))
    config = hf_specdec.SpeculativeConfig(tree=IRREGULAR, cuda_graphs=cuda_graphs)
    text = target.generate(
        **prompts(2, 9), max_new_tokens=12, do_sample=False, assistant_model=draft, speculative_config=config
    )
    assert text.tolist() == expected.tolist()
    assert bool(called) == cuda_graphs and not replaced(target) and not replaced(draft)


IN_TRITON = """
import sys
import torch
sys.path[:0] = sys.argv[1:]
from importlib import import_module
from torch._library.custom_ops import OPDEFS
from test_fusing import FUSED, GATED, fused_logits, hybrid, is_known, kernels, logits, tiny_model

ran = set()
for name in ("rms_norm", "gated_rms_norm", "gated_product", "rotary"):
    launch = getattr(import_module(f"hf_specdec_kernels.{name}.triton"), f"launch_{name}")
    operator = OPDEFS[f"hf_specdec_kernels::{name}"]
    operator.register_kernel("cpu", lambda *given, name=name, launch=launch: (ran.add(name), launch(*given))[1])
kernels.DEVICES["cpu"] = (torch.float32,)
for family in (*FUSED, *filter(is_known, GATED)):
    model = hybrid(family) if family in GATED else tiny_model(family, dtype=torch.float32)
    torch.testing.assert_close(fused_logits(model), logits(model), rtol=1e-5, atol=5e-5, msg=family)
print(sorted(ran))
"""


@pytest.mark.slow
def test_in_tritons_interpreter() -> None:
    """The kernels themselves, in whole models."""
    assert (
        run_interpreted(IN_TRITON, Path(__file__).parent)[0]
        == "['gated_product', 'gated_rms_norm', 'rms_norm', 'rotary']"
    )
