"""`hf-specdec tune`: the best static tree for a target, a draft and a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Column, Table
from transformers.utils import logging

from .. import loading
from ..benchmarking import prompts as prompt_sets
from ..benchmarking.environment import environment
from ..benchmarking.tables import per_depth, show
from ..benchmarking.tuning import Tuner, Tuning
from ..trees import AutoTree
from ..trees.text import shorten
from .arguments import (
    checked_device,
    checked_dtype,
    checked_prompts,
    load_in,
    or_bad_parameter,
    progress_bar,
    say_how_it_drafts,
)
from .options import (
    DeviceOption,
    DraftOption,
    DtypeOrAutoOption,
    SeedOption,
    TargetArgument,
    ThreadsOption,
)
from .prompt_options import NumPromptsOption, PromptsOption, TaskOption


def tune(
    target: TargetArgument = None,
    draft: DraftOption = "ngram",
    max_nodes: Annotated[int, typer.Option(min=1, max=1024, help="Most draft tokens of a tree.")] = 64,
    max_depth: Annotated[int, typer.Option(min=1, help="Most levels of a tree.")] = 8,
    task: TaskOption = None,
    prompts: PromptsOption = None,
    num_prompts: NumPromptsOption = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Tokens to generate at most.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of the best trees with each prompt.")] = 2,
    dtype: DtypeOrAutoOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
) -> None:
    """Find the fastest static tree, from measured acceptance and measured step times, and time it."""
    device = checked_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    texts = checked_prompts(prompts, task, num_prompts)
    logging.disable_progress_bar()
    model, dtype = load_in(checked_dtype(dtype, device, may_be_auto=True), device, target, "TARGET")
    tokenizer = or_bad_parameter("TARGET", loading.load_tokenizer, target)
    assistant = or_bad_parameter(
        "--draft", loading.load_draft_to, draft, loading.DTYPES[dtype], device, model, tokenizer
    )
    say_how_it_drafts(assistant)
    tuner = Tuner(
        model=model,
        draft=assistant,
        prompts=prompt_sets.encode(tokenizer, texts, device),
        limits=AutoTree(max_nodes=max_nodes, max_depth=max_depth),
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        rounds=rounds,
        seed=seed,
    )
    or_bad_parameter("--draft", tuner.check)
    with progress_bar() as progress:
        bar = progress.add_task("Counting, timing, trying", total=tuner.num_calls)
        tuner.advance = lambda: progress.advance(bar)
        try:
            tuning = tuner.run()
        except ValueError as error:  # texts of one token
            raise typer.BadParameter(str(error), param_hint="--prompts") from error
    _show(tuning)
    setting = {"target": Path(target).name if target else loading.SMOLLM2, "draft": Path(draft).name, "dtype": dtype}
    method = {"temperature": temperature, "max_new_tokens": max_new_tokens, "rounds": rounds, "prompts": len(texts)}
    typer.echo(
        json.dumps({"benchmark": "hf-specdec tune", **setting, **environment(device), **method, **tuning.to_dict()})
    )


def _show(tuning: Tuning) -> None:
    console = Console()
    for depth, shares in enumerate(tuning.chances, start=1):
        console.print(f"accepted at depth {depth}, by rank: {per_depth(shares, most=8)}", highlight=False)
    right: dict[str, Any] = {"justify": "right", "no_wrap": True}
    table = Table(
        "tree",
        *(Column(name, **right) for name in ("nodes", "depth", "tokens/step: expected", "measured")),
        *(Column(name, **right) for name in ("tok/s: expected", "measured", "over no tree")),
        box=None,
        pad_edge=False,
    )
    plain = tuning.candidates[0]
    for found in tuning.candidates:
        tree = found.tree
        table.add_row(
            ("no tree" if tree is None else shorten(str(tree))) + (" ←" if found is tuning.best else ""),
            *(("", "") if tree is None else (str(tree.num_nodes), str(tree.depth))),
            *(f"{length:.2f}" for length in (found.expected_length, found.measured_length)),
            *(f"{rate:.1f}" for rate in (found.expected, found.measured)),
            f"{found.measured / plain.measured:.2f}×",
        )
    console.print()
    show(console, table)
    best = tuning.best
    if best.tree is None:
        console.print("No tree pays here: leave `assistant_model` out, or take another draft.")
        return
    console.print(f"expected {best.expected:.1f} tokens per second after the prefill, measured {best.measured:.1f}")
    typer.echo(f'tree="{best.tree}"')
