"""
What a draft is worth: acceptance by depth and tree, greedy and sampled, on chat and code, and tokens per second.

    python benchmarks/draft_quality.py --draft FOLDER_OR_ID [--target ID_OR_FOLDER] [--dtype bfloat16] [--json FILE]

`--draft` (or `--head`) is a head of any format or a draft model, told by its weights. Greedy texts are compared with
plain `generate` in float32 before anything is measured. Acceptance is taken over batches (rows do not influence each
other), speed at batch 1, plain and speculative calls in turn. Under temperature 1, trees of drawn tokens (recursive
rejection) stand beside trees of the best tokens (the next token drawn from the target) of the same size.

Prints a line for each measurement, then all of them as one JSON line. `--json FILE` has the same, written anew after
every measurement: a run that is cut short leaves what it had. `write_card.py` makes a model card of such files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import prompts
import torch

import hf_specdec
from hf_specdec import DynamicTree, Measurement, MedusaHeads, SpeculativeConfig, TokenTree
from hf_specdec.benchmarking.comparison import compare
from hf_specdec.benchmarking.contenders import GREEDY, Contender, baseline, sampling_options
from hf_specdec.benchmarking.environment import environment
from hf_specdec.benchmarking.figures import figures
from hf_specdec.benchmarking.prompts import EncodedPrompt, encode_turns
from hf_specdec.drafters import as_drafter
from hf_specdec.loading import SMOLLM2, load_draft_to, load_target, load_tokenizer


CHAIN = TokenTree.chain(5)
TREE_16 = DynamicTree(depth=5, top_k=4, num_nodes=16)
TREE_60 = DynamicTree(depth=8, top_k=10, num_nodes=59)
STATIC = TokenTree.from_branching((4, 3, 1))
TREES = {"chain of 5": CHAIN, "tree of 16": TREE_16, "tree of 60": TREE_60}
SAMPLED_TREES = {"chain of 5": CHAIN, "(4, 3, 1), 28 nodes": STATIC, "tree of 60": TREE_60}

DATASETS = {
    "chat": {"dataset": "chat, {} questions"},
    "code": {"dataset": "HumanEval, {} problems", "dataset_id": "openai/openai_humaneval"},
}


class Results:
    """
    Measurements, printed and written as they are made.

    Args:
        about (`dict`): fields that the measurements have in common, for the JSON document.
        path (`Path`, *optional*): file of the JSON document, replaced after every measurement.
    """

    def __init__(self, about: dict[str, Any], path: Path | None):
        self.document, self.path = about | {"measurements": []}, path

    def add(self, found: Measurement) -> None:
        """Adds and prints a measurement, and writes all measurements to the file."""
        self.document["measurements"].append(asdict(found))
        depths = " ".join(f"{share:.2f}" for share in (found.acceptance_per_position or ())[:8])
        how = f"T={found.temperature:g} {found.tree}, {found.draft_sampling}, {found.verification}"
        speed = ""
        if found.speed_up is not None:
            speed = (
                f"; {found.plain_tokens_per_second:.1f} → {found.tokens_per_second:.1f} tok/s: {found.speed_up:.2f}"
            )
        print(
            f"{found.dataset}: {how:52} {found.mean_acceptance_length:.2f} tokens a step ({depths}){speed}", flush=True
        )
        if self.path is not None:
            scratch = self.path.with_name(f".{self.path.name}")
            scratch.write_text(json.dumps(self.document, indent=1) + "\n")
            os.replace(scratch, self.path)


def fitting(trees: dict[str, Any], assistant: Any) -> dict[str, Any]:
    """
    The trees that a draft can fill, by name: dynamic ones with as many levels as it proposes, but no more than they
    have; the largest has all levels of a block.
    """
    most = as_drafter(assistant).max_depth
    if most is None:
        return trees
    found = {}
    for name, tree in trees.items():
        if isinstance(tree, DynamicTree):
            depth = most if tree is TREE_60 else min(tree.depth, most)
            candidates = tree.top_k + (depth - 1) * tree.top_k**2
            found[name] = replace(tree, depth=depth, num_nodes=min(tree.num_nodes, candidates))
        elif tree.depth <= most:
            found[name] = tree
    return found


def settings(assistant: Any) -> Iterator[tuple[str, float, SpeculativeConfig]]:
    """The settings in which acceptance is measured: a tree's name, the temperature, and the speculative config."""
    best = {"draft_sampling": "greedy", "verification": "target"}
    drawn = {"draft_sampling": "sample", "verification": "rejection"}
    for temperature, trees, ways in (
        (0.0, TREES, [best]),
        (1.0, SAMPLED_TREES, [best, drawn][: 1 if isinstance(assistant, MedusaHeads) else 2]),
    ):
        for name, tree in fitting(trees, assistant).items():
            yield from ((name, temperature, SpeculativeConfig(tree=tree, **way)) for way in ways)


