"""
Calls that ask for no tree against plain `generate`, interleaved in one process: are they ever slower?

    python benchmarks/default_speed.py [--dtype bfloat16] [--drafts head ngram] [--temperatures 0 1] [--trees chain:3]

SmolLM2-135M-Instruct and the head in `model_cards/`. Every turn runs plain `generate`, the default and each tree of
`--trees` on every prompt, in turns that begin with another one each time. Prints, for every draft and temperature, the
tokens per second over plain of the first call of the process, and of each prompt the median over all turns after the
first with its spread; then one JSON line. All texts have the same length, so that prompts weigh alike.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec.benchmarking.prompts import encode_turns
from hf_specdec.smollm2 import smollm2_folder


HEAD = Path(__file__).parent.parent / "model_cards" / "SmolLM2-135M-Instruct-EAGLE3"
PROMPTS = {
    "chat": "What should I think about before I adopt a dog?",
    "german": "Erzähle mir kurz, warum der Himmel blau ist.",
    "code": "Write a Python function that returns the prime factors of a number.",
    "list": "List the planets of the solar system with one sentence about each.",
    "maths": "A train goes 60 km in 45 minutes. How far does it go in two hours? Explain each step.",
    "story": "Write a short story about a lighthouse keeper who finds a letter.",
    "rewrite": "Repeat this text with better punctuation: the cat sat on the mat the dog sat on the cat",
    "table": "Make a table of five countries with their capitals and continents.",
}


def seconds_per_token(model: Any, inputs: Any, seed: int, **options: Any) -> float:
    """Seconds per new token of one call."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    output = model.generate(**inputs, **options)
    return (time.perf_counter() - start) / (output.shape[1] - inputs["input_ids"].shape[1])


def compare(
    model: Any, prompts: dict[str, Any], contenders: dict[str, dict[str, Any]], turns: int, **options: Any
) -> dict[str, dict[str, list[float]]]:
    """Tokens per second over plain by contender and prompt, one for each turn."""
    found: dict[str, dict[str, list[float]]] = {name: {prompt: [] for prompt in prompts} for name in contenders}
    names = ["plain", *contenders]
    for turn in range(turns):
        for number, (prompt, inputs) in enumerate(prompts.items()):
            first = (turn + number) % len(names)
            seconds = {
                name: seconds_per_token(model, inputs, turn, **contenders.get(name, {}), **options)
                for name in names[first:] + names[:first]
            }
            for name in contenders:
                found[name][prompt].append(seconds["plain"] / seconds[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--drafts", nargs="+", default=["head", "ngram"], choices=["head", "ngram"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--trees", nargs="*", default=[], help="fixed trees to compare with, such as chain:3")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = {name: encode_turns(tokenizer, [text]) for name, text in list(PROMPTS.items())[: arguments.prompts]}
    result: dict[str, Any] = {}
    for draft in arguments.drafts:
        for temperature in arguments.temperatures:
            # A new model: its step times are measured from the start.
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, arguments.dtype)).eval()
            assistant = hf_specdec.NgramDraft() if draft == "ngram" else hf_specdec.EagleHead.from_pretrained(HEAD)
            sampling = (
                {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
            )
            length = arguments.max_new_tokens
            options = {"max_new_tokens": length, "min_new_tokens": length} | sampling
            warm_up = options | {"max_new_tokens": 8, "min_new_tokens": 8}
            seconds_per_token(model, next(iter(prompts.values())), 0, **warm_up)
            contenders = {"default": {"assistant_model": assistant}}
            contenders |= {tree: {"assistant_model": assistant, "tree": tree} for tree in arguments.trees}
            found = compare(model, prompts, contenders, arguments.turns, **options)
            name = f"{draft}, temperature {temperature:g}"
            result[name] = found
            print(f"{name}: first call {next(iter(found['default'].values()))[0]:.2f}")
            for prompt in prompts:
                cells = []
                for contender, ratios in found.items():
                    later = sorted(ratios[prompt][1:] or ratios[prompt])
                    cells.append(f"{contender} {statistics.median(later):.2f} ({later[0]:.2f} … {later[-1]:.2f})")
                print(f"  {prompt:8} {'  '.join(cells)}", flush=True)
    setting = {"dtype": arguments.dtype, "threads": arguments.threads, "machine": platform.processor()}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({**setting, **versions, "capability": torch.backends.cpu.get_cpu_capability(), "ratios": result}))


if __name__ == "__main__":
    main()
