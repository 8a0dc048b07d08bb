"""
What a draft is worth: acceptance by depth and tree, greedy and sampled, on chat and code, and tokens per second.

    python benchmarks/draft_quality.py --head FOLDER_OR_ID [--target ID_OR_FOLDER] [--dtype bfloat16] [--device cuda]

`--head` is an EAGLE head of any format; `--draft` a draft model; `--medusa` Medusa heads. Greedy texts are compared
with plain `generate` in float32 before anything is measured. Acceptance is taken over batches (rows do not influence
each other), speed at batch 1, plain and speculative calls in turn. Under temperature 1, trees of drawn tokens
(recursive rejection) stand beside trees of the best tokens (the next token drawn from the target) of the same size.
Prints a table, then one JSON line.
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
from hf_specdec import DynamicTree, SpeculationMetrics, SpeculativeConfig, TokenTree
from hf_specdec.smollm2 import smollm2_folder


GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
TREE_16 = DynamicTree(depth=5, top_k=4, num_nodes=16)
TREE_60 = DynamicTree(depth=8, top_k=10, num_nodes=59)
STATIC = TokenTree.from_branching((4, 3, 1))


def settings(draws: bool) -> dict[str, tuple[dict[str, Any], SpeculativeConfig]]:
    """What is compared: options of the call, and how it speculates."""
    found = {
        "T=0, chain of 5": (GREEDY, SpeculativeConfig(tree=TokenTree.chain(5))),
        "T=0, tree of 16": (GREEDY, SpeculativeConfig(tree=TREE_16)),
        "T=0, tree of 60": (GREEDY, SpeculativeConfig(tree=TREE_60)),
        "T=1, best 28 (4, 3, 1), draw from p": (SAMPLED, SpeculativeConfig(tree=STATIC, draft_sampling="greedy")),
        "T=1, best 59, draw from p": (SAMPLED, SpeculativeConfig(tree=TREE_60, draft_sampling="greedy")),
    }
    if draws:
        drawn = {"draft_sampling": "sample", "verification": "rejection"}
        found |= {
            "T=1, drawn chain of 5, rejection": (SAMPLED, SpeculativeConfig(tree=TokenTree.chain(5), **drawn)),
            "T=1, drawn 28 (4, 3, 1), rejection": (SAMPLED, SpeculativeConfig(tree=STATIC, **drawn)),
            "T=1, drawn 59, rejection": (SAMPLED, SpeculativeConfig(tree=TREE_60, **drawn)),
        }
    return found


def load_draft(arguments: argparse.Namespace) -> Any:
    """The assistant."""
    device, dtype = arguments.device, getattr(torch, arguments.dtype)
    if arguments.head:
        return hf_specdec.EagleHead.from_pretrained(arguments.head).to(device).eval()
    if arguments.medusa:
        return hf_specdec.MedusaHeads.from_pretrained(arguments.medusa).to(device).eval()
    return AutoModelForCausalLM.from_pretrained(arguments.draft, dtype=dtype).to(device).eval()


def combined(all_metrics: list[SpeculationMetrics]) -> dict[str, Any]:
    """Acceptance over several calls."""
    drafts = sum(metrics.num_drafts for metrics in all_metrics)
    accepted = [count for metrics in all_metrics for row in metrics.accepted_per_step for count in row]
    depth = max(accepted, default=0)
    return {
        "mean_acceptance_length": 1 + sum(accepted) / max(drafts, 1),
        "acceptance_per_position": [
            sum(count >= place for count in accepted) / max(len(accepted), 1) for place in range(1, depth + 1)
        ],
        "draft_acceptance_rate": sum(accepted) / max(sum(metrics.num_draft_tokens for metrics in all_metrics), 1),
        "steps": drafts,
    }


def acceptance(model: Any, assistant: Any, batches: list[Any], setting: Any, length: int) -> dict[str, Any]:
    """Acceptance of one setting over batches of prompts."""
    options, config = setting
    found = []
    for inputs in batches:
        torch.manual_seed(0)
        model.generate(
            **inputs, **options, max_new_tokens=length, assistant_model=assistant, speculative_config=config
        )
        found.append(hf_specdec.last_metrics())
    return combined(found)


def speed(
    model: Any, assistant: Any, inputs_of_prompts: list[Any], config: Any, length: int, rounds: int
) -> dict[str, float]:
    """Tokens per second, greedy, one prompt at a time, with and without the draft."""
    seconds: dict[str, float] = {"plain": 0.0, "draft": 0.0}
    tokens = dict.fromkeys(seconds, 0)
    for inputs in inputs_of_prompts:
        times: dict[str, list[float]] = {name: [] for name in seconds}
        for round_number in range(rounds + 1):
            for name in seconds:
                options = {"assistant_model": assistant, "speculative_config": config} if name == "draft" else {}
                start = time.perf_counter()
                text = model.generate(**inputs, **GREEDY, max_new_tokens=length, **options)
                count = len(text[0].tolist()) - inputs["input_ids"].shape[1]  # the list waits for the device
                if round_number:  # the first warms up
                    times[name].append(time.perf_counter() - start)
                if round_number == rounds:
                    tokens[name] += count
        for name, values in times.items():
            seconds[name] += statistics.median(values)
    rates = {name: tokens[name] / seconds[name] for name in seconds}
    return {
        "plain_tokens_per_second": rates["plain"],
        "tokens_per_second": rates["draft"],
        "speed_up": rates["draft"] / rates["plain"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", help="Hub id or folder; SmolLM2-135M-Instruct from the package registry by default"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--head", help="Hub id or folder of an EAGLE head")
    what.add_argument("--draft", help="Hub id or folder of a draft model")
    what.add_argument("--medusa", help="Hub id or folder of Medusa heads")
    parser.add_argument("--dtype", default="float32", help="of what is measured; equality is checked in float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=24, help="most prompts of chat, and of code")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of a batch when acceptance is measured")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--speed-prompts", type=int, default=4, help="prompts of each kind that are timed; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    source = arguments.target or str(smollm2_folder())
    source = Path(source) if Path(source).exists() else source
    tokenizer = AutoTokenizer.from_pretrained(source)
    exact = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval().to(arguments.device)
    assistant = load_draft(arguments)
    tasks = {"chat": prompts.chat(arguments.prompts), "code": prompts.code(arguments.prompts)}
    singles = {
        task: [prompts.encode(tokenizer, text).to(arguments.device) for text in texts[: arguments.speed_prompts or 2]]
        for task, texts in tasks.items()
    }
    identical = total = 0
    for inputs in (inputs for task in singles.values() for inputs in task):
        length = {"max_new_tokens": arguments.max_new_tokens}
        plain = exact.generate(**inputs, **GREEDY, **length)
        identical += torch.equal(plain, exact.generate(**inputs, **GREEDY, **length, assistant_model=assistant))
        total += 1
    print(f"identical to plain generate in float32: {identical} of {total}")
    model = exact
    if arguments.dtype != "float32":
        model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, arguments.dtype))
        model = model.eval().to(arguments.device)
    result: dict[str, Any] = {"identical_in_float32": [identical, total]}
    for task, texts in tasks.items():
        batches = [
            prompts.encode(tokenizer, texts[start : start + arguments.batch_size]).to(arguments.device)
            for start in range(0, len(texts), arguments.batch_size)
        ]
        for name, setting in settings(draws=not arguments.medusa).items():
            if arguments.medusa and isinstance(setting[1].tree, TokenTree) and setting[1].tree.depth > 4:
                continue
            found = acceptance(model, assistant, batches, setting, arguments.max_new_tokens)
            result[f"{task}: {name}"] = found
            by_depth = " ".join(f"{share:.2f}" for share in found["acceptance_per_position"][:6])
            print(f"{task}: {name:36} {found['mean_acceptance_length']:.2f} tokens a step; by depth {by_depth}")
        if arguments.speed_prompts:
            for name, config in (("its own tree", None), ("tree of 60", SpeculativeConfig(tree=TREE_60))):
                found = speed(model, assistant, singles[task], config, arguments.max_new_tokens, arguments.rounds)
                result[f"{task}: speed, {name}"] = found
                print(
                    f"{task}: speed, {name}: {found['plain_tokens_per_second']:.1f} → "
                    f"{found['tokens_per_second']:.1f} tok/s, {found['speed_up']:.2f}×"
                )
    device = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "cpu"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    setting = {"device": device, "dtype": arguments.dtype, "threads": arguments.threads}
    print(json.dumps({**setting, **versions, "results": result}))


if __name__ == "__main__":
    main()
