"""Linear layers that share an input, merged where models are compiled."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.merges import noted_merges
from support.models import tiny_model
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from hf_specdec.compiling import layers, merged_linears


IDS = torch.tensor([[5, 9, 7, 12, 5, 30, 4]])


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Merges on the CPU, too; notes the number of calls in each merge."""
    pytest.importorskip("triton", reason="the kernels need triton")
    monkeypatch.setattr(layers, "COMPILER", "eager")
    torch._dynamo.reset()
    yield noted_merges(monkeypatch)
    torch._dynamo.reset()


@torch.no_grad()
def run(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    return torch.compile(model, backend=layers.compile_graph, fullgraph=True)(*inputs)


@torch.no_grad()
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_projections_of_a_model(compiler: str, merged: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Queries, keys and values, attention's output, and the MLP's two inputs of each layer, and the lm_head; the modules
    stay as they are.
    """
    monkeypatch.setattr(layers, "COMPILER", compiler)
    model = tiny_model("llama", dtype=torch.float32)
    weights = {name: (weight.data_ptr(), weight.clone()) for name, weight in model.named_parameters()}
    expected = model(IDS).logits
    found = layers.compiled_whole(model)(IDS).logits
    assert merged == [3, 1, 2] * model.config.num_hidden_layers + [1]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for name, weight in model.named_parameters():
        assert weight.data_ptr() == weights[name][0] and torch.equal(weight, weights[name][1])


@torch.no_grad()
def test_layers_compiled_one_by_one(merged: list[int]) -> None:
    model = tiny_model("llama", dtype=torch.float32)
    expected = model(IDS).logits
    with layers.compiled_layers(model, SimpleNamespace(update=print)):
        found = model(IDS, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert sorted(set(merged)) == [1, 2, 3]


class Several(nn.Module):
    """As many layers with one input as `sizes`, and one after them."""

    def __init__(self, *sizes: int, bias: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, size, bias=bias) for size in sizes)
        self.last = nn.Linear(sum(sizes), 3, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([layer(input) for layer in self.layers], dim=-1))


@pytest.mark.parametrize(
    "sizes, groups", [((7,), []), ((8,), [1]), ((5, 6), [2]), ((3,) * 4, [3]), ((8,) * 4, [3, 1])], ids=str
)
def test_numbers_of_layers(sizes: tuple[int, ...], groups: list[int], merged: list[int]) -> None:
    model, input = Several(*sizes), torch.randn(2, 4, 8)
    torch.testing.assert_close(run(model, input), model(input))
    assert merged == groups


def test_what_is_not_merged(merged: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(Several):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.cat([nn.functional.linear(input, 2 * layer.weight) for layer in self.layers], dim=-1)

    class OneByOne(Several):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.cat([layer(input + place) for place, layer in enumerate(self.layers)], dim=-1)

    class Vectors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vectors = nn.ParameterList(torch.randn(8) for _ in range(2))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.stack([nn.functional.linear(input, vector) for vector in self.vectors])

    class InBFloat16(Several):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(input)

    input = torch.randn(4, 8)
    monkeypatch.setattr(merged_linears, "DTYPES", {"cpu": (torch.float32, torch.bfloat16)})
    unusual = (Scaled(5, 6), OneByOne(5, 6), Vectors(), InBFloat16(5, 6), Several(5, 6).double())
    for model in (Several(5, 6, bias=True), *unusual):
        own = input.to(next(model.parameters()).dtype)
        torch.testing.assert_close(run(model, own), model(own))
    assert merged == []
    monkeypatch.setattr(merged_linears, "MOST_BYTES", 4 * 8 * 10)
    monkeypatch.setattr(merged_linears, "MOST_BYTES_ALONE", 4 * 8 * 9)
    for sizes, expected in (((5, 6), []), ((5, 5), [2]), ((10,), []), ((9,), [1])):
        merged.clear()
        torch.testing.assert_close(run(model := Several(*sizes), input), model(input))
        assert merged == expected


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a method": lambda input, weight: input.add_(1),
    "a part": lambda input, weight: input[:2].fill_(0),
    "an assignment": lambda input, weight: input.__setitem__(slice(2), 0),
    "an operator": lambda input, weight: operator.imul(input, 2),
    "an option": lambda input, weight: nn.functional.relu(input, inplace=True),
    "an option by position": lambda input, weight: nn.functional.relu(input, True),
    "out": lambda input, weight: torch.add(input, 1, out=input),
    "a function": lambda input, weight: torch.relu_(input),
    "an operator of aten": lambda input, weight: torch.ops.aten.add_.Tensor(input, 1),
    "the weight": lambda input, weight: weight.mul_(2),
}


@torch.no_grad()
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_between_layers(write: Callable[..., Any], merged: list[int]) -> None:
    """Calls are not moved past anything that changes what they read."""

    def run(input: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        before = nn.functional.linear(input, first)
        write(input, second)
        return before + nn.functional.linear(input, second)

    tensors = torch.randn(4, 8), torch.randn(5, 8), torch.randn(5, 8)
    expected = run(*[tensor.clone() for tensor in tensors])
    found = torch.compile(run, backend=layers.compile_graph, fullgraph=True)(*tensors)
    torch.testing.assert_close(found, expected)
    assert merged == []


def test_weights_of_other_classes(merged: list[int]) -> None:
    """Such as quantized and sharded ones, which have no implementation of the operator."""
    model, input = Several(5, 6), torch.randn(4, 8)
    expected = model(input)
    for layer in model.layers:
        layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach()))
    found = run(model, input)
    torch.testing.assert_close(found.a if isinstance(found, TwoTensor) else found, expected)
    assert merged == []


def test_gradients(merged: list[int]) -> None:
    model, input = Several(5, 6), torch.randn(4, 8)
    torch.compile(model, backend=layers.compile_graph, fullgraph=True)(input).sum().backward()
    assert merged == [] and all(layer.weight.grad is not None for layer in model.layers)


@pytest.mark.slow
@pytest.mark.any_version
def test_compiled_graphs_can_be_stored(merged: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """
    So that the next process need not compile them. (torch looks at what methods are called on; these views need no
    C++ compiler.)
    """

    class Viewed(Several):
        def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(layer(input).unsqueeze(0) for layer in self.layers)

    monkeypatch.setattr(layers, "COMPILER", "inductor")
    counters = torch._dynamo.utils.counters["aot_autograd"]
    counters.clear()
    run(Viewed(5, 6), torch.randn(4, 8))
    assert merged == [2] and counters["autograd_cache_bypass"] == 0
    assert counters["autograd_cache_miss"] + counters["autograd_cache_hit"] == 1


def test_other_devices(merged: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_linears, "DTYPES", {"cuda": (torch.float32,)})
    run(Several(5, 6), torch.randn(4, 8))
    assert merged == []
