"""
What a step without a tree costs over the target's captured one-token forward alone (target P14), on a GPU.

    python benchmarks/plain_step.py [--shape 8b] [--rows 64 8 1] [--compile] [--no-manager]

The target is random, in bfloat16; so is its draft of one small layer, which proposes nothing. Measured for each number
of rows, in milliseconds, behind prompts of 512 tokens:

- forward: one token of every row, captured alone, with the same room for blocks;
- generate: a step of `generate` with speculation off, the median over calls of the time between the tokens;
- manager: the same of `generate_batch`, with a kept manager.

Then a profile of some steps of `generate`: launches a step, and the kernels that take longest. Prints lines, then one
JSON line. To reach: forward + 0.1 ms takes at least 0.95 of a step's time.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from block_step import SHAPES
from suite.forwards import forward_after
from suite.sizes import random_llama
from suite.timing import captured, milliseconds
from torch.profiler import ProfilerActivity, profile
from transformers import ContinuousBatchingConfig

from hf_specdec import SpeculativeConfig
from hf_specdec.benchmarking.environment import environment
from hf_specdec.generation.engines import FEWEST_BLOCKS


SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 64}
FEW_TOKENS = 8


def seconds_of(call: Callable[[int], Any], max_new_tokens: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call(max_new_tokens)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def step_of(call: Callable[[int], Any], calls: int, max_new_tokens: int) -> list[float]:
    """Milliseconds of a step in each of some pairs of calls: a long one less a short one, so without the prefill."""
    for tokens in (max_new_tokens, FEW_TOKENS, max_new_tokens):  # compiles and captures
        call(tokens)
    found = []
    for _ in range(calls):
        long, short = seconds_of(call, max_new_tokens), seconds_of(call, FEW_TOKENS)
        found.append(1e3 * (long - short) / (max_new_tokens - FEW_TOKENS))
    return found


def kernels_of(call: Callable[[int], Any], max_new_tokens: int) -> tuple[float, dict[str, float]]:
    """Launches of a step, and microseconds of a step by kernel, the longest first; of a long call less a short one."""
    totals = []
    for tokens in (max_new_tokens, FEW_TOKENS):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call(tokens)
            torch.cuda.synchronize()
        launches, took = 0, Counter[str]()
        for event in profiler.key_averages():
            launches += event.count
            took[event.key] += event.self_device_time_total
        totals.append((launches, took))
    (many, long), (few, short) = totals
    steps = max_new_tokens - FEW_TOKENS
    of_step = {name: (time_of - short[name]) / steps for name, time_of in long.most_common()}
    return (many - few) / steps, of_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 8, 1])
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--compile", action="store_true", help="compile forwards, see `SpeculativeConfig`")
    parser.add_argument("--no-manager", action="store_true", help="leave `generate_batch` out")
    parser.add_argument("--kernels", type=int, default=14, help="kernels that are listed")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device.")
    shape = SHAPES[arguments.shape]
    target = random_llama(shape, torch.bfloat16, "cuda")
    draft = random_llama(shape | SMALL, torch.bfloat16, "cuda")
    device, found = torch.device("cuda"), []
    config = SpeculativeConfig(tree="chain:1", disable_by_batch_size=0, compile=arguments.compile)
    told = {"do_sample": False, "assistant_model": draft, "speculative_config": config}
    for rows in arguments.rows:
        torch.manual_seed(rows)
        ids = torch.randint(shape["vocab_size"], (rows, arguments.prompt), device=device)
        visible, prompts = torch.ones_like(ids), ids.tolist()
        limits = ContinuousBatchingConfig(max_requests_per_batch=rows)

        def generate(tokens: int) -> None:
            target.generate(ids, attention_mask=visible, max_new_tokens=tokens, **told)  # noqa: B023

        def generate_batch(tokens: int) -> None:
            target.generate_batch(
                prompts,  # noqa: B023
                max_new_tokens=tokens,
                persistent_manager=True,
                continuous_batching_config=limits,  # noqa: B023
                **told,
            )

        with forward_after(target, ids, None, arguments.compile, FEWEST_BLOCKS) as forward:
            times = {"forward": milliseconds(captured(forward, device), device, 40)}
        times["generate"] = step_of(generate, arguments.calls, arguments.max_new_tokens)
        launches, kernels = kernels_of(generate, arguments.max_new_tokens // 2)
        if not arguments.no_manager:
            times["manager"] = step_of(generate_batch, arguments.calls, arguments.max_new_tokens)
            target.destroy_cached_continuous_batching_manager()
        medians = {name: statistics.median(values) for name, values in times.items()}
        shares = {name: (medians["forward"] + 0.1) / ms for name, ms in medians.items() if name != "forward"}
        line = "  ".join(f"{name} {ms:.3f} ms" for name, ms in medians.items())
        reached = "  ".join(f"{name} {share:.3f}" for name, share in shares.items())
        print(f"{rows} rows: {line}; (forward + 0.1 ms) over a step: {reached}", flush=True)
        longest = dict(list(kernels.items())[: arguments.kernels])
        print(f"  {launches:.0f} launches, {sum(kernels.values()) / 1e3:.3f} ms in kernels a step of `generate`")
        for name, took in longest.items():
            print(f"    {took:8.1f} us  {name[:100]}")
        found.append(
            {"rows": rows, "ms": medians, "shares": shares, "launches": launches, "kernels": longest, "times": times}
        )
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps({"compile": arguments.compile, "shape": arguments.shape, "rows": found, **environment("cuda")}))


if __name__ == "__main__":
    main()
