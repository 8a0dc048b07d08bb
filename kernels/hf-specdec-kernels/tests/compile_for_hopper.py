"""
Compiles the kernels for an H100/H200 (sm_90) on a machine without a GPU, and prints the resources of each: registers,
bytes of local memory ("stack": spilled registers) and of shared memory. A kernel that needs more shared memory than
the device has, or than was planned, is an error, and one that is launched early and does not wait before it touches
memory.

    python tests/compile_for_hopper.py [part of a case's name]
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from hf_specdec_kernels import BudgetedLevel, triton_states
from hf_specdec_kernels.budgets.triton import launch_share_out
from hf_specdec_kernels.draft_losses import triton as draft_losses_launch
from hf_specdec_kernels.draft_tokens import triton as draft_tokens_launch
from hf_specdec_kernels.gated_product import ACTIVATIONS
from hf_specdec_kernels.gated_product import triton as gated_product_launch
from hf_specdec_kernels.gated_rms_norm import triton as gated_norm_launch
from hf_specdec_kernels.kv_compaction.triton import launch_kv_compaction
from hf_specdec_kernels.kv_writes import triton as kv_writes_launch
from hf_specdec_kernels.merged_linear import triton as merged_linear_launch
from hf_specdec_kernels.overlaps.triton import launch_draft_overlaps
from hf_specdec_kernels.pair_lists.triton import launch_pair_lists
from hf_specdec_kernels.rejection_sampling.triton import (
    launch_chosen_walk,
    launch_filter_logits,
    launch_rejection_walk,
    launch_target_walk,
)
from hf_specdec_kernels.rms_norm import SCALINGS
from hf_specdec_kernels.rms_norm import triton as rms_norm_launch
from hf_specdec_kernels.rotary import LAYOUTS
from hf_specdec_kernels.rotary import triton as rotary_launch
from hf_specdec_kernels.tree_attention import triton as tree_attention_launch
from hf_specdec_kernels.tree_attention.tiles import Launch, plan_launch
from hf_specdec_kernels.tree_conv import triton as tree_conv_launch
from hf_specdec_kernels.tree_delta_rule import triton as delta_rule_launch
from hf_specdec_kernels.tree_delta_rule.triton import Tiles
from hf_specdec_kernels.tree_growth.triton import launch_best_paths, launch_choose_nodes, launch_tree_ancestors
from hf_specdec_kernels.tree_selective_scan import triton as scan_launch
from hf_specdec_kernels.tree_ssd import triton as ssd_launch


LARGEST_SHARED_MEMORY = 227 * 1024
OF_A_MULTIPROCESSOR, OF_THE_SYSTEM = 228 * 1024, 1024
"""Bytes of shared memory of a multiprocessor, and bytes that are reserved for each of its programs."""
TOUCHES_MEMORY = re.compile(r"griddepcontrol\.wait|\b(?:ld|st|red|atom)\.(?:volatile\.)?global|\bcp\.async|\bprefetch")
"""What touches global memory in a kernel's PTX, and the wait."""


def compile_only(kernel: Any, grid: Any) -> Callable:
    """Replacement for `kernel[grid]`: a function that compiles the kernel and prints its resources, without launch."""

    def compile_and_report(*args: Any, **kwargs: Any) -> None:
        compiled = kernel.run(*args, grid=grid, warmup=True, **kwargs)
        uses = resources(compiled.asm["cubin"])
        shared = compiled.metadata.shared
        ptx = compiled.asm["ptx"]
        tensor_cores = "wgmma" if "wgmma.mma" in ptx else "mma" if "mma.sync" in ptx else "-"
        print(
            f"  {kernel.fn.__name__:<26} warps {kwargs.get('num_warps', 4)}  registers {uses['REG']:>3}  "
            f"stack {uses['STACK']:>5}  shared {shared:>6}  {tensor_cores}  grid {grid}"
        )
        if shared > LARGEST_SHARED_MEMORY:
            raise RuntimeError(f"{kernel.fn.__name__} needs {shared} bytes of shared memory.")
        if "BLOCKS_OF_STEP" in kwargs:
            check_plan(shared, kwargs["HEAD_DIM"], args[0].dtype.itemsize)
        if kwargs.get("launch_pdl") and TOUCHES_MEMORY.findall(ptx)[0] != "griddepcontrol.wait":
            raise RuntimeError(f"{kernel.fn.__name__} touches memory before it waits for the kernel before.")

    return compile_and_report


