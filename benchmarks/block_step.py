"""
What a step costs with a block head, on a GPU: over the captured verify alone, and what drafting adds over its matmuls.

    python benchmarks/block_step.py [--shape 8b] [--kind dflash dspark] [--nodes 63] [--rows 1] [--compile] [--phases]

Target and head are random, in bfloat16: a Llama of the shape, and a head of five layers of the target's size with
blocks of 16 rows. Measured, in milliseconds:

- step: a whole captured step of `generate` (prefill left out), the median of the calls;
- verify: the forward over as many nodes, captured alone;
- draft floor: the head's matmuls by cuBLAS in one graph: `fc` and K/V of the new context rows, five layers and the
  target's lm_head at 16 rows.

Prints a line for each kind, then one JSON line. With `--phases` nothing is timed: a profile of captured steps says how
many launches and microseconds their phases take. `--head` is a head in place of the random ones, for the target of its
shape; `--tree` its tree. To reach: step at most 1.30 × verify, and drafting (the rest of the
step: draft, walk and commit) at most 1.25 × its floor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sampled_step import SHAPE as SMOLLM2
from suite.forwards import forward_after
from suite.sizes import random_llama, tree_of
from suite.timing import captured, milliseconds
from torch import nn

import hf_specdec
from hf_specdec import BlockConfig, BlockHead, SpeculativeConfig
from hf_specdec.benchmarking.environment import environment
from hf_specdec.loading import load_draft_to
from hf_specdec.trees import as_tree


SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
    },
    "smollm2": SMOLLM2,
}
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dspark": {"anchor_first": True, "markov_rank": 256, "has_confidence_head": True},
}
BLOCK, LAYERS, CONTEXT_ROWS = 16, 5, 4


def random_head(shape: dict[str, Any], kind: str) -> BlockHead:
    """A random head of the target's size."""
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    text_config = {name: shape[name] for name in (*names, "head_dim")}
    text_config |= {"model_type": "qwen3", "num_hidden_layers": LAYERS}
    last = shape["num_hidden_layers"] - 3
    config = BlockConfig(
        text_config=text_config,
        block_size=BLOCK,
        mask_token_id=5,
        aux_layer_ids=[2 + (last - 2) * number // (LAYERS - 1) for number in range(LAYERS)],
        **KINDS[kind],
    )
    with torch.device("cuda"):
        return BlockHead(config).to(torch.bfloat16).eval()


def draft_matmuls(head: BlockHead, target: Any) -> Callable[[], object]:
    """A function with the matmuls of one draft: those of the context's rows, the block's, and the lm_head's."""
    context, block = (
        {
            size: torch.randn(rows, size, dtype=torch.bfloat16, device="cuda")
            for size in {module.in_features for module in head.modules() if isinstance(module, nn.Linear)}
        }
        for rows in (CONTEXT_ROWS, BLOCK)
    )
    by_context = [head.fc, *(proj for one in head.layers for proj in (one.self_attn.k_proj, one.self_attn.v_proj))]
    by_block = [module for module in head.layers.modules() if isinstance(module, nn.Linear)]

    @torch.no_grad()
    def run() -> None:
        for inputs, modules in ((context, by_context), (block, [*by_block, target.lm_head])):
            for module in modules:
                nn.functional.linear(inputs[module.in_features], module.weight)

    return run


def verify_alone(target: Any, ids: torch.Tensor, nodes: int, compiles: bool) -> float:
    """Milliseconds of the captured forward over a tree of so many nodes."""
    with forward_after(target, ids, tree_of(nodes, depth=6), compiles=compiles) as forward:
        return statistics.median(milliseconds(captured(forward, ids.device), ids.device, 50))


def call(target: Any, head: BlockHead, ids: torch.Tensor, config: SpeculativeConfig, num_tokens: int) -> float:
    """Milliseconds of a step of a call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        assistant_model=head,
        speculative_config=config,
    )
    torch.cuda.synchronize()
    seconds, metrics = time.perf_counter() - start, hf_specdec.last_metrics()
    assert "steps" in metrics.seconds, "no step was captured"
    return 1e3 * (seconds - metrics.seconds["prefill"]) / max(map(len, metrics.accepted_per_step))


def phases(target: Any, head: BlockHead, ids: torch.Tensor, config: SpeculativeConfig, num_tokens: int) -> Any:
    """What the phases of a captured step take, by name; prints a table."""
    from suite.empty_kernel import mark  # which needs Triton
    from suite.phase_marks import PhaseMarks, profiled_phases, table_of

    marks = PhaseMarks(mark)
    with marks.set():
        for _ in range(2):  # compiles and captures
            call(target, head, ids, config, num_tokens)
        found = profiled_phases(lambda: call(target, head, ids, config, num_tokens), marks.of_steps)
    print(table_of(found), flush=True)
    return {name: phase._asdict() for name, phase in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--nodes", type=int, default=63, help="draft tokens of a tree")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="compile forwards, see `SpeculativeConfig`")
    parser.add_argument("--phases", action="store_true", help="print launches and microseconds of a step's phases")
    parser.add_argument("--head", help="Hub id or folder of a head, in place of random ones")
    parser.add_argument("--tree", help="e.g. dynamic:5,4,16, in place of --nodes")
    parser.add_argument("--trace", help="file for the profiler's trace of a call with the first kind")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device.")
    device, shape = torch.device("cuda"), SHAPES[arguments.shape]
    target = random_llama(shape, torch.bfloat16, "cuda")
    ids = torch.randint(shape["vocab_size"], (1, arguments.prompt), device=device)
    heads = {arguments.head: lambda: load_draft_to(arguments.head, torch.bfloat16, "cuda")}
    if arguments.head is None:
        heads = {kind: partial(random_head, shape, kind) for kind in arguments.kind}
    found: list[dict[str, Any]] = []
    for kind, make in heads.items():
        head = make()
        tree = as_tree(arguments.tree or f"dynamic:{head.num_drafts},{BLOCK},{arguments.nodes}")
        config = SpeculativeConfig(tree=tree, compile=arguments.compile)
        if arguments.phases:
            for rows in arguments.rows:
                print(f"{kind}, {rows} rows", flush=True)
                told = target, head, ids.expand(rows, -1).contiguous(), config, arguments.max_new_tokens
                found.append({"kind": kind, "rows": rows, "phases": phases(*told)})
            continue
        verify = verify_alone(target, ids, tree.num_nodes, arguments.compile)
        floor = statistics.median(milliseconds(captured(draft_matmuls(head, target), device), device, 50))
        for rows in arguments.rows:
            told = target, head, ids.expand(rows, -1).contiguous(), config, arguments.max_new_tokens
            for _ in range(2):  # compiles and captures
                call(*told)
            times = [call(*told) for _ in range(arguments.calls)]
            step = statistics.median(times)
            figures = {"step": step, "verify": verify, "draft_floor": floor, "step_over_verify": step / verify}
            figures["rest_over_floor"] = (step - verify) / floor
            found.append({"kind": kind, "rows": rows, **figures})
            print(
                f"{kind}, {rows} rows: step {step:.3f} ms ({min(times):.3f} – {max(times):.3f}), {step / verify:.3f} "
                f"× verify ({verify:.3f}); the rest {step - verify:.3f}, {(step - verify) / floor:.2f} × the draft's "
                f"matmuls ({floor:.3f})",
                flush=True,
            )
        if arguments.trace:
            with torch.profiler.profile() as profiler:
                call(*told)
            print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=40))
            profiler.export_chrome_trace(arguments.trace)
            arguments.trace = None
    print(json.dumps({"steps": found, **environment("cuda")}))


if __name__ == "__main__":
    main()
