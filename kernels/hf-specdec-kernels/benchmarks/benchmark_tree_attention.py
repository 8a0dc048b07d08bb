"""
P6: times tree attention with 32 query heads, 8 K/V heads, head dimension 128, bfloat16, 8,192 committed slots.

    python benchmarks/benchmark_tree_attention.py            # the table
    python benchmarks/benchmark_tree_attention.py --sweep    # tries other tiles and splits, for about a minute
    python benchmarks/benchmark_tree_attention.py --sweep 20 --batch 1
    python benchmarks/benchmark_tree_attention.py --small    # other shapes: short texts, few nodes, small models

Floors: the bytes of keys and values over the measured copy bandwidth, and the FLOPs over 780 TFLOP/s. Peers: sdpa with
a dense mask, as transformers calls it (K/V repeated) and with grouped queries, and compiled flex_attention. Equality
with the naive version is checked first. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from time import perf_counter
from typing import Any

import torch
from measuring import Time, attempt, copies_needed, copy_bandwidth, environment, require_cuda, time_calls

from hf_specdec_kernels import pack_ancestors, tree_attention
from hf_specdec_kernels.tree_attention.naive import tree_attention_naive, visible_slots
from hf_specdec_kernels.tree_attention.tiles import Tiles


HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 32, 8, 128, 8192
TENSOR_FLOPS = 780e12
SETTINGS = [(batch, nodes) for batch in (1, 16) for nodes in (16, 64)]
LLAMA, SMOLLM = (32, 8, 128), (9, 3, 64)
SMALL = [(1, 33, 640, LLAMA), (1, 5, 640, LLAMA), (1, 60, 460, SMOLLM), (1, 9, 240, SMOLLM)]
SMALL += [(1, 64, 640, LLAMA), (4, 33, 640, LLAMA), (1, 33, 2000, LLAMA), (1, 5, 2000, LLAMA), (1, 5, 8192, LLAMA)]
SMALL += [(16, 5, 8192, LLAMA), (16, 1, 8192, LLAMA)]
"""Batch, nodes, committed slots, and shape of the model's attention: query heads, K/V heads and head dimension."""