PLANNED: list[Launch] = []
"""Launches of tree attention, in order."""


def plan_and_note(*args: Any) -> Launch:
    PLANNED.append(plan_launch(*args))
    return PLANNED[-1]


def check_plan(shared: int, head_dim: int, itemsize: int) -> None:
    """Checks that tree attention's bound of shared memory holds, and that as many programs fit as are planned."""
    tiles = PLANNED[-1].tiles
    bound = tiles.shared_memory(1 << (head_dim - 1).bit_length(), itemsize)
    if shared > bound:
        raise RuntimeError(f"{tiles} need {shared} bytes of shared memory, more than the bound, {bound}.")
    if tiles.programs_per_sm * (shared + OF_THE_SYSTEM) > OF_A_MULTIPROCESSOR:
        raise RuntimeError(f"{tiles.programs_per_sm} programs with {shared} bytes do not fit on a multiprocessor.")


def resources(cubin: bytes) -> dict[str, int]:
    """Resource usage of a compiled kernel by cuobjdump's names, such as REG and STACK."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"([A-Z]+):(\d+)", listing)}


def attention(
    nodes: int,
    dtype: torch.dtype,
    head_dim: int = 128,
    batch: int = 1,
    page_size: int | None = None,
    heads: tuple[int, int] = (32, 8),
    capacity: int = 8192 + 64,
    **options: Any,
) -> None:
    heads, kv_heads = heads
    key = torch.empty(batch, kv_heads, capacity, head_dim, dtype=dtype)
    block_tables = None
    if page_size is not None:
        key = torch.empty(16, kv_heads, page_size, head_dim, dtype=dtype)
        block_tables = torch.zeros(batch, capacity // page_size, dtype=torch.int32)
    depths = torch.zeros(1, nodes, dtype=torch.long)
    tree_attention_launch.launch_tree_attention(
        torch.empty(batch, nodes, heads, head_dim, dtype=dtype).transpose(1, 2),
        key,
        torch.empty_like(key),
        torch.zeros(batch, dtype=torch.long),
        torch.zeros(batch, nodes, -(-nodes // 64), dtype=torch.long),
        nodes,
        block_tables=block_tables,
        out=torch.empty(batch, nodes, heads, head_dim, dtype=dtype),
        query_depths=depths,
        node_depths=depths,
        scale=head_dim**-0.5,
        **dict.fromkeys(("first_slots", "sinks", "window", "softcap", "num_splits")) | options,
    )


def walks(
    dtype: torch.dtype, vocab: int = 128_256, batch: int = 64, filtered: bool = False, all_options: bool = False
) -> None:
    nodes, depth = 65, 8
    longs = torch.zeros(batch, nodes, dtype=torch.long)
    rows = torch.ones(batch)
    common = {
        "logits": torch.empty(batch, nodes, vocab, dtype=dtype, device="meta"),
        "tokens": longs,
        "parents": longs[:1],
        "uniforms": torch.empty(batch, nodes, dtype=torch.float64),
        "max_depth": depth,
        "temperature": rows if filtered else None,
        "top_k": rows.int() if filtered else None,
        "top_p": rows if filtered else None,
        "end_tokens": longs[0, :3] if all_options else None,
        "active": rows.bool() if all_options else None,
        "path": torch.empty(batch, depth + 1, dtype=torch.long),
        "accepted": torch.empty(batch, dtype=torch.long),
        "next_tokens": torch.empty(batch, dtype=torch.long),
    }
    launch_target_walk(**common | {"uniforms": None, "temperature": None, "top_k": None, "top_p": None})
    launch_target_walk(**common)
    chosen = {name: common[name] for name in inspect.signature(launch_chosen_walk).parameters if name in common}
    launch_chosen_walk(chosen=longs, **chosen)
    launch_rejection_walk(
        **common,
        draft_logits=torch.empty(batch, nodes, 32_000 if all_options else vocab, dtype=dtype, device="meta"),
        draft_index=longs[:1] if all_options else None,
        draft_columns=torch.zeros(vocab, dtype=torch.long) if all_options else None,
        draft_temperature=rows if all_options else None,
    )


def filters(vocab: int) -> None:
    logits, rows = torch.empty(1, 3, vocab, dtype=torch.bfloat16, device="meta"), torch.ones(1)
    launch_filter_logits(logits, rows, rows.long(), rows, logits)


def drafting(vocab: int, drawn: bool = False, rows: int = 4, by_position: bool = False) -> None:
    logits = torch.empty(rows, 10, vocab, dtype=torch.bfloat16, device="meta")
    tokens, heat = torch.empty(rows, 10, 10, dtype=torch.long), torch.ones(rows)
    if drawn:
        found = tokens, tokens.float(), tokens.float()
        noise = (tokens[:, :1, 0], torch.zeros(vocab, dtype=torch.long)) if by_position else (None, None)
        draft_tokens_launch.launch_draw_children(logits, 10, heat.long(), 0, heat, *noise, *found)
        draft_tokens_launch.launch_exponential_noise(heat.long(), tokens[..., 0], vocab, logits.float())
    else:
        draft_tokens_launch.launch_draft_tokens(logits, 10, heat, tokens, tokens.float())


def overlaps(vocab: int, draft_vocab: int | None = None) -> None:
    heat = torch.ones(4)
    launch_draft_overlaps(
        torch.empty(4, vocab, dtype=torch.bfloat16, device="meta"),
        torch.empty(4, draft_vocab or vocab, dtype=torch.bfloat16, device="meta"),
        torch.ones(6),
        heat,
        heat,
        None if draft_vocab is None else torch.zeros(draft_vocab, dtype=torch.long),
        torch.empty(4, 6),
    )


def losses(draft_vocab: int | None = None) -> None:
    logits = torch.empty(4, 49_152, dtype=torch.bfloat16, device="meta")
    vocabulary = None if draft_vocab is None else torch.zeros(draft_vocab, dtype=torch.long)
    draft_logits, rows = logits[:, :draft_vocab].contiguous(), torch.zeros(4, dtype=torch.long)
    given = draft_logits, logits, rows, rows, vocabulary
    draft_losses_launch.launch_draft_loss_values(*given, torch.empty(4, 7), rows)
    draft_losses_launch.launch_draft_loss_gradient(*given, torch.empty(4, 7), torch.empty(4, 3), draft_logits)


def budgets(above: int, ranks: int) -> None:
    paths, best = torch.zeros(2, above), torch.zeros(2, above, ranks)
    longs, flags = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.bool)
    found = BudgetedLevel(longs, flags, longs, longs, paths, longs, flags, longs)
    launch_share_out(paths.long(), paths, paths.bool(), best, best.long(), best, 9, 3, 5, *found)


def pairs(candidates: int, rank: int, ranks: int, dtype: torch.dtype = torch.bfloat16) -> None:
    log_q, keys = torch.zeros(1, 5, candidates), torch.zeros(9, rank, dtype=dtype)
    queries, lists = torch.zeros(1, 5, candidates, rank, dtype=dtype), torch.zeros(1, 5, candidates, ranks)
    launch_pair_lists(log_q.long(), log_q, queries, keys, ranks, True, lists.long(), lists, lists.long())


def growth(nodes: int) -> None:
    log_q, longs = torch.zeros(2, 15, 16), torch.zeros(2, nodes + 1, dtype=torch.long)
    for following in (None, log_q.long()[:, :, None]):
        shaped = log_q if following is None else log_q[:, :, None]
        launch_best_paths(shaped.long(), shaped, nodes, following, longs[:, 1:].contiguous(), longs)
    chosen, flags = longs[:, :16], torch.zeros(2, 16, nodes, dtype=torch.bool)
    launch_choose_nodes(
        log_q.long(), log_q, log_q[..., 0], flags[:, :15], 16, log_q, chosen, log_q, *[chosen] * 2, flags
    )
    launch_tree_ancestors(longs, 15, longs, torch.zeros(2, nodes + 1, nodes + 1, dtype=torch.bool))


def rows_of(batch: int, nodes: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """A step's slots, turns, path and counts, and its ancestors."""
    longs = torch.zeros(batch, 9, dtype=torch.long)
    return (longs[:, 0], longs[:, 0], longs, longs[:, 0]), torch.zeros(1, nodes, 1, dtype=torch.long)


