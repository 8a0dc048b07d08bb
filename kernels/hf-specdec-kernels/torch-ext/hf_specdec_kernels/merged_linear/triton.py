"""
Linear layers that share an input in Triton, for few rows: a program multiplies all rows with some rows of one weight.
What takes the time is reading the weights, once; the input comes from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ..compilation import launcher
from ..devices import can_overlap, options_of_launch, shared_memory_limit
from .naive import LARGEST_NUM_WEIGHTS


LARGEST_ROWS = 64
"""Most rows of the input, as in the sweep that chose the tiles; cuBLAS multiplies more."""


@dataclass(frozen=True)
class Tiles:
    """
    Sizes of a launch.

    Args:
        block_n (`int`): rows of a weight per program.
        block_k (`int`): input features per step.
        num_warps (`int`): warps of a program.
        num_stages (`int`): pipeline stages: steps whose loads are in flight at once.
    """

    block_n: int
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 6

    def shared_memory(self, block_m: int) -> int:
        """Shared memory of a program in bytes, with `block_m` rows of the input in half precision."""
        return 2 * self.num_stages * self.block_k * (block_m + self.block_n) + 2048

    def within(self, shared_memory: int, block_m: int) -> Tiles:
        """Tiles with fewer steps in flight, as far as needed to fit into `shared_memory` bytes."""
        tiles = self
        while tiles.num_stages > 1 and tiles.shared_memory(block_m) > shared_memory:
            tiles = replace(tiles, num_stages=tiles.num_stages - 1)
        return tiles


FEWEST_PROGRAMS = 96
"""Programs that are wanted at least, as long as their tiles do not become too narrow."""
MANY_PROGRAMS = 256
"""Programs from which on several share a multiprocessor, so that each needs fewer loads in flight."""


def choose_tiles(columns: int) -> Tiles:
    """
    The tiles for so many rows of all weights together: wide ones read the input less often. The fastest of a sweep on
    an H200, for weights of Llama-3.1-8B and SmolLM2-135M.
    """
    block_n = next((size for size in (64, 32) if columns >= size * FEWEST_PROGRAMS), 16)
    if columns >= block_n * MANY_PROGRAMS:
        return Tiles(block_n, block_k=64, num_stages=3)
    return Tiles(block_n)


@triton.jit(do_not_specialize=["rows"])
def _merged_linear_kernel(
    input, weight_0, weight_1, weight_2, out_0, out_1, out_2,
    rows, size_0, size_1, size_2, tiles_0, tiles_1, input_stride,
    FEATURES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (tile): the products of all rows with one tile of BLOCK_N rows of one weight, counted through them."""
    tile = tl.program_id(0)
    if tile < tiles_0:
        weight, out, size = weight_0, out_0, size_0
    elif tile < tiles_0 + tiles_1:
        weight, out, size, tile = weight_1, out_1, size_1, tile - tiles_0
    else:
        weight, out, size, tile = weight_2, out_2, size_2, tile - tiles_0 - tiles_1
    row = tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    feature = tl.arange(0, BLOCK_K)
    row_inside, column_inside = row < rows, column < size
    inputs = input + row[:, None].to(tl.int64) * input_stride + feature[None, :]
    weights = weight + column[None, :].to(tl.int64) * FEATURES + feature[:, None]
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # for the kernel before
        tl.extra.cuda.gdc_launch_dependents()
    products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, FEATURES, BLOCK_K):
        inside = (first + feature < FEATURES) | (FEATURES % BLOCK_K == 0)
        products = tl.dot(
            tl.load(inputs + first, mask=row_inside[:, None] & inside[None, :], other=0.0),
            tl.load(weights + first, mask=column_inside[None, :] & inside[:, None], other=0.0),
            products,
            input_precision=PRECISION,
        )
    tl.store(
        out + row[:, None] * size + column[None, :],
        products.to(out.dtype.element_ty),
        mask=row_inside[:, None] & column_inside[None, :],
    )


def suits(input: torch.Tensor, weights: list[torch.Tensor]) -> bool:
    """Whether the kernel takes these tensors: half precision, few rows, and weights in the usual layout."""
    rows = input.numel() // max(input.shape[-1], 1)
    return (
        input.dtype in (torch.bfloat16, torch.float16)
        and 0 < rows <= LARGEST_ROWS
        and all(weight.is_contiguous() and weight.shape[0] > 0 for weight in weights)
    )


def launch_merged_linear(
    input: torch.Tensor, weights: list[torch.Tensor], out: list[torch.Tensor], tiles: Tiles | None = None
) -> None:
    """See `hf_specdec_kernels.merged_linear`; writes to contiguous `out`. `tiles` replace the chosen ones."""
    flat = input.reshape(-1, input.shape[-1])
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    sizes = [weight.shape[0] for weight in weights]
    block_m = max(16, triton.next_power_of_2(len(flat)))
    if tiles is None:
        tiles = choose_tiles(sum(sizes)).within(shared_memory_limit(input.device), block_m)
    overlap = can_overlap(input.device)
    counts = [triton.cdiv(size, tiles.block_n) for size in sizes]
    missing = LARGEST_NUM_WEIGHTS - len(weights)
    launcher(_merged_linear_kernel, (sum(counts),))(
        flat, *weights, *weights[:1] * missing, *out, *out[:1] * missing,
        len(flat), *sizes, *[0] * missing, *(*counts, 0)[:2], flat.stride(0),
        FEATURES=flat.shape[1], BLOCK_M=block_m,
        BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
        PRECISION="ieee" if input.dtype == torch.float32 else "tf32", OVERLAP=overlap,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **options_of_launch(overlap),
    )  # fmt: skip
