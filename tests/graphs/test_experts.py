"""Mixtures of experts in captured forwards, by a stand-in for CUDA graphs; `test_cuda.py` captures real ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.device_steps import install
from support.graphs import StandIn, install_stand_in
from support.models import noisy_copy, prompts, tiny_model
from support.parity import assert_same_text, plain_text
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_specdec import graphs
from hf_specdec.generation.static_batch import StaticBatch
from hf_specdec.graphs import experts, fingerprint_of, with_captured_experts
from hf_specdec.graphs.experts import MOST_TOKENS, NAME, captured_experts


TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"
# As published: many small experts of which a token goes to several, weights that are normed or not, shared experts.
MANY = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": MANY | {"shared_expert_intermediate_size": 48, "norm_topk_prob": False},
    "qwen3_moe": MANY | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "gpt_oss": {"num_local_experts": 32, "num_experts_per_tok": 4},
}
WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "bincount",
    "_grouped_mm",
    "grouped_mm_fallback",
}


class NeverWaits(TorchDispatchMode):
    """Raises where the host would wait for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = args[1] if func.overloadpacket is torch.ops.aten.index else ()
        if func.overloadpacket.__name__ in WAITING or any(
            one is not None and one.dtype == torch.bool for one in indices
        ):
            raise RuntimeError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def mixture(family: str, implementation: str = "eager", **options: Any) -> PreTrainedModel:
    model = tiny_model(family, num_hidden_layers=3, layer_types=None, **MIXTURES[family], **options)
    model.set_experts_implementation(implementation)
    return model


def experts_in(model: PreTrainedModel) -> Any:
    return next(module for module in model.modules() if hasattr(module, "down_proj") and hasattr(module, "has_gate"))


def implementation(model: PreTrainedModel) -> str:
    return model.config._experts_implementation


@pytest.mark.parametrize("tokens", [1, 2, 13, MOST_TOKENS + 1])
@pytest.mark.parametrize("family", MIXTURES)
def test_the_function(family: str, tokens: int) -> None:
    """Few tokens, a tree, a chunk of a prompt: the same sums as those of the eager loop."""
    module, generator = experts_in(mixture(family, dtype=torch.float64)), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
    chosen = torch.rand(tokens, module.num_experts, generator=generator).topk(2).indices
    states = torch.randn(tokens, module.down_proj.shape[1 if family != "gpt_oss" else 2], generator=generator).double()
    weights = torch.rand(tokens, 2, generator=generator).double()
    with torch.no_grad():
        torch.testing.assert_close(captured_experts(module, states, chosen, weights), module(states, chosen, weights))


def test_an_expert_that_overflows_for_others() -> None:
    module = experts_in(mixture("mixtral"))
    with torch.no_grad():
        module.down_proj[3].fill_(torch.inf)
        chosen = torch.tensor([[0, 1]] * 9)
        output = captured_experts(module, torch.randn(9, 32).double(), chosen, torch.ones(9, 2).double())
    assert output.isfinite().all()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Captures single forwards, and raises where one would wait for the device."""
    monkeypatch.setattr(StaticBatch, "obstacle", lambda call: "has tests of its own")
    found = install_stand_in(monkeypatch, with_kernel=False)

    def record(run: Callable[[], list[torch.Tensor]], *args: Any, **options: Any) -> Any:
        with NeverWaits():
            run()
        return found(run, *args, **options)

    monkeypatch.setitem(graphs.RECORDERS, "cpu", record)
    return found


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("own", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.some_cases(1)
def test_greedy_texts(family: str, own: str, rows: int, stand_in: StandIn) -> None:
    model = mixture(family, own, dtype=torch.float32)
    inputs = prompts(rows, 12, padding=rows > 1)
    expected = plain_text(model, inputs, max_new_tokens=20)
    assert_same_text(model, inputs, noisy_copy(model, 0.05), TREE, expected, max_new_tokens=20)
    assert stand_in.captures > 0 and stand_in.replays > 0
    assert implementation(model) == own


def test_experts_as_they_are_cannot_be_captured(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs.forwards, "with_captured_experts", lambda *models: nullcontext())
    model = mixture("mixtral")
    with pytest.warns(UserWarning, match="MixtralForCausalLM could not be captured .* waits for the device"):
        assert_same_text(model, prompts(1, 12), noisy_copy(model, 0.05), TREE, max_new_tokens=20)
    assert stand_in.captures == 0


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.some_cases(1)
def test_whole_steps(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the kernels need triton")
    steps, calls = install(monkeypatch, with_kernel=True), []
    run = experts._all_experts
    monkeypatch.setattr(experts, "_all_experts", lambda *given: calls.append(given[1].shape) or run(*given))
    model = mixture(family, dtype=torch.float32)
    assert_same_text(model, prompts(2, 12, padding=True), noisy_copy(model, 0.05), TREE, max_new_tokens=20)
    assert steps.replays > 0 and calls
    assert implementation(model) == "eager"


def test_a_setting_that_changes_drops_graphs() -> None:
    model = mixture("mixtral")
    before = fingerprint_of(model)
    with with_captured_experts(model):
        assert fingerprint_of(model) == before  # as another thread's call may ask
    model.set_experts_implementation("batched_mm")
    assert fingerprint_of(model) != before


def test_the_switch() -> None:
    """It is counted, for captures of several threads; what is set meanwhile stays."""
    model = mixture("mixtral")
    with with_captured_experts(model, model):  # as a target that drafts for itself
        with with_captured_experts(model):
            assert implementation(model) == NAME
        assert implementation(model) == NAME
    assert implementation(model) == "eager"
    with pytest.raises(RuntimeError, match="out of memory"), with_captured_experts(model):
        raise RuntimeError("out of memory")
    assert implementation(model) == "eager"
    with with_captured_experts(model):
        model.set_experts_implementation("batched_mm")
    assert implementation(model) == "batched_mm"


def test_what_is_left_as_it_is() -> None:
    """Functions that do not wait, or are somebody's own; quantized experts; models without any."""
    with with_captured_experts(model := mixture("mixtral", "batched_mm")):
        assert implementation(model) == "batched_mm"
    model = mixture("mixtral")
    experts_in(model).down_proj = torch.nn.Parameter(torch.zeros(8, 32, 48, dtype=torch.int8), requires_grad=False)
    with with_captured_experts(model):
        assert implementation(model) == "eager"
    with with_captured_experts(model := tiny_model()):
        assert implementation(model) != NAME


@pytest.mark.parametrize(
    "dtype, major, waits",
    [
        (torch.bfloat16, 9, False),
        (torch.bfloat16, 10, False),
        (torch.bfloat16, 8, True),
        (torch.bfloat16, 12, True),
        (torch.float16, 9, True),
    ],
)
def test_where_grouped_mm_waits(dtype: torch.dtype, major: int, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch loops over the groups on the host where it has no kernel for them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    weight = SimpleNamespace(device=torch.device("cuda"), dtype=dtype)
    assert experts._has_grouped_kernel(weight) is not waits
