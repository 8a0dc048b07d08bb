"""
Tokens per second of rollouts at temperature 1, with a head and without drafts, by the same kept manager.

    python benchmarks/rollouts.py [--device cuda] [--open 16 64] [--new-tokens 256] [--tree auto]

The policy is SmolLM2-135M-Instruct, the draft its EAGLE-3 head. So many prompts as `--open` says come at once, each as
often as `--generations`; texts end where they end. Ways take turns. Before every call all weights are written to, as
an optimizer does, so that no K/V of prompts are left from the call before. The first calls, in which graphs are
captured, do not count.

- plain: the same manager with `speculate=False`;
- frozen: the head;
- online: an `OnlineHead` (its own manager), whose learning between the calls is in the time.

Prints a line for each, then one JSON line. To reach: frozen 1.5 × plain with 16 prompts open, and 1.2 × with 64;
online within 5 % of frozen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from load import BLOCK_SIZE, HEAD, blocks_of
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

import hf_specdec
from hf_specdec.benchmarking.comparison import synchronize
from hf_specdec.benchmarking.environment import environment
from hf_specdec.benchmarking.prompts import built_in, encode_turns
from hf_specdec.smollm2 import smollm2_folder


def prompts_of(tokenizer: Any, number: int, generations: int) -> list[list[int]]:
    texts = [prompt.text for prompt in built_in()]
    chosen = [texts[place % len(texts)] for place in range(-(-number // generations))]
    tokens = [encode_turns(tokenizer, [text])["input_ids"][0].tolist() for text in chosen]
    return [tokens[place // generations] for place in range(number)]


def call(model: Any, prompts: list[list[int]], new_tokens: int, limits: Any, **options: Any) -> tuple[float, int, Any]:
    """Seconds, tokens and tokens per step of one rollout, after a write to all weights."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.0)
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    synchronize(model.device)
    start = time.perf_counter()
    outputs = model.generate_batch(prompts, generation_config=config, continuous_batching_config=limits, **options)
    synchronize(model.device)
    seconds = time.perf_counter() - start
    metrics = hf_specdec.SpeculationMetrics.sum_of(output.speculation for output in outputs.values())
    return seconds, sum(len(output.generated_tokens) for output in outputs.values()), metrics.mean_acceptance_length


def measure(model: Any, draft: Any, ways: dict[str, dict[str, Any]], options: Any, prompts: Any) -> dict[str, Any]:
    """What each way has measured, call after call."""
    found: dict[str, list[tuple[float, int, Any]]] = {way: [] for way in ways}
    blocks = len(prompts) * (-(-(max(map(len, prompts)) + options.new_tokens) // BLOCK_SIZE) + 2)
    limits = ContinuousBatchingConfig(max_requests_per_batch=len(prompts), **blocks_of(blocks))
    config = hf_specdec.SpeculativeConfig(tree=options.tree, compile=options.compile)
    with hf_specdec.rollouts(model, draft, speculative_config=config, warmup=options.warmup):
        for _ in range(options.unmeasured + options.calls):
            for way, choice in ways.items():
                found[way].append(call(model, prompts, options.new_tokens, limits, **choice))
    return {way: calls[options.unmeasured :] for way, calls in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=None, help="Hub id or folder; default: SmolLM2-135M-Instruct")
    parser.add_argument("--draft", default=str(HEAD))
    parser.add_argument("--open", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--tree", default="auto")
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--unmeasured", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--warmup", action="store_true", help="capture and time all trees before the first call")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="default: bfloat16 on a GPU, float32 on a CPU")
    options = parser.parse_args()
    dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    folder = options.target or smollm2_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(options.device)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    head = hf_specdec.EagleHead.from_pretrained(options.draft).to(options.device)
    torch.manual_seed(0)
    report: dict[str, Any] = {}
    for number in options.open:
        prompts = prompts_of(tokenizer, number, options.generations)
        found = measure(model, head, {"plain": {"speculate": False}, "frozen": {}}, options, prompts)
        online = hf_specdec.OnlineHead(head)
        found |= measure(model, online, {"online": {}}, options, prompts)
        rates = {
            way: statistics.median(tokens / seconds for seconds, tokens, _ in calls) for way, calls in found.items()
        }
        for way, calls in found.items():
            accepted = statistics.median(length for *_, length in calls)
            print(
                f"{number:4} open, {way:>7}: {rates[way]:9.1f} tokens/s, {rates[way] / rates['plain']:.2f} of plain, "
                f"{accepted:.2f} tokens per step"
            )
        share = online.seconds_learning / online.seconds_between
        print(f"{number:4} open: the online head has learnt {online.num_steps} steps in {share:.1%} of the time")
        report[str(number)] = {"tokens_per_second": rates, "learning": share, "calls": found}
    print(json.dumps({"open": report, "options": vars(options), "environment": environment(options.device)}))


if __name__ == "__main__":
    main()
