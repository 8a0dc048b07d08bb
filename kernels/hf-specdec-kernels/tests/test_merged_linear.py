"""Linear layers that share an input, in Triton against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hf_specdec_kernels.merged_linear import merged_linear
from hf_specdec_kernels.merged_linear import triton as in_triton
from hf_specdec_kernels.merged_linear.naive import merged_linear_naive


SMALL = in_triton.Tiles(block_n=16, block_k=32, num_stages=2)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def compare(input: torch.Tensor, weights: list[torch.Tensor], tiles: in_triton.Tiles | None = SMALL) -> None:
    out = [torch.empty(*input.shape[:-1], len(weight), dtype=input.dtype, device=input.device) for weight in weights]
    in_triton.launch_merged_linear(input, weights, out, tiles)
    expected = merged_linear_naive(input.double(), [weight.double() for weight in weights])
    for found, wanted in zip(out, expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[input.dtype], rtol=TOLERANCE[input.dtype])


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape).div(shape[-1] ** 0.5).to(device, dtype)


# Triton's interpreter multiplies no matrices in bfloat16.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(40, 16, 24), (48, 5), (33,)], ids=str)
@pytest.mark.parametrize("rows, features", [((1, 1), 64), ((2, 9), 70), ((37,), 96)])
def test_against_naive(
    rows: tuple[int, ...], features: int, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    input = 4 * random(*rows, features, dtype=dtype, device=device)
    compare(input, [random(size, features, dtype=dtype, device=device) for size in sizes])


def test_inputs_that_are_parts_of_others(device: torch.device) -> None:
    whole = random(3, 40, 64, dtype=torch.float16, device=device)
    weights = [random(size, 64, dtype=torch.float16, device=device) for size in (20, 20)]
    compare(whole[1:, 4:20:3], weights)
    compare(whole[0, :, :32].T, [random(7, 40, dtype=torch.float16, device=device)])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6, 16, 33, 64])
@pytest.mark.parametrize("features, sizes", [(4096, (4096, 1024, 1024)), (576, (576, 192, 192)), (4096, (14336,) * 2)])
def test_sizes_of_models(rows: int, features: int, sizes: tuple[int, ...], device: torch.device) -> None:
    input = 4 * random(1, rows, features, dtype=torch.bfloat16, device=device)
    compare(input, [random(size, features, dtype=torch.bfloat16, device=device) for size in sizes], None)


def test_what_suits(device: torch.device) -> None:
    def suits(rows: int, dtype: torch.dtype = torch.bfloat16, transposed: bool = False) -> bool:
        weight = torch.zeros(32, 32, dtype=dtype, device=device)[:, :16]
        weight = weight.T.contiguous().T if transposed else weight.contiguous()
        return in_triton.suits(torch.zeros(rows, 16, dtype=dtype, device=device), [weight])

    assert suits(1) and suits(64) and suits(64, torch.float16)
    assert not suits(65) and not suits(0) and not suits(4, torch.float32) and not suits(4, transposed=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 64, 65])
@pytest.mark.parametrize("layout", ["usual", "transposed weights", "rows apart"])
def test_operator(rows: int, layout: str, device: torch.device) -> None:
    """With and without the kernel, called and compiled."""
    torch._dynamo.reset()  # every case compiles anew, of which there are more than torch allows for one function
    input = random(rows, 4, 128, dtype=torch.bfloat16, device=device)
    input = input[:, 1:2] if layout == "rows apart" else input[:, 0].contiguous()
    weights = [random(size, 128, dtype=torch.bfloat16, device=device) for size in (96, 32)]
    if layout == "transposed weights":
        weights = [weight.T.contiguous().T for weight in weights]
    compiled = torch.compile(lambda *tensors: merged_linear(tensors[0], tensors[1:]), fullgraph=True)
    expected = merged_linear_naive(input.double(), [weight.double() for weight in weights])
    for found in (merged_linear(input, weights), compiled(input, *weights)):
        for product, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(product.double(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_overlapping_launches(device: torch.device) -> None:
    """Layers captured in sequence, each of which reads what the last one wrote: the same as one after the other."""
    input = random(1, 33, 576, dtype=torch.bfloat16, device=device)
    layers = [random(576, 576, dtype=torch.bfloat16, device=device) * 1.5 for _ in range(40)]

    def run(after: Callable[[], None] = lambda: None) -> torch.Tensor:
        states = input
        for layer in layers:
            (states,) = merged_linear(states, [layer])
            after()
        return states

    expected = run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(50):
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("columns", [1, 96, 576, 960, 3072, 4096, 6144, 28672, 128256])
def test_tiles(columns: int) -> None:
    """Programs enough, unless tiles were narrower than the tensor cores; tiles that fit into any GPU's memory."""
    tiles = in_triton.choose_tiles(columns)
    assert columns >= tiles.block_n * in_triton.FEWEST_PROGRAMS or tiles.block_n == 16
    for kib in (227, 163, 99, 64):  # H200, A100, most others, T4
        for block_m in (16, 32, 64):
            fitting = tiles.within(kib * 1024, block_m)
            assert fitting.shared_memory(block_m) <= kib * 1024
            assert (
                fitting == tiles
                or replace(fitting, num_stages=fitting.num_stages + 1).shared_memory(block_m) > kib * 1024
            )