class Setting:
    """Inputs of one row of the table, in so many copies that none is in the L2 cache when it is read again."""

    def __init__(
        self,
        batch: int,
        nodes: int,
        context: int = CONTEXT,
        heads: tuple[int, int, int] = (HEADS, KV_HEADS, HEAD_DIM),
        dtype: torch.dtype = torch.bfloat16,
    ):
        self.batch, self.nodes, self.context = batch, nodes, context
        query_heads, kv_heads, head_dim = heads
        shape = (batch, kv_heads, context + nodes, head_dim)
        self.kv_bytes = 2 * dtype.itemsize * batch * kv_heads * (context + nodes) * head_dim
        self.flops = 4 * batch * query_heads * nodes * (context + nodes) * head_dim
        copies = copies_needed(self.kv_bytes)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=dtype)

        self.caches = [(random(*shape), random(*shape)) for _ in range(copies)]
        self.query = random(batch, nodes, query_heads, head_dim).transpose(1, 2)
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        self.ancestors = random_tree(nodes)
        self.words = pack_ancestors(self.ancestors)
        self.mask = visible_slots(context + nodes, self.lengths, self.words, nodes, None, None, None, None)

    def calls(self, call: Callable[..., Any]) -> list[Callable[[], Any]]:
        """One call for each copy of the keys and values."""
        return [lambda key=key, value=value: call(key, value) for key, value in self.caches]

    def ours(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return tree_attention(self.query, key, value, self.lengths, self.words)

    def sdpa_repeated(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key, value = (states.repeat_interleave(HEADS // KV_HEADS, dim=1) for states in (key, value))
        mask = self.mask[:, None]
        return torch.nn.functional.scaled_dot_product_attention(self.query, key, value, attn_mask=mask)

    def sdpa_grouped(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mask = self.mask[:, None]
        return torch.nn.functional.scaled_dot_product_attention(
            self.query, key, value, attn_mask=mask, enable_gqa=True
        )

    def flex(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask, query = self.mask, self.query.contiguous()

        def visible(b, h, q, kv):
            return mask[b, q, kv]

        block_mask = create_block_mask(visible, self.batch, None, self.nodes, self.context + self.nodes)
        compiled = torch.compile(flex_attention)
        return lambda key, value: compiled(query, key, value, block_mask=block_mask, enable_gqa=True)

    def floor(self, bandwidth: float) -> float:
        """Lower bound of the time in milliseconds, from bytes and FLOPs; `bandwidth` in bytes per second."""
        return 1e3 * max(self.kv_bytes / bandwidth, self.flops / TENSOR_FLOPS)


def random_tree(nodes: int) -> torch.Tensor:
    """Ancestors `[1, nodes, nodes]` of a random tree."""
    generator = torch.Generator().manual_seed(0)
    ancestors = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        ancestors[node] |= ancestors[torch.randint(max(0, node - 8), node, (), generator=generator)]
    return ancestors[None].cuda()


def check() -> None:
    """Checks equality with the naive version: close in float32, within rounding in bfloat16."""
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 1e-2)):
        setting = Setting(2, 24, context=1500, dtype=dtype)
        key, value = setting.caches[0]
        found = setting.ours(key, value)
        arguments = (setting.query.double(), key.double(), value.double(), setting.lengths, setting.words, 24)
        expected = tree_attention_naive(*arguments, scale=HEAD_DIM**-0.5)
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    print("equal to the naive version in float32 and, within rounding, in bfloat16")


def measure(setting: Setting, bandwidth: float) -> dict[str, Any]:
    """Times tree attention and its peers in one setting; returns one row of the table."""
    ours = time_calls(setting.calls(setting.ours))
    floor = setting.floor(bandwidth)
    peers = {
        "sdpa, K/V repeated": lambda: time_calls(setting.calls(setting.sdpa_repeated)),
        "sdpa, grouped": lambda: time_calls(setting.calls(setting.sdpa_grouped)),
        "flex_attention": lambda: time_calls(setting.calls(setting.flex())),
    }
    found: dict[str, Any] = {
        "batch": setting.batch,
        "nodes": setting.nodes,
        "ms": ours.median,
        "p20": ours.p20,
        "p80": ours.p80,
        "floor_ms": floor,
        "over_floor": ours.median / floor,
        "share_of_copy_bandwidth": setting.kv_bytes / (ours.median * 1e-3) / bandwidth,
        "tflops": setting.flops / (ours.median * 1e-3) / 1e12,
        "peers": {},
    }
    print(
        f"batch {setting.batch}, {setting.nodes} nodes: {ours}, {found['over_floor']:.2f} × the floor of {floor:.4f}"
    )
    bandwidth_and_flops = f"{found['share_of_copy_bandwidth']:.0%} of copy bandwidth, {found['tflops']:.0f} TFLOP/s"
    print(f"  {bandwidth_and_flops}")
    for name, run in peers.items():
        peer = attempt(name, run)
        if peer is not None:
            found["peers"][name] = {"ms": peer.median, "over_ours": peer.median / ours.median}
            print(f"  {name}: {peer}, {peer.median / ours.median:.1f} × ours")
    return found


def measure_small(bandwidth: float) -> list[dict[str, Any]]:
    """Times tree attention in the settings of SMALL, beside the floor; returns a row for each."""
    rows = []
    for batch, nodes, context, heads in SMALL:
        setting = Setting(batch, nodes, context, heads)
        ours = time_calls(setting.calls(setting.ours), replays=100)
        floor = setting.floor(bandwidth)
        shape = "{} query heads on {} of dimension {}".format(*heads)
        print(f"batch {batch}, {nodes} nodes after {context} slots, {shape}: {ours}, floor {floor:.4f}")
        row = {"batch": batch, "nodes": nodes, "context": context, "heads": heads}
        rows.append(row | {"ms": ours.median, "floor_ms": floor})
    return rows


NARROW = [(64, 32, 4, 6), (64, 64, 4, 4), (64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 3), (64, 32, 4, 4)]
WIDE = [(64, 64, 4, 3), (128, 64, 8, 3, 2), (128, 64, 8, 3), (128, 64, 8, 2, 2), (64, 64, 4, 2), (64, 32, 4, 4)]
WIDE += [(256, 64, 16, 2), (128, 64, 8, 2), (256, 64, 16, 3), (64, 64, 4, 2, 2), (256, 64, 8, 2)]
"""
Tiles to try for 64 and 256 (node, query head) pairs per K/V head: pairs of a program, keys of a block, warps, stages,
and blocks of a step. The chosen ones come first.
"""
SPLITS = (1, 2, 4, 8, 12, 16, 24, 33)


def sweep(setting: Setting, seconds: float) -> dict[str, Any] | None:
    """
    Times tiles and splits for `seconds`. Prints the five fastest, and returns the fastest (None if nothing ran).
    """
    from hf_specdec_kernels.tree_attention.triton import launch_tree_attention

    out = setting.query.new_empty(setting.batch, setting.nodes, HEADS, HEAD_DIM)
    expected = setting.ours(*setting.caches[0])
    found: list[tuple[Time, Tiles, int]] = []

    def try_out(tiles: Tiles, splits: int) -> None:
        def call(key: torch.Tensor, value: torch.Tensor) -> None:
            launch_tree_attention(
                setting.query, key, value, setting.lengths, setting.words, setting.nodes, None, None, None, None, None,
                HEAD_DIM**-0.5, None, None, splits, out, tiles,
            )  # fmt: skip

        def timed() -> Time:
            call(*setting.caches[0])
            torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
            return time_calls(setting.calls(call), replays=10)

        time = attempt(f"{tiles}, {splits} splits", timed)
        if time is not None:
            found.append((time, tiles, splits))

    end = perf_counter() + seconds
    tiles_per_head = NARROW if setting.nodes * HEADS // KV_HEADS <= 64 else WIDE
    for place, sizes in enumerate(tiles_per_head):
        for splits in SPLITS:
            programs = setting.batch * KV_HEADS * splits * -(-setting.nodes * HEADS // KV_HEADS // sizes[0])
            if 100 <= programs <= 1100 and (place == 0 or perf_counter() < end):
                try_out(Tiles(*sizes[:4], 1, *sizes[4:]), splits)
    found.sort(key=lambda entry: entry[0].median)
    print(f"batch {setting.batch}, {setting.nodes} nodes: {len(found)} tried")
    for time, tiles, splits in found[:5]:
        keys = f"{tiles.blocks_of_step} · {tiles.block_n}"
        shape = f"{tiles.block_m} × {keys}, {tiles.num_warps} warps, {tiles.num_stages} stages"
        print(f"    {time}: {shape}, {splits} splits")
    if not found:
        return None
    time, tiles, splits = found[0]
    return {"batch": setting.batch, "nodes": setting.nodes, "ms": time.median, "splits": splits, **asdict(tiles)}


@torch.inference_mode()
def main() -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Tree attention against its floors and peers.")
    parser.add_argument("--sweep", nargs="?", type=float, const=60.0, help="seconds for other tiles and splits")
    parser.add_argument("--small", action="store_true", help="short texts, few nodes and small models")
    parser.add_argument("--batch", type=int, choices=(1, 16), help="this batch size alone")
    options = parser.parse_args()
    if options.small and (options.sweep is not None or options.batch is not None):
        parser.error("--small measures shapes of its own: give it without --sweep and --batch.")
    settings = [(batch, nodes) for batch, nodes in SETTINGS if options.batch in (None, batch)]
    require_cuda()
    torch.manual_seed(0)
    check()
    bandwidth = copy_bandwidth()
    print(f"{environment()}\ncopy bandwidth {bandwidth / 1e12:.2f} TB/s (read + write)")
    if options.small:
        found = {"small": measure_small(bandwidth), **environment()}
        print(json.dumps(found))
        return found
    rows, fastest = [], []
    for batch, nodes in settings:
        setting = Setting(batch, nodes)
        if options.sweep is None:
            rows.append(measure(setting, bandwidth))
        else:
            fastest.append(sweep(setting, options.sweep / len(settings)))
        del setting
        torch.cuda.empty_cache()
    if options.sweep is not None:
        print(json.dumps({"fastest": fastest, **environment()}))
        return {"fastest": fastest}
    narrow = [row["share_of_copy_bandwidth"] for row in rows if row["nodes"] == 16]
    wide = [row["over_floor"] for row in rows if row["nodes"] == 64]
    summary = f"16 nodes: {min(narrow):.0%} of copy bandwidth; 64 nodes: {max(wide):.2f} × the floor (batch 1 and 16)"
    found = {"summary": summary, "copy_bandwidth": bandwidth, **environment(), "rows": rows}
    print(summary)
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
