"""
Times the operators of state layers, of models in bfloat16, against the bytes that they move.

    python benchmarks/benchmark_state_kernels.py            # the table
    python benchmarks/benchmark_state_kernels.py --sweep --layers delta --rows 1 8 --nodes 1 8 32  # tries other tiles

The floor is the bytes over the copy bandwidth that is measured first. Every call has its own layer: no state, input or
pending node is in the L2 cache. A third of the nodes of a step, at most 5, is pending. The last line of the output is
JSON.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from measuring import Time, attempt, copies_needed, copy_bandwidth, environment, require_cuda, time_calls

from hf_specdec_kernels import (
    DeltaPending,
    PendingPath,
    ScanPending,
    conv_table,
    pack_ancestors,
    tree_ancestors,
    tree_conv,
    tree_delta_rule,
    tree_selective_scan,
    tree_ssd,
)
from hf_specdec_kernels.tree_delta_rule.triton import Tiles, launch_tree_delta_rule


NODES, ROWS = (1, 8, 32, 64), (1, 8, 64)
HALF = torch.bfloat16


@dataclass
class Step:
    """What all layers of a step share: rows, a tree with three children for each node, and a path that is pending."""

    nodes: int
    rows: int

    def __post_init__(self) -> None:
        parents = ((torch.arange(self.nodes) - 1) // 3).clamp(min=0)[None].cuda()
        self.depths, mask = tree_ancestors(parents, 8)
        self.ancestors, self.parents = pack_ancestors(mask), parents
        self.depth = int(self.depths.max())
        self.kept = max(1, min(5, self.depth + 1))
        path = [self.nodes - 1]
        while path[0]:
            path.insert(0, int(parents[0, path[0]]))
        kept = torch.tensor(path[: self.kept], device="cuda").expand(self.rows, -1)
        self.kept = kept.shape[1]
        slots = torch.randperm(self.rows, device="cuda")
        self.pending = PendingPath(slots, torch.zeros_like(slots), kept, torch.full_like(slots, self.kept))

    def random(self, *sizes: int, dtype: torch.dtype = HALF) -> torch.Tensor:
        """Random numbers of `[rows, nodes, *sizes]`."""
        return torch.randn(self.rows, self.nodes, *sizes, device="cuda", dtype=dtype)


@dataclass
class Call:
    """A call with its own tensors; `bytes` is what it must read and write."""

    run: Callable[[], Any]
    bytes: int


def size_of(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def delta_rule(
    step: Step, heads: int, key_heads: int, dim: int, channels: bool = False, tiles: Any = None, max_depth: Any = None
) -> Call:
    mixed = step.random((2 * key_heads + heads) * dim)
    query, key, value = (
        part.unflatten(2, (-1, dim)) for part in mixed.split((key_heads * dim, key_heads * dim, heads * dim), 2)
    )
    decay = -step.random(heads, *((dim,) if channels else ()), dtype=torch.float32).abs()
    beta, states = step.random(heads).sigmoid(), torch.randn(step.rows, heads, dim, dim, device="cuda")
    kept = DeltaPending(
        torch.stack([key.contiguous()] * 2), value.float() / 10, torch.stack([decay.cumsum(1)] * 2).contiguous()
    )
    moved = size_of(mixed, decay, beta, value, *kept[1:2], key, decay) + 2 * size_of(states)
    moved += step.kept * (size_of(key, decay) + size_of(kept.deltas)) // step.nodes
    arguments = (query, key, value, decay, beta, states)

    def run() -> torch.Tensor:
        if tiles is None:
            return tree_delta_rule(*arguments, kept, step.ancestors, step.pending, max_depth=step.depth)
        out = value.new_empty(value.shape)
        common = (step.ancestors, *step.pending, True, dim**-0.5, 64 if max_depth is None else max_depth)
        launch_tree_delta_rule(*arguments, *kept, *common, out, tiles)
        return out

    return Call(run, moved)


def convolution(step: Step, channels: int, taps: int) -> Call:
    x, windows = step.random(channels), torch.randn(step.rows, channels, taps, device="cuda", dtype=HALF)
    weight, kept = torch.randn(channels, taps, device="cuda", dtype=HALF), torch.randn_like(x)
    table = conv_table(step.parents, step.depths, taps)
    moved = 3 * size_of(x) + 2 * size_of(windows) + size_of(weight) + step.kept * size_of(x) // step.nodes
    run = lambda: tree_conv(x, weight, windows, kept, table, step.pending, activation="silu")  # noqa: E731
    return Call(run, moved)


def ssd(step: Step, heads: int, groups: int, head_dim: int, state_size: int) -> Call:
    x, keys, queries = step.random(heads, head_dim), *(step.random(groups, state_size) for _ in range(2))
    dt, rates = step.random(heads), -torch.rand(heads, device="cuda")
    states = torch.randn(step.rows, heads, head_dim, state_size, device="cuda")
    kept = DeltaPending(torch.stack([keys] * 2), x.float() / 10, torch.stack([-dt.float().abs().cumsum(1)] * 2))
    moved = size_of(x, x, keys, queries, keys, dt, kept.deltas, kept.decays[0]) + 2 * size_of(states)
    moved += step.kept * size_of(keys, kept.deltas, kept.decays[0]) // step.nodes
    run = lambda: tree_ssd(  # noqa: E731
        x, dt, rates, keys, queries, states, kept, step.ancestors, step.pending, dt_bias=rates, dt_softplus=True
    )
    return Call(run, moved)


def scan(step: Step, channels: int, state_size: int) -> Call:
    x, dt, gate = (step.random(channels) for _ in range(3))
    keys, queries = (step.random(1, state_size) for _ in range(2))
    rates = -torch.rand(channels, state_size, device="cuda")
    states = torch.randn(step.rows, channels, state_size, device="cuda")
    kept = ScanPending(torch.randn_like(x), dt.float().abs(), torch.stack([keys] * 2))
    moved = size_of(x, dt, gate, x, *kept[:2], rates, keys, keys, queries) + 2 * size_of(states)
    moved += step.kept * size_of(*kept[:2], keys) // step.nodes
    run = lambda: tree_selective_scan(  # noqa: E731
        x, dt, rates, keys, queries, states, kept, step.ancestors, step.pending, z=gate, dt_softplus=True
    )
    return Call(run, moved)


DELTA_RULES = {"Qwen3.5 4B-like, delta rule": (32, 16, 128), "Qwen3.6 27B-like, delta rule": (48, 16, 128)}
"""Heads, heads of keys and their dimension, of layers whose tiles can be tried."""
LAYERS: dict[str, Callable[[Step], Call]] = {
    "Qwen3.5 4B-like, delta rule": lambda step: delta_rule(step, *DELTA_RULES["Qwen3.5 4B-like, delta rule"]),
    "Qwen3.5 4B-like, convolution": lambda step: convolution(step, 8192, 4),
    "Qwen3.6 27B-like, delta rule": lambda step: delta_rule(step, *DELTA_RULES["Qwen3.6 27B-like, delta rule"]),
    "Qwen3.6 27B-like, convolution": lambda step: convolution(step, 10240, 4),
    "Kimi-Linear-like, channels": lambda step: delta_rule(step, 32, 32, 128, channels=True),
    "Nemotron-H 8B-like, SSD": lambda step: ssd(step, 128, 8, 64, 128),
    "Falcon-Mamba 7B-like, scan": lambda step: scan(step, 8192, 16),
}


def measure(name: str, step: Step, bandwidth: float) -> dict[str, Any]:
    """Times one layer of one step; returns one row of the table."""
    make = LAYERS[name]
    time, moved = timed(lambda: make(step))
    floor = 1e3 * moved / bandwidth
    print(
        f"{name}, {step.rows} rows, {step.nodes} nodes: {time}, {moved / 2**20:.1f} MiB, "
        f"{time.median / floor:.2f} × the floor"
    )
    return {"layer": name, "rows": step.rows, "nodes": step.nodes, "ms": time.median, "floor_ms": floor}


def timed(make: Callable[[], Call], replays: int = 30) -> tuple[Time, int]:
    """The time of a call, of enough copies, and its bytes."""
    first = make()
    calls = [first, *(make() for _ in range(min(copies_needed(first.bytes), 100) - 1))]
    return time_calls([call.run for call in calls], replays), first.bytes


def shortly_timed(make: Callable[[], Call]) -> Time:
    """The time of a call, of fewer replays."""
    return timed(make, 10)[0]


def sweep(name: str, step: Step, floor: float) -> None:
    """Times other tiles of a delta rule and prints them, the fastest first."""
    found: list[tuple[Time, Tiles]] = []
    stacks = (False, True) if step.nodes > 16 else (False,)
    for block_v, num_warps, stack in itertools.product((32, 64), (4, 8), stacks):
        tiles = Tiles(block_v, 2, num_warps, stack=stack)
        call = functools.partial(delta_rule, step, *DELTA_RULES[name], tiles=tiles, max_depth=step.depth)
        time = attempt(str(tiles), functools.partial(shortly_timed, call))
        if time is not None:
            found.append((time, tiles))
    for time, tiles in sorted(found, key=lambda entry: entry[0].median):
        print(f"    {time}, {time.median / floor:.2f} × the floor: {tiles}", flush=True)


def main() -> list[dict[str, Any]]:
    """Measures all settings; returns the rows of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other tiles of the delta rule")
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), metavar="PART", help="parts of layers' names")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--nodes", nargs="+", type=int, default=list(NODES))
    options = parser.parse_args()
    require_cuda()
    torch.manual_seed(0)
    bandwidth, found = copy_bandwidth(), []
    print(f"{environment()}, copies at {bandwidth / 1e12:.2f} TB/s")
    wanted = [name for name in LAYERS if any(part in name for part in options.layers)]
    for name, rows, nodes in itertools.product(wanted, options.rows, options.nodes):
        step = Step(nodes, rows)
        found.append(measure(name, step, bandwidth))
        if options.sweep and name in DELTA_RULES:
            sweep(name, step, found[-1]["floor_ms"])
    return found


if __name__ == "__main__":
    rows = main()
    print(json.dumps({"environment": environment(), "rows": rows}))
