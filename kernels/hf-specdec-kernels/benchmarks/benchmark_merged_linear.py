"""
Times linear layers that share an input, of models in bfloat16, against one call of `linear` for each.

    python benchmarks/benchmark_merged_linear.py            # the table
    python benchmarks/benchmark_merged_linear.py --sweep    # tries other tiles

The floor is the bytes of the weights over the measured copy bandwidth. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from measuring import Time, attempt, copies_needed, copy_bandwidth, environment, require_cuda, time_calls

from hf_specdec_kernels import merged_linear
from hf_specdec_kernels.merged_linear.naive import merged_linear_naive


LAYERS = {
    "Llama-3.1-8B, queries, keys, values": (4096, (4096, 1024, 1024)),
    "Llama-3.1-8B, attention's output": (4096, (4096,)),
    "Llama-3.1-8B, MLP's input": (4096, (14336, 14336)),
    "Llama-3.1-8B, MLP's output": (14336, (4096,)),
    "Llama-3.1-8B, lm_head": (4096, (128256,)),
    "SmolLM2-135M, queries, keys, values": (576, (576, 192, 192)),
    "SmolLM2-135M, attention's output": (576, (576,)),
    "SmolLM2-135M, MLP's input": (576, (1536, 1536)),
    "SmolLM2-135M, MLP's output": (1536, (576,)),
    "SmolLM2-135M, lm_head": (576, (49152,)),
}
ROWS = (1, 6, 16, 33, 64)


@dataclass
class Setting:
    """Inputs of one row of the table, in enough copies that no call finds its weights in the L2 cache."""

    name: str
    rows: int

    def __post_init__(self) -> None:
        features, sizes = LAYERS[self.name]
        self.bytes = 2 * features * sum(sizes)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5

        self.input = random(1, self.rows, features)
        copies = copies_needed(self.bytes)
        self.weights = [[random(size, features) for size in sizes] for _ in range(copies)]

    def time(self, call: Callable[..., Any], replays: int = 40) -> Time:
        """The time of a call with one copy of the weights."""
        return time_calls([lambda own=own: call(self.input, own) for own in self.weights], replays)

    def check(self, call: Callable[..., Any]) -> None:
        """Compares a call with the naive version in float64."""
        expected = merged_linear_naive(self.input.double(), [weight.double() for weight in self.weights[0]])
        for found, wanted in zip(call(self.input, self.weights[0]), expected, strict=True):
            torch.testing.assert_close(found.double(), wanted, atol=2e-2, rtol=2e-2)


def measure(setting: Setting, bandwidth: float) -> dict[str, Any]:
    """Times one setting; returns one row of the table."""
    setting.check(merged_linear)
    ours, apart = setting.time(merged_linear), setting.time(merged_linear_naive)
    floor = 1e3 * setting.bytes / bandwidth
    print(
        f"{setting.name}, {setting.rows} rows: {ours}, {ours.median / floor:.2f} × the floor; one by one {apart}, "
        f"{apart.median / ours.median:.2f} × ours"
    )
    return {"layers": setting.name, "rows": setting.rows, "ms": ours.median, "apart_ms": apart.median, "floor": floor}


def sweep(setting: Setting) -> None:
    """Times other tiles and prints the five fastest."""
    from hf_specdec_kernels.merged_linear.triton import Tiles, launch_merged_linear

    found: list[tuple[Time, Tiles]] = []
    out = merged_linear_naive(setting.input, setting.weights[0])
    for sizes in itertools.product((16, 32, 64), (64, 128), (4,), (3, 4, 6)):
        tiles = Tiles(*sizes)
        if (max(16, setting.rows) + tiles.block_n) * tiles.block_k * 2 * tiles.num_stages > 200_000:
            continue

        def call(input: torch.Tensor, weights: list[torch.Tensor], tiles: Any = tiles) -> list[torch.Tensor]:
            launch_merged_linear(input, weights, out, tiles)
            return out

        def timed(call: Any = call) -> Time:
            setting.check(call)
            return setting.time(call, replays=10)

        time = attempt(str(tiles), timed)
        if time is not None:
            found.append((time, tiles))
    for time, tiles in sorted(found, key=lambda entry: entry[0].median)[:5]:
        print(f"    {time}: {tiles}")


def main() -> list[dict[str, Any]]:
    """Measures all settings; returns the rows of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other tiles")
    parser.add_argument("--layers", nargs="+", choices=list(LAYERS), default=list(LAYERS), metavar="LAYERS")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    options = parser.parse_args()
    require_cuda()
    torch.manual_seed(0)
    bandwidth, rows = copy_bandwidth(), []
    print(f"{environment()}, copies at {bandwidth / 1e12:.2f} TB/s")
    for name, number in itertools.product(options.layers, options.rows):
        setting = Setting(name, number)
        rows.append(measure(setting, bandwidth))
        if options.sweep:
            sweep(setting)
    return rows


if __name__ == "__main__":
    found = main()
    print(json.dumps({"environment": environment(), "rows": found}))