def ssd(nodes: int, dtype: torch.dtype, batch: int = 1, state_size: int = 128) -> None:
    rows, ancestors = rows_of(batch, nodes)
    x, keys = torch.empty(batch, nodes, 64, 64, dtype=dtype), torch.empty(batch, nodes, 8, state_size, dtype=dtype)
    kept = (
        torch.empty(1, 64, 64, state_size),
        torch.empty(2, 1, *keys.shape[1:], dtype=dtype),
        torch.empty(1, *x.shape[1:]),
        torch.empty(2, 1, nodes, 64),
    )
    dt, rates = x[..., 0], torch.empty(64)
    options = (rates, rates, True, 0.0, 1.0)
    ssd_launch.launch_tree_ssd(x, dt, rates, keys, keys, *kept, ancestors, *rows, *options, x)
    ssd_launch.launch_commit_ssd(*kept, *rows)


def scan(nodes: int, dtype: torch.dtype) -> None:
    rows, ancestors = rows_of(1, nodes)
    x, keys = torch.empty(1, nodes, 8192, dtype=dtype), torch.empty(1, nodes, 1, 16, dtype=dtype)
    rates, kept = torch.empty(8192, 16), (torch.empty(1, 8192, 16), x, x.float(), torch.stack([keys] * 2))
    scan_launch.launch_tree_selective_scan(
        x, x, rates, keys, keys, *kept, ancestors, *rows, rates[:, 0], x, rates[:, 0], True, x
    )
    scan_launch.launch_commit_selective_scan(*kept, rates, *rows)


