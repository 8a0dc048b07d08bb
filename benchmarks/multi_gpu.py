"""
Speculation on several GPUs: texts without it, with steps by the host and with captured ones, whether they are the
same, tokens per second, and the share of a step outside the forwards of target and draft (each captured alone).

    python benchmarks/multi_gpu.py                                            # layers on all GPUs (device_map)
    torchrun --nproc-per-node 2 benchmarks/multi_gpu.py --target random       # a part of every layer on each (tp_plan)
    CUDA_VISIBLE_DEVICES=0 python benchmarks/multi_gpu.py --target random     # one GPU alone

The default is SmolLM2-135M-Instruct with its head in model_cards/, whose nine attention heads cannot be shared out to
two GPUs. `--target random` is a random model of the shape of Llama-3.1-8B (with `--layers` layers) and a draft of its
first two layers; `--epsilon` says how much they disagree. Prints a line for each dtype and temperature, then one JSON
line; exits with 1 if greedy texts in float32 differ from plain ones, or texts of ranks from each other.
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
from suite.forwards import forward_after
from suite.pair import TREE, Pair
from suite.sizes import LLAMA_8B
from suite.steps import chain_of
from suite.timing import milliseconds
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from hf_specdec import loading
from hf_specdec.benchmarking.comparison import generate
from hf_specdec.benchmarking.contenders import Contender, baseline, sampling_options, speculative
from hf_specdec.benchmarking.environment import environment
from hf_specdec.benchmarking.prompts import EncodedPrompt, built_in, encode
from hf_specdec.graphs import RECORDERS, obstacle_to_graphs
from hf_specdec.graphs.exchanges import captured_together
from hf_specdec.metrics import SpeculationMetrics, metrics_of_last_call
from hf_specdec.ranks import Ranks
from hf_specdec.smollm2 import smollm2_folder
from hf_specdec.trees import TokenTree
from hf_specdec.trees.text import parse_tree


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
            for name, row in measure(args, loading.DTYPES[dtype], prompts).items():
                found[f"{dtype}, {name}"] = row
                if RANK == 0:
                    print(f"{dtype}, {name}", json.dumps(row), flush=True)
    if IS_PARALLEL:
        dist.destroy_process_group()
    if RANK == 0:
        print(json.dumps(environment(device) | vars(args) | {"found": found}, default=str))
    must_agree = "float32, greedy"
    failed = [row for name, row in found.items() if row["ranks_differ"] or (name == must_agree and row["differ"])]
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
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
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
    """Texts and speed of each way to run, by temperature."""
    target = load(args, dtype)
    draft = loading.load_draft_to(args.draft, dtype, str(place_of_draft(target)))
    captured = speculative(draft, args.tree)
    by_host = {"speculative_config": replace(captured.options["speculative_config"], cuda_graphs=False)}
    ways = {
        "plain": baseline("eager", draft),
        "host": replace(captured, options=captured.options | by_host),
        "captured": captured,
    }
    prompts = [EncodedPrompt(prompt.task, prompt.inputs.to(target.device)) for prompt in prompts]
    length = {"max_new_tokens": args.max_new_tokens}
    found = {}
    for temperature in args.temperature:
        runs = Runs(target, ways, prompts, sampling_options(temperature) | length)
        for is_timed in (False, *[True] * args.rounds):
            runs.add(is_timed)
        found["greedy" if temperature == 0 else f"T={temperature:g}"] = runs.figures() | {
            "devices": sorted({str(value.device) for value in target.parameters()}),
            "ranks": dist.get_world_size() if IS_PARALLEL else 1,
            **runs.besides(forwards_of(target, draft, args.tree, runs.tokens_per_step("captured"))),
        }
    return found


class Runs:
    """
    The calls of all ways for all prompts.

    Args:
        target (`PreTrainedModel`): the target.
        ways (`dict`): contenders by name; "plain" is `generate`.
        prompts (`list`): the prompts.
        options (`dict`): arguments of `generate`.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        ways: dict[str, Contender],
        prompts: list[EncodedPrompt],
        options: dict[str, Any],
    ):
        self.target, self.ways, self.prompts, self.options = target, ways, prompts, options
        self.seconds: dict[str, float] = dict.fromkeys(ways, 0.0)
        self.tokens = dict.fromkeys(ways, 0)
        self.metrics: dict[str, list[SpeculationMetrics]] = {name: [] for name in ways}
        self.differ = self.ranks_differ = 0

    def add(self, is_timed: bool) -> None:
        """Runs all ways once; calls that are not timed are compared."""
        for number, prompt in enumerate(self.prompts):
            texts = {}
            for name, way in self.ways.items():
                torch.manual_seed(number)
                texts[name], seconds = generate(self.target, way, prompt, **self.options)
                if is_timed:
                    self.seconds[name] += seconds
                    self.tokens[name] += len(texts[name])
                    self.metrics[name] += [metrics_of_last_call()] if way.is_ours else []
            if not is_timed:
                self.differ += sum(text != texts["plain"] for text in texts.values())  # those of T>0 may
                self.ranks_differ += any(other != texts for other in gathered(texts))

    def figures(self) -> dict[str, Any]:
        speeds = {name: count / self.seconds[name] for name, count in self.tokens.items()}
        ours = [name for name, way in self.ways.items() if way.is_ours]
        return {
            "texts": len(self.prompts),
            "differ": self.differ,
            "ranks_differ": self.ranks_differ,
            "tokens_per_step": {name: round(self.tokens_per_step(name), 2) for name in ours},
            "milliseconds_of_step": {name: round(self.milliseconds_of_step(name), 2) for name in ours},
            "tokens_per_second": {name: round(speed, 1) for name, speed in speeds.items()},
            "speed_up": {name: round(speeds[name] / speeds["plain"], 2) for name in ours},
        }

    def besides(self, forwards: dict[str, float]) -> dict[str, Any]:
        """The milliseconds of the forwards, and the share of each way's step that is outside of them."""
        if not forwards:
            return {}
        own, total = [name for name, way in self.ways.items() if way.is_ours], sum(forwards.values())
        outside = {name: round(1 - total / self.milliseconds_of_step(name), 3) for name in own}
        return {"forwards": {name: round(one, 2) for name, one in forwards.items()}, "outside": outside}

    def tokens_per_step(self, name: str) -> float:
        return statistics.mean(metrics.mean_acceptance_length for metrics in self.metrics[name])

    def milliseconds_of_step(self, name: str) -> float:
        """Of a whole step, all that is no prefill."""
        total = SpeculationMetrics.sum_of(self.metrics[name])
        steps = sum(len(metrics.accepted_per_step[0]) for metrics in self.metrics[name])
        return 1000 * (sum(total.seconds.values()) - total.seconds.get("prefill", 0.0)) / steps


