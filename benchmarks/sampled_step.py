"""
What a step costs with logits processors, drawn ones among them, over a greedy step of the same tree, on a GPU.

    python benchmarks/sampled_step.py [--rows 1 8] [--calls 5] [--trace FOLDER]

The target is a random Llama of SmolLM2-135M's shape, in bfloat16, with the EAGLE head in model_cards/; steps are
captured and compiled. A time is the median, over calls, of a call's time without its prefill, by its number of steps.
The text of a random target is of no use, and neither are the numbers of accepted tokens: the walks end early. Prints a
line for each setting, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from load import HEAD
from suite.sizes import random_llama
from torch.profiler import ProfilerActivity, profile

import hf_specdec
from hf_specdec import DynamicTree, SpeculativeConfig, loading
from hf_specdec.benchmarking.environment import environment


SHAPE: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
CONFIG = SpeculativeConfig(tree=DynamicTree(depth=4, top_k=3, num_nodes=9), compile=True)
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "T=1, top_k=50": {"do_sample": True, "top_k": 50},
    "T=1": {"do_sample": True, "top_k": 0},
    "T=1, top_p=0.9": {"do_sample": True, "top_k": 0, "top_p": 0.9},
    "T=1, min_p=0.05": {"do_sample": True, "top_k": 0, "min_p": 0.05},
    "T=1, top_k=50, min_p=0.05": {"do_sample": True, "top_k": 50, "min_p": 0.05},
    "T=1, typical_p=0.9": {"do_sample": True, "top_k": 0, "typical_p": 0.9},
    "T=1, one token hidden": {"do_sample": True, "top_k": 0, "suppress_tokens": [0]},
    "T=1, repetition penalty": {"do_sample": True, "top_k": 0, "repetition_penalty": 1.1},
    "greedy, 300 biases": {"do_sample": False, "sequence_bias": {(token,): 1.0 for token in range(1, 301)}},
    "greedy, bad words": {"do_sample": False, "bad_words_ids": [[token, token + 1] for token in range(1, 31)]},
    "greedy, no repeated 3-grams": {"do_sample": False, "no_repeat_ngram_size": 3},
    "greedy, no repeated 9-grams (the host)": {"do_sample": False, "no_repeat_ngram_size": 9},
}


def call(target: Any, draft: Any, ids: torch.Tensor, num_tokens: int, options: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds of a step, and tokens of a step in the first row."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    options = options | {"max_new_tokens": num_tokens, "assistant_model": draft, "speculative_config": CONFIG}
    target.generate(ids, attention_mask=torch.ones_like(ids), **options)
    torch.cuda.synchronize()
    seconds, metrics = time.perf_counter() - start, hf_specdec.last_metrics()
    steps = max(map(len, metrics.accepted_per_step))
    return 1e3 * (seconds - metrics.seconds["prefill"]) / steps, num_tokens / len(metrics.accepted_per_step[0])


def trace(path: Path, *arguments: Any) -> None:
    """Prints the kernels of a call by their time, and writes a trace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call(*arguments)
    print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=70))
    profiler.export_chrome_trace(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--trace", type=Path, help="folder for profiler traces")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device.")
    target = random_llama(SHAPE, torch.bfloat16, "cuda")
    draft = loading.load_draft_to(str(HEAD), torch.bfloat16, "cuda")
    found = []
    for rows in arguments.rows:
        torch.manual_seed(rows)
        ids, greedy = torch.randint(SHAPE["vocab_size"], (rows, arguments.prompt), device="cuda"), None
        for name in arguments.only:
            told = target, draft, ids, arguments.max_new_tokens, SETTINGS[name]
            for _ in range(2):  # compiles and captures
                call(*told)
            times, lengths = zip(*(call(*told) for _ in range(arguments.calls)), strict=True)
            step, length = statistics.median(times), statistics.mean(lengths)
            greedy = step if name == "greedy" else greedy
            over = None if greedy is None else step / greedy
            found.append({"rows": rows, "setting": name, "ms": step, "over_greedy": over, "tokens_per_step": length})
            ratio = "" if over is None else f", {over:.3f} × greedy"
            spread = f"{min(times):.3f} – {max(times):.3f}"
            print(
                f"{rows} rows, {name}: {step:.3f} ms a step ({spread}){ratio}; {length:.2f} tokens a step", flush=True
            )
            if arguments.trace is not None:
                trace(arguments.trace / f"{rows} rows, {name}.json.gz", *told)
    print(json.dumps({"steps": found, **environment("cuda")}))


if __name__ == "__main__":
    main()