def convolution(nodes: int, dtype: torch.dtype, batch: int = 1) -> None:
    (slots, _, path, counts), _ = rows_of(batch, nodes)
    x, table = torch.empty(batch, nodes, 8192, dtype=dtype), torch.zeros(1, nodes, 4, dtype=torch.long)
    windows = torch.empty(1, 8192, 4, dtype=dtype)
    weight = torch.empty(8192, 4, dtype=dtype)
    tree_conv_launch.launch_tree_conv(x, weight, windows, x, table, slots, path, counts, weight[:, 0], True, x)
    tree_conv_launch.launch_commit_conv(windows, x, slots, path, counts)


def delta_rule(
    nodes: int, dtype: torch.dtype, batch: int = 1, dim: int = 128, channels: bool = False, tiles: Any = None
) -> None:
    heads, key_heads = (32, 32) if channels else (32, 16)
    query = torch.empty(batch, nodes, key_heads, dim, dtype=dtype)
    value, decay = torch.empty(batch, nodes, heads, dim, dtype=dtype), torch.empty(batch, nodes, heads)
    if channels:
        decay = decay[..., None].repeat(1, 1, 1, dim)
    kept = (
        torch.empty(1, heads, dim, dim),
        torch.empty(2, 1, nodes, key_heads, dim, dtype=dtype),
        torch.empty(1, nodes, heads, dim),
        torch.empty(2, 1, *decay.shape[1:]),
    )
    rows, ancestors = rows_of(batch, nodes)
    delta_rule_launch.launch_tree_delta_rule(
        query, query, value, decay, value[..., 0], *kept, ancestors, *rows, True, 1.0, 5, value, tiles
    )
    delta_rule_launch.launch_commit_delta_rule(*kept, *rows, True)


def compaction(page_size: int | None = None) -> None:
    cache = torch.empty(64, 8, 64, 128, dtype=torch.bfloat16)
    rows = torch.zeros(64, dtype=torch.long)
    block_tables = None if page_size is None else torch.zeros(64, 4, dtype=torch.int32)
    launch_kv_compaction([cache] * 64, rows, rows[:, None].repeat(1, 9), rows, block_tables, rows)