def forwards_of(target: PreTrainedModel, draft: Any, tree: str, num_new: float) -> dict[str, float]:
    """
    Milliseconds of the target's forward and of all the draft's in a step, each captured alone; nothing where they
    cannot be captured, or for a head or a tree that is not static.
    """
    shape = parse_tree(tree)
    can_run = obstacle_to_graphs(target, "auto") is None and isinstance(draft, PreTrainedModel)
    if not can_run or not isinstance(shape, TokenTree):
        return {}
    ids = torch.randint(target.config.vocab_size, (1, 512), device=target.device)

    def one(model: PreTrainedModel, nodes: TokenTree | None) -> float:
        with forward_after(model, ids, nodes) as forward, captured_together(Ranks.of(model)):
            replay, _ = RECORDERS[model.device.type](lambda: [forward().logits], model.device)
            return statistics.median(milliseconds(replay, model.device, 30))

    parents = [
        sum(depth == level and bool(shape.children[node]) for node, depth in enumerate(shape.depths))
        for level in range(1, shape.depth)
    ]
    return {
        "target": one(target, shape),
        "draft": sum(one(draft, chain_of(count)) for count in (round(num_new), *parents)),
    }


def load(args: argparse.Namespace, dtype: torch.dtype) -> PreTrainedModel:
    if not IS_PARALLEL:
        device_map = args.device_map if torch.cuda.device_count() > 1 else None
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
