"""
Speculation on several GPUs: greedy texts with and without it, whether they are the same, and tokens per second.

    python benchmarks/multi_gpu.py                                            # layers on all GPUs (device_map)
    torchrun --nproc-per-node 2 benchmarks/multi_gpu.py --target random       # a part of every layer on each (tp_plan)

The default is SmolLM2-135M-Instruct with its head in model_cards/, whose nine attention heads cannot be shared out to
two GPUs. `--target random` is a random model of the shape of Llama-3.1-8B (with `--layers` layers) and a draft of its
first two layers; `--epsilon` says how much they disagree. Prints a line for each dtype, then one JSON line; exits with
1 if texts in float32 differ from plain ones, or texts of ranks from each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from suite.pair import TREE, Pair
from suite.sizes import LLAMA_8B
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from hf_specdec import loading
from hf_specdec.benchmarking.comparison import generate
from hf_specdec.benchmarking.contenders import GREEDY, baseline, speculative
from hf_specdec.benchmarking.environment import environment
from hf_specdec.benchmarking.prompts import EncodedPrompt, built_in, encode
from hf_specdec.metrics import metrics_of_last_call
from hf_specdec.smollm2 import smollm2_folder


HEAD = Path(__file__).parents[1] / "model_cards" / "SmolLM2-135M-Instruct-EAGLE3"
IS_PARALLEL = "WORLD_SIZE" in os.environ
RANK = int(os.environ.get("RANK", 0))


def main() -> int:
    args = arguments()
    logging.disable_progress_bar()
    device = loading.default_device()
    if IS_PARALLEL:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        if args.target == "random":
            args.target, args.draft, prompts = random_pair(args, Path(shared(folder)), device)
            args.tree = str(TREE) if args.tree == "default" else args.tree
        else:
            texts = built_in(num_prompts=1)[: args.num_prompts]
            prompts = encode(loading.load_tokenizer(args.target), texts, "cpu")
        for dtype in args.dtype:
            found[dtype] = measure(args, loading.DTYPES[dtype], prompts)
            if RANK == 0:
                print(dtype, json.dumps(found[dtype]), flush=True)
    if IS_PARALLEL:
        dist.destroy_process_group()
    if RANK == 0:
        print(json.dumps(environment(device) | vars(args) | {"found": found}, default=str))
    failed = [row for name, row in found.items() if row["ranks_differ"] or (name == "float32" and row["differ"])]
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=None)
    parser.add_argument("--draft", default=str(HEAD))
    parser.add_argument("--tree", default="default")
    parser.add_argument("--dtype", nargs="+", choices=loading.DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--device-map", default="balanced", help="without torchrun")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--epsilon", type=float, default=0.025)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def random_pair(args: argparse.Namespace, folder: Path, device: str) -> tuple[str, str, list[EncodedPrompt]]:
    """Folders of a random target and its draft, which rank 0 writes, and random prompts."""
    sizes = replace(LLAMA_8B, shape=LLAMA_8B.shape | {"num_hidden_layers": args.layers}, num_prompts=args.num_prompts)
    prompts: list[EncodedPrompt] = []
    if RANK == 0:
        pair = Pair(sizes, torch.bfloat16, device)
        pair.scale(args.epsilon)
        pair.target.save_pretrained(folder / "target")
        pair.draft.save_pretrained(folder / "draft")
        prompts = [EncodedPrompt(prompt.task, prompt.inputs.to("cpu")) for prompt in pair.prompts]
    return str(folder / "target"), str(folder / "draft"), shared(prompts)


def measure(args: argparse.Namespace, dtype: torch.dtype, prompts: list[EncodedPrompt]) -> dict[str, Any]:
    """Texts and speed with and without speculation."""
    target = load(args, dtype)
    draft = loading.load_draft_to(args.draft, dtype, str(place_of_draft(target)))
    plain, tree = baseline("eager", draft), speculative(draft, args.tree)
    options = {**GREEDY, "max_new_tokens": args.max_new_tokens}
    prompts = [EncodedPrompt(prompt.task, prompt.inputs.to(target.device)) for prompt in prompts]
    differ = ranks_differ = 0
    seconds: dict[str, list[float]] = {"plain": [], "tree": []}
    tokens, lengths = {"plain": 0, "tree": 0}, []
    for round_ in range(args.rounds + 1):  # the first one does not count
        for prompt in prompts:
            expected, of_plain = generate(target, plain, prompt, **options)
            text, of_tree = generate(target, tree, prompt, **options)
            if round_ == 0:
                differ += text != expected
                ranks_differ += any(other != text for other in gathered(text))
                continue
            tokens["plain"] += len(expected)
            tokens["tree"] += len(text)
            lengths.append(metrics_of_last_call().mean_acceptance_length)
            seconds["plain"].append(of_plain)
            seconds["tree"].append(of_tree)
    speeds = {name: count / sum(seconds[name]) for name, count in tokens.items()}
    return {
        "devices": sorted({str(value.device) for value in target.parameters()}),
        "ranks": dist.get_world_size() if IS_PARALLEL else 1,
        "texts": len(prompts),
        "differ": differ,
        "ranks_differ": ranks_differ,
        "tokens_per_step": round(statistics.mean(lengths), 2),
        "plain_tokens_per_second": round(speeds["plain"], 1),
        "tree_tokens_per_second": round(speeds["tree"], 1),
        "speed_up": round(speeds["tree"] / speeds["plain"], 2),
    }


def load(args: argparse.Namespace, dtype: torch.dtype) -> PreTrainedModel:
    if not IS_PARALLEL:
        device_map = args.device_map if torch.cuda.is_available() else None
        return loading.load_target(args.target, dtype, loading.default_device(), device_map)
    name = args.target or str(smollm2_folder())
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, tp_plan="auto").eval()


def place_of_draft(target: PreTrainedModel) -> torch.device:
    """The device of the last layer, whose hidden states a head reads."""
    return next(target.get_decoder().layers[-1].parameters()).device


def shared(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    values = [value]
    if IS_PARALLEL:
        dist.broadcast_object_list(values)
    return values[0]


def gathered(value: Any) -> list[Any]:
    """The values of all ranks."""
    values = [value]
    if IS_PARALLEL:
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


if __name__ == "__main__":
    sys.exit(main())
