"""
The loop's own time per step: all of `generate` but the forwards of the target and the draft.

    python benchmarks/step_overhead.py [--target ID_OR_FOLDER] [--threads 2]

Greedy, batch 1, on SmolLM2-135M-Instruct unless told otherwise. For chains and trees of up to 16 nodes, with a 2-layer
draft model made of the target's own layers and with the n-gram drafter. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from typing import Any

import torch
import transformers
from suite.pair import first_layers
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.benchmarking.prompts import encode_turns
from hf_specdec.loading import DTYPES, load_target, load_tokenizer


PROMPT = "Write a Python function that counts how often every word occurs in a text, and explain it step by step."
TREES: dict[str, Any] = {
    "chain of 5": hf_specdec.TokenTree.chain(5),
    "tree (3, 2, 1), 15 nodes": hf_specdec.TokenTree.from_branching((3, 2, 1)),
    "chain of 16": hf_specdec.TokenTree.chain(16),
    "dynamic, 16 of depth 5": hf_specdec.DynamicTree(depth=5, top_k=4, num_nodes=16),
}


def synchronize() -> None:
    """Waits for the accelerator, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class ForwardTimer:
    """Adds up the time spent in a model's forwards, device time included."""

    def __init__(self, model: PreTrainedModel):
        self.seconds = 0.0
        self._hooks = [
            model.register_forward_pre_hook(self._start, with_kwargs=True),
            model.register_forward_hook(self._stop),
        ]

    def _start(self, *_: Any) -> None:
        synchronize()
        self._started = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        synchronize()
        self.seconds += time.perf_counter() - self._started

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def overhead_per_step(target: PreTrainedModel, assistant: Any, tree: Any, inputs: Any, num_tokens: int) -> float:
    """Milliseconds per step outside forwards, in one call."""
    timers = [ForwardTimer(model) for model in (target, assistant) if isinstance(model, PreTrainedModel)]
    start = time.perf_counter()
    config = hf_specdec.SpeculativeConfig(tree=tree, cuda_graphs=False)
    target.generate(
        **inputs, max_new_tokens=num_tokens, do_sample=False, assistant_model=assistant, speculative_config=config
    )
    total = time.perf_counter() - start
    for timer in timers:
        timer.remove()
    metrics = hf_specdec.last_metrics()
    return 1000 * (total - sum(timer.seconds for timer in timers)) / len(metrics.accepted_per_step[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", help="Hub id or folder; SmolLM2-135M-Instruct from the package registry by default"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target = load_target(arguments.target, DTYPES[arguments.dtype], arguments.device)
    inputs = encode_turns(load_tokenizer(arguments.target), [PROMPT]).to(arguments.device)
    assistants = {"2-layer draft": first_layers(target, 2), "n-gram": hf_specdec.NgramDraft()}
    rows = []
    for assistant_name, assistant in assistants.items():
        for tree_name, tree in TREES.items():
            if assistant_name == "n-gram" and not isinstance(tree, hf_specdec.DynamicTree):
                continue
            call = (target, assistant, tree, inputs, arguments.max_new_tokens)
            overhead_per_step(*call)  # warm-up
            times = sorted(overhead_per_step(*call) for _ in range(arguments.rounds))
            median = statistics.median(times)
            rows.append({"draft": assistant_name, "tree": tree_name, "median_ms": median, "min_ms": times[0]})
            print(f"{assistant_name:14} {tree_name:26} median {median:5.2f} ms   min {times[0]:5.2f} ms per step")
    setting = {"device": arguments.device, "threads": arguments.threads, "dtype": arguments.dtype}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine()}
    print(json.dumps({**setting, **versions, "rows": rows}))


if __name__ == "__main__":
    main()