def acceptance(model: Any, assistant: Any, batches: list[Any], temperature: float, config: Any, length: int) -> Any:
    """The pooled metrics of one setting over batches of prompts."""
    found = []
    for inputs in batches:
        torch.manual_seed(0)
        options = {**sampling_options(temperature), "max_new_tokens": length}
        model.generate(**inputs, **options, assistant_model=assistant, speculative_config=config)
        found.append(hf_specdec.last_metrics())
    return hf_specdec.SpeculationMetrics.sum_of(found)


def speeds(model: Any, assistant: Any, texts: list[EncodedPrompt], length: int, rounds: int) -> Iterator[Measurement]:
    """Measurements of greedy calls with several trees, in turn with plain `generate`, one prompt at a time."""
    contenders = [baseline("eager", assistant)]
    for name, tree in {"its own": as_drafter(assistant).default_tree, **fitting(TREES, assistant)}.items():
        options = {"assistant_model": assistant, "speculative_config": SpeculativeConfig(tree=tree)}
        contenders.append(Contender(name, options, tree=name))
    calls = compare(model, texts, contenders, temperature=0.0, max_new_tokens=length, rounds=rounds)
    plain, *ours = figures(calls, temperature=0.0, reference=contenders[0].name)
    for found in ours:
        yield Measurement(
            dataset=DATASETS[found.task]["dataset"].format(len(texts)),
            dataset_id=DATASETS[found.task].get("dataset_id"),
            tree=found.contender,
            mean_acceptance_length=found.mean_acceptance_length,
            acceptance_per_position=tuple(found.acceptance_per_position),
            tokens_per_second=found.tokens_per_second,
            plain_tokens_per_second=plain.tokens_per_second,
            draft_sampling="greedy",
            verification="target",
            dtype=str(model.dtype).removeprefix("torch."),
            hardware=hardware(str(model.device)),
        )


def hardware(device: str) -> str:
    """The name of the machine for model cards."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def count_identical(model: Any, assistant: Any, inputs_of_prompts: list[Any], length: int) -> int:
    """The number of greedy texts that equal plain `generate`'s."""
    options, config = {**GREEDY, "max_new_tokens": length}, SpeculativeConfig()
    return sum(
        model.generate(**inputs, **options).equal(
            model.generate(**inputs, **options, assistant_model=assistant, speculative_config=config)
        )
        for inputs in inputs_of_prompts
    )


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", help="Hub id or folder; SmolLM2-135M-Instruct from the package registry by default"
    )
    parser.add_argument("--draft", "--head", required=True, help="Hub id or folder of a head or draft model")
    parser.add_argument("--dtype", default="float32", help="of what is measured; equality is checked in float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=24, help="most prompts of chat, and of code; 0: speed alone")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of a batch when acceptance is measured")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--speed-prompts", type=int, default=4, help="prompts of each kind that are timed; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the results, written anew after each")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(words)
    torch.set_num_threads(arguments.threads)
    device, length = arguments.device, arguments.max_new_tokens
    tokenizer = load_tokenizer(arguments.target)
    dtype = getattr(torch, arguments.dtype)
    model = load_target(arguments.target, torch.float32, device)
    assistant = load_draft_to(arguments.draft, dtype, device)
    most = max(arguments.prompts, arguments.speed_prompts, 2)
    tasks = {"chat": prompts.chat(most), "code": prompts.code(most)}

    def encode(*texts: str) -> Any:
        return encode_turns(tokenizer, texts).to(device)

    gate = [encode(text) for texts in tasks.values() for text in texts[: arguments.speed_prompts or 2]]
    identical = count_identical(model, assistant, gate, length)
    print(f"identical to plain generate in float32: {identical} of {len(gate)}")
    target = SMOLLM2 if arguments.target is None else Path(arguments.target).name
    about = {"target": target, "draft": Path(arguments.draft).name, **environment(device), "dtype": arguments.dtype}
    results = Results(about | {"identical_in_float32": [identical, len(gate)]}, arguments.json)
    if dtype != torch.float32:
        model = load_target(arguments.target, dtype, device)

    for task, texts in tasks.items():
        texts = texts[: arguments.prompts]
        starts = range(0, len(texts), arguments.batch_size)
        batches = [encode(*texts[start : start + arguments.batch_size]) for start in starts]
        for tree, temperature, config in settings(assistant) if batches else ():
            found = Measurement.from_metrics(
                acceptance(model, assistant, batches, temperature, config, length),
                dataset=DATASETS[task]["dataset"].format(len(texts)),
                dataset_id=DATASETS[task].get("dataset_id"),
                tree=tree,
                temperature=temperature,
                draft_sampling=config.draft_sampling,
                verification=config.verification,
                batch_size=min(arguments.batch_size, len(texts)),
                dtype=arguments.dtype,
                hardware=hardware(device),
            )
            results.add(found)
    for task, texts in tasks.items() if arguments.speed_prompts else ():
        singles = [EncodedPrompt(task, encode(text)) for text in texts[: arguments.speed_prompts]]
        for found in speeds(model, assistant, singles, length, arguments.rounds):
            results.add(found)
    print(json.dumps(results.document))


if __name__ == "__main__":
    main()
