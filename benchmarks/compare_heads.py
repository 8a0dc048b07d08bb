"""
Tokens per second of several heads for one target, each with several trees, in one run.

    python benchmarks/compare_heads.py --heads FOLDER FOLDER [--rows 1 8] [--temperatures 0 1] [--compile]

SmolLM2-135M-Instruct and the prompts of `auto_speed.py`. Every turn runs all heads and trees on every prompt (with
several rows, on several prompts at once), each turn beginning with another one; "plain" is a step without a tree
(captured, on a GPU). The first turn, which captures, is left out. All texts have the same length.

Prints, for every temperature and number of rows, tokens per second and acceptance length of each, then each head's
best tree over the first head's. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from auto_speed import PROMPTS, batches_of, seconds_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec import SpeculativeConfig
from hf_specdec.benchmarking.contenders import sampling_options
from hf_specdec.benchmarking.environment import environment
from hf_specdec.benchmarking.prompts import encode_turns
from hf_specdec.loading import default_device, load_draft_to
from hf_specdec.smollm2 import smollm2_folder


TREES = ("own", "dynamic:5,4,16", "dynamic:6,8,40")
"""The first is the head's own default tree."""


class Calls:
    """The target and its heads, and calls of `generate`."""

    def __init__(self, arguments: argparse.Namespace):
        folder, dtype = smollm2_folder(), getattr(torch, arguments.dtype)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(arguments.device).eval()
        self.model.generation_config.eos_token_id = None  # every text has the same length
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.heads = {Path(head).name: load_draft_to(head, dtype, arguments.device) for head in arguments.heads}
        self.arguments = arguments
        self.acceptance: dict[str, list[float]] = {}

    def of(self, temperature: float) -> dict[str, Any]:
        """Calls that continue prompts, by name: "plain", then each head with each tree."""
        found = {"plain": self._call("plain", next(iter(self.heads)), "chain:1", temperature, disable_by_batch_size=0)}
        for head in self.heads:
            for tree in self.arguments.trees:
                name = f"{head} {tree}"
                found[name] = self._call(name, head, None if tree == "own" else tree, temperature)
        return found

    def _call(self, name: str, head: str, tree: str | None, temperature: float, **settings: Any) -> Any:
        draft = self.heads[head]
        tree = hf_specdec.drafters.as_drafter(draft).default_tree if tree is None else tree
        config = SpeculativeConfig(tree=tree, compile=self.arguments.compile, **settings)
        options = sampling_options(temperature) | {"max_new_tokens": self.arguments.max_new_tokens}

        def generate(prompts: list[str]) -> None:
            inputs = encode_turns(self.tokenizer, prompts).to(self.model.device)
            self.model.generate(**inputs, **options, assistant_model=draft, speculative_config=config)
            self.acceptance.setdefault(name, []).append(hf_specdec.last_metrics().mean_acceptance_length)

        return generate


def measure(calls: Calls, temperature: float, rows: int) -> dict[str, Any]:
    """Tokens per second (median and range over the turns) and acceptance length by contender."""
    contenders, batches = calls.of(temperature), batches_of(calls.prompts, rows)
    calls.acceptance.clear()
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(calls.arguments.turns + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            spent = sum(
                seconds_of(contenders[name], texts, turn, calls.arguments.device) for texts in batches.values()
            )
            seconds[name].append(spent)
    tokens = calls.arguments.max_new_tokens * sum(map(len, batches.values()))
    found = {}
    for name, of_turns in seconds.items():
        rates = sorted(tokens / second for second in of_turns[1:])
        accepted = statistics.mean(calls.acceptance[name])
        found[name] = {"tokens_per_second": statistics.median(rates), "range": rates, "acceptance": accepted}
        print(
            f"  {name:48} {statistics.median(rates):8,.0f} tokens/s ({rates[0]:,.0f} … {rates[-1]:,.0f}), "
            f"{accepted:.2f} a step; first turn {of_turns[0]:.1f} s",
            flush=True,
        )
    best = {
        head: max(found[f"{head} {tree}"]["tokens_per_second"] for tree in calls.arguments.trees)
        for head in calls.heads
    }
    first = next(iter(best.values()))
    print("  best tree of each over the first head's: " + ", ".join(f"{k} {v / first:.3f}" for k, v in best.items()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", required=True, help="Hub ids or folders")
    parser.add_argument("--trees", nargs="+", default=TREES, help="default: %(default)s")
    parser.add_argument("--rows", nargs="+", type=int, default=[1])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--turns", type=int, default=3, help="timed ones, after the first")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--dtype", help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch on a CPU")
    parser.add_argument("--compile", action="store_true", help="compile forwards, see `SpeculativeConfig`")
    arguments = parser.parse_args()
    arguments.dtype = arguments.dtype or ("float32" if arguments.device == "cpu" else "bfloat16")
    torch.set_num_threads(arguments.threads)
    calls = Calls(arguments)
    calls.prompts = dict(list(PROMPTS.items())[: arguments.prompts])
    results: dict[str, Any] = {}
    for temperature in arguments.temperatures:
        for rows in arguments.rows:
            name = f"temperature {temperature:g}, {rows} rows"
            print(name, flush=True)
            results[name] = measure(calls, temperature, rows)
    print(json.dumps({"environment": environment(arguments.device), "results": results}))


if __name__ == "__main__":
    main()