HALF, SINGLE = torch.bfloat16, torch.float32
CASES = {
    **{f"attention, {nodes} nodes, {HALF}": lambda nodes=nodes: attention(nodes, HALF) for nodes in (1, 4, 16, 64)},
    "attention, batch of 16, 16 nodes": lambda: attention(16, HALF, batch=16),
    "attention, batch of 16, 64 nodes": lambda: attention(64, HALF, batch=16),
    "attention, batch of 16, 64 nodes, pages": lambda: attention(64, HALF, batch=16, page_size=64),
    "attention, window, 16 nodes": lambda: attention(16, HALF, window=4096),
    "attention, window, 64 nodes": lambda: attention(64, HALF, window=4096),
    "attention, window, batch of 16, 64 nodes": lambda: attention(64, HALF, batch=16, window=4096),
    "attention, float16, all options": lambda: attention(
        16, torch.float16, window=512, softcap=50.0, sinks=torch.empty(32, dtype=torch.float16), page_size=16
    ),
    **{
        f"attention, {capacity} slots, {nodes} nodes": lambda nodes=nodes, capacity=capacity: attention(
            nodes, HALF, capacity=capacity
        )
        for nodes in (1, 5, 33, 70)
        for capacity in (512, 1024)
    },
    "attention, 512 slots, head dimension 64": lambda: attention(9, HALF, 64, heads=(9, 3), capacity=512),
    "attention, 512 slots, float32": lambda: attention(5, SINGLE, 64, heads=(8, 2), capacity=512),
    "attention, 512 slots, all options": lambda: attention(
        5, torch.float16, capacity=512, window=100, softcap=50.0, sinks=torch.empty(32, dtype=torch.float16)
    ),
    **{
        f"attention, head dimension {size}, {nodes} nodes": lambda size=size, nodes=nodes: attention(nodes, HALF, size)
        for size in (64, 80, 256, 512)
        for nodes in (1, 64)
    },
    **{f"attention, float32, {nodes} nodes": lambda nodes=nodes: attention(nodes, SINGLE) for nodes in (1, 64)},
    "attention, float32, head dimension 256": lambda: attention(64, SINGLE, 256),
    "attention, float32, head dimension 512": lambda: attention(64, SINGLE, 512),
    **{f"walks, {dtype}": lambda dtype=dtype: walks(dtype) for dtype in (HALF, torch.float16, SINGLE)},
    "walks, small vocabulary": lambda: walks(SINGLE, vocab=12),
    "walks with filters": lambda: walks(HALF, filtered=True),
    "walks, batch of 1, with filters": lambda: walks(HALF, batch=1, filtered=True),
    "walks with all options": lambda: walks(SINGLE, filtered=True, all_options=True),
    **{f"filters, vocabulary of {vocab}": lambda vocab=vocab: filters(vocab) for vocab in (8_192, 128_256)},
    **{f"drafting, vocabulary of {vocab}": lambda vocab=vocab: drafting(vocab) for vocab in (32_000, 128_256)},
    **{
        f"drafting, drawn, {rows} rows of {vocab}": lambda vocab=vocab, rows=rows: drafting(vocab, True, rows)
        for vocab in (32_000, 128_256)
        for rows in (1, 64)
    },
    "drafting, drawn by position": lambda: drafting(32_000, True, by_position=True),
    "overlaps": lambda: overlaps(128_256),
    "overlaps, draft vocabulary": lambda: overlaps(49_152, 8_192),
    "losses": losses,
    "losses, draft vocabulary": lambda: losses(8_192),
    **{
        f"{candidates} pairs of {rank} numbers": lambda candidates=candidates, rank=rank: pairs(candidates, rank, 4)
        for candidates, rank in ((64, 16), (512, 16), (512, 256), (1024, 256))
    },
    "512 pairs of 256 numbers in float32": lambda: pairs(512, 256, 4, torch.float32),
    **{f"growth of {nodes} nodes": lambda nodes=nodes: growth(nodes) for nodes in (15, 63, 1024)},
    **{f"budgets of {above} nodes": lambda above=above: budgets(above, 10) for above in (1, 10, 64)},
    **{
        f"merged linear, {rows} rows of {features}": lambda rows=rows, features=features: linears(rows, features)
        for features in (576, 4096)
        for rows in (1, 33, 64)
    },
    **{
        f"delta rule, batch of {batch}, {nodes} nodes": lambda nodes=nodes, batch=batch: delta_rule(nodes, HALF, batch)
        for nodes in (1, 32, 64)
        for batch in (1, 16)
    },
    **{
        f"{name}, {nodes} nodes": lambda call=call, nodes=nodes: call(nodes, HALF)
        for name, call in (("SSD", ssd), ("scan", scan), ("convolution", convolution))
        for nodes in (1, 32, 64)
    },
    **{
        f"layers, {tokens} tokens of {size}, {dtype}": lambda tokens=tokens, size=size, dtype=dtype: layers(
            tokens, size, dtype
        )
        for tokens in (1, 2048)
        for size, dtype in ((576, HALF), (4096, HALF), (4096, torch.float16), (4096, SINGLE))
    },
    "SSD, state of 256": lambda: ssd(64, HALF, 16, 256),
    "SSD, float32": lambda: ssd(64, SINGLE),
    "convolution, batch of 16": lambda: convolution(64, SINGLE, 16),
    "delta rule, head dimension 256": lambda: delta_rule(64, HALF, 16, 256),
    **{
        f"delta rule, stacked, {tiles}": lambda tiles=tiles: delta_rule(64, HALF, tiles=tiles)
        for tiles in (Tiles(32, 2, 8, stack=True), Tiles(64, 2, 8, stack=True))
    },
    "delta rule, float32": lambda: delta_rule(64, SINGLE),
    "delta rule, channels, head dimension 256": lambda: delta_rule(64, HALF, 16, 256, channels=True),
    "delta rule, channels, float32": lambda: delta_rule(64, SINGLE, channels=True),
    "delta rule, channels, 16 nodes": lambda: delta_rule(16, HALF, channels=True),
    "delta rule, channels, 64 nodes": lambda: delta_rule(64, HALF, 16, channels=True),
    "compaction": compaction,
    "compaction of pages": lambda: compaction(64),
}


