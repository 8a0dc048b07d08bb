"""
Memory on a GPU over many calls: how much more than plain `generate`, whether it grows, and whether it goes.

    python benchmarks/memory.py [--target ID_OR_FOLDER] [--draft ID_OR_FOLDER] [--calls 1000]

Calls have prompts of random lengths, and between 4 and `--max-new-tokens` new tokens. What torch has allocated after
the models were loaded is subtracted. Prints a table, then one JSON line. The defaults need no network:
SmolLM2-135M-Instruct and its head in model_cards/.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from typing import Any

import torch
from load import load_models
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from hf_specdec.benchmarking.environment import environment
from hf_specdec.trees.text import parse_tree


def one_call(model: PreTrainedModel, choice: random.Random, options: argparse.Namespace, **how: Any) -> None:
    """Makes a greedy call with a prompt of random length and a random number of new tokens."""
    vocab_size = model.config.get_text_config().vocab_size
    prompt = choice.choices(range(5, vocab_size), k=choice.randint(1, options.longest_prompt))
    ids = torch.tensor([prompt], device=model.device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=choice.randint(4, options.max_new_tokens),
        pad_token_id=0,
        **how,
    )


def allocated() -> dict[str, float]:
    """Memory in MiB: allocated, the peak since the previous call of this function, and reserved by torch."""
    gc.collect()
    torch.cuda.synchronize()
    found = {
        "allocated": torch.cuda.memory_allocated(),
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
    }
    torch.cuda.reset_peak_memory_stats()
    return {name: value / 2**20 for name, value in found.items()}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: SmolLM2-135M-Instruct; pair:0.03 as in manager_load.py")
    parser.add_argument("--draft", help="default: the head in model_cards/ for SmolLM2, else ngram")
    parser.add_argument("--tree", default="default")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--longest-prompt", type=int, default=300)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--dtype", default="bfloat16")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    if not torch.cuda.is_available():
        sys.exit("No CUDA device is there. On a CPU K/V go with their call, and there are no graphs.")
    options.device = "cuda"
    free = allocated()
    model, draft = load_models(options)
    loaded, choice = allocated(), random.Random(0)
    rows: list[tuple[str, dict[str, float]]] = []

    def note(what: str) -> None:
        found = allocated()
        rows.append((what, {name: value - loaded["allocated"] for name, value in found.items()}))

    for _ in range(10):
        one_call(model, choice, options)
    note("10 plain calls")
    how = {"assistant_model": draft, "tree": parse_tree(options.tree)}
    done = 0
    for until in sorted({max(options.calls // share, 1) for share in (1000, 20, 4, 2, 1)}):
        while done < until:
            one_call(model, choice, options, **how)
            done += 1
        note(f"{done} speculative calls")
    how.clear()
    del model, draft
    gc.collect()
    torch.cuda.empty_cache()
    gone = allocated()
    table = Table("after", "allocated, MiB", "peak, MiB", "held by torch, MiB", title="besides the models")
    for what, figures in rows:
        table.add_row(what, *(f"{figures[name]:.1f}" for name in ("allocated", "peak", "reserved")))
    Console().print(table)
    print(f"models {loaded['allocated'] - free['allocated']:.1f} MiB; when they are gone, {gone['allocated']:.1f} MiB")
    print(json.dumps({**environment("cuda"), **vars(options), "loaded": loaded, "rows": rows, "gone": gone}))


if __name__ == "__main__":
    main()
