"""
What fused element-wise operations save in forwards that are not compiled, on a GPU.

    python benchmarks/fused_layers.py [--shape 8b smollm2] [--rows 64 8 1] [--chunk 2048] [--no-compile]

The target is random, in bfloat16. Measured in milliseconds, layers as they are ("off") and fused ("on") in turn:

- one token of every row behind 512, captured; "compiled" beside it, and the matmuls alone;
- a chunk of a prompt, launched by the host, and its matmuls alone;
- launches and time of the chunk's kernels, by name.

Before, a small float32 model must write the same greedy text by both. Prints lines, then one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from block_step import SHAPES
from suite.forwards import forward_after, matmuls, prompt_forward
from suite.sizes import random_llama
from suite.timing import captured, milliseconds
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from hf_specdec import TokenTree
from hf_specdec.benchmarking.environment import environment
from hf_specdec.forwards import model_call


SMALL = {"vocab_size": 997, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024}
ROUNDS, REPEATS, CONTEXT = 5, 10, 512


@contextmanager
def switched(fused: bool) -> Iterator[None]:
    """A context in which layers are fused, or stay as they are."""
    with nullcontext() if fused else mock.patch.object(model_call, "fused_layers", lambda model: nullcontext()):
        yield


def check_texts() -> None:
    """
    Raises:
        AssertionError: if a greedy text in float32 is not that of plain `generate`.
    """
    model = random_llama(SMALL, torch.float32, "cuda")
    ids = torch.randint(SMALL["vocab_size"], (4, 100), device="cuda")
    told: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 100, "do_sample": False}
    plain = model.generate(ids, **told)
    text = model.generate(ids, **told, assistant_model=model, tree=TokenTree.chain(3))
    assert torch.equal(plain, text), "texts differ"


def in_turn(ways: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Milliseconds of each way: the median over rounds in which all are timed in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, run in ways.items():
            times[name].append(statistics.median(milliseconds(run, device, REPEATS)))
    for name, found in times.items():
        print(f"    {name:<8} {statistics.median(found):8.3f} ms  ({min(found):.3f} to {max(found):.3f})", flush=True)
    return {name: statistics.median(found) for name, found in times.items()}


def steps(target: PreTrainedModel, rows: int, compiles: bool) -> dict[str, float]:
    """A captured step of one token for each row."""
    device, replays = target.device, {"matmuls": captured(matmuls(target, rows), target.device)}
    ids = torch.randint(target.config.vocab_size, (rows, CONTEXT), device=device)
    with ExitStack() as stack:
        for name, fused, compiled in (("off", False, False), ("on", True, False), ("compiled", True, True)):
            if compiles or not compiled:
                forward = stack.enter_context(forward_after(target, ids, None, compiled))
                with switched(fused):
                    replays[name] = captured(forward, device)
        return in_turn(replays, device)


def chunks(target: PreTrainedModel, tokens: int) -> tuple[dict[str, float], dict[str, Any]]:
    """A chunk of a prompt, and what its kernels take."""
    device, ids = target.device, torch.randint(target.config.vocab_size, (1, tokens), device=target.device)
    with prompt_forward(target, ids) as (read, _, _):

        def as_they_are() -> None:
            with switched(False):
                read()

        times = in_turn({"matmuls": matmuls(target, tokens), "off": as_they_are, "on": read}, device)
        kernels = {name: kernels_of(run) for name, run in (("off", as_they_are), ("on", read))}
    return times, kernels


def kernels_of(run: Callable[[], object]) -> dict[str, Any]:
    """Launches of a call, its time in kernels in milliseconds, and the kernels that take longest."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    launches, took = 0, Counter[str]()
    for event in profiler.key_averages():
        launches += event.count
        took[event.key] += event.self_device_time_total / 1e3
    print(f"    {launches} launches, {took.total():.3f} ms in kernels")
    for name, ms in took.most_common(14):
        print(f"      {ms:8.3f} ms  {name[:100]}", flush=True)
    return {"launches": launches, "ms": took.total(), "longest": dict(took.most_common(14))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["8b", "smollm2"])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 8, 1])
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a chunk")
    parser.add_argument("--no-compile", action="store_true", help="leave compiled steps out")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device.")
    check_texts()
    found: dict[str, Any] = {}
    for shape in arguments.shape:
        target, found[shape] = random_llama(SHAPES[shape], torch.bfloat16, "cuda"), {}
        for rows in arguments.rows:
            print(f"{shape}, a token of {rows} rows")
            found[shape][rows] = steps(target, rows, not arguments.no_compile)
        print(f"{shape}, a chunk of {arguments.chunk} tokens")
        found[shape]["chunk"], found[shape]["kernels"] = chunks(target, arguments.chunk)
        del target
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(found | environment("cuda")))


if __name__ == "__main__":
    main()