def linears(rows: int, features: int) -> None:
    sizes = (features, features // 4, features // 4)
    merged_linear_launch.launch_merged_linear(
        torch.empty(rows, features, dtype=HALF),
        [torch.empty(size, features, dtype=HALF) for size in sizes],
        [torch.empty(rows, size, dtype=HALF) for size in sizes],
    )


def layers(tokens: int, size: int, dtype: torch.dtype) -> None:
    input, weight = torch.empty(1, tokens, size, dtype=dtype), torch.empty(size, dtype=dtype)
    for scaling in SCALINGS:
        rms_norm_launch.launch_rms_norm(input, weight, 1e-5, scaling, input)
    for gate_first, groups in ((False, 1), (True, size // 64)):
        told = 1e-5, groups, "rounded", "silu", gate_first
        gated_norm_launch.launch_gated_rms_norm(input, input, weight, *told, input)
    for activation in ACTIVATIONS:
        gated_product_launch.launch_gated_product(input, input, activation, input)
    query, cos = input.view(1, tokens, -1, 64).transpose(1, 2), torch.empty(1, tokens, 64, dtype=dtype)
    for layout in LAYOUTS:
        for angles in (cos, cos[..., :48]):
            rotary_launch.launch_rotary(query, query, angles, angles, layout, False, query, query)
    cache, places = torch.empty(9, size // 64, 32, 64, dtype=dtype), torch.zeros(1, tokens, dtype=torch.long)
    kv_writes_launch.launch_write_kv(cache, cache, query, query, places, places)


def main(wanted: str) -> None:
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(driver)
    triton.runtime.jit.KernelInterface.__getitem__ = compile_only
    tree_attention_launch.num_multiprocessors = lambda device: 132
    tree_attention_launch.shared_memory_limit = lambda device: LARGEST_SHARED_MEMORY
    tree_attention_launch.plan_launch = plan_and_note
    draft_tokens_launch.num_multiprocessors = tree_attention_launch.num_multiprocessors
    triton_states.num_multiprocessors = tree_conv_launch.num_multiprocessors = (
        tree_attention_launch.num_multiprocessors
    )
    for launches in (
        tree_attention_launch,
        merged_linear_launch,
        delta_rule_launch,
        ssd_launch,
        scan_launch,
        tree_conv_launch,
        rms_norm_launch,
        gated_norm_launch,
        gated_product_launch,
        rotary_launch,
        kv_writes_launch,
    ):
        launches.can_overlap = lambda device: True
    print(f"triton {triton.__version__}")
    for name, launch in CASES.items():
        if wanted in name:
            print(name)
            launch()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
