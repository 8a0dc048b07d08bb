"""`hf-specdec bench`: speed and acceptance of a draft and its trees, beside transformers' own methods."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .. import loading
from ..benchmarking import bench as benchmark
from ..benchmarking import contenders as ways
from ..benchmarking import dtypes, suites
from ..benchmarking import prompts as prompt_sets
from ..benchmarking.comparison import generate
from ..benchmarking.environment import environment
from ..benchmarking.tables import differences_table, show, suite_table, table
from ..trees.text import parse_tree
from .arguments import (
    checked_device,
    checked_dtype,
    checked_prompts,
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
    TreesOption,
)
from .prompt_options import NumPromptsOption, PromptsOption, TaskOption


SPEED_TARGETS = Path(__file__).parents[2] / "benchmarks" / "speed_targets.py"
"""Measures the project's speed targets; in a checkout alone."""


def bench(
    context: typer.Context,
    target: TargetArgument = None,
    draft: DraftOption = "ngram",
    tree: TreesOption = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Compared with, too, besides plain generate: {', '.join(ways.BASELINES[1:])}. Several may be given."
        ),
    ] = None,
    task: TaskOption = None,
    prompts: PromptsOption = None,
    num_prompts: NumPromptsOption = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(min=0.0, help="0: greedy. Several may be given.", show_default="0"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate at most.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls with each prompt.")] = 3,
    dtype: DtypeOrAutoOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    gate: Annotated[
        bool, typer.Option(help="Compare greedy texts with plain generate in float32 before anything is timed.")
    ] = True,
    plot: Annotated[Path | None, typer.Option(help="Draws the figures into this file, such as bench.png.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Writes a torch profiler trace of some steps into this folder.")
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help=f"Public questions, fetched unless --prompts names their file: {', '.join(suites.SUITES)}. "
            "--num-prompts takes the first of each task.",
        ),
    ] = None,
    only: Annotated[str | None, typer.Option(hidden=True)] = None,
    tiny: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """
    Time a draft and its trees against plain generate, on your prompts or built-in ones. Exits with 1 if a greedy
    float32 text differs from plain generate's (then nothing is timed), or one that is timed where it is no near-tie.
    """
    if suite == "gpu":
        raise typer.Exit(_measure_speed_targets(context))
    if only is not None or tiny:
        raise typer.BadParameter("belongs to --suite gpu.", param_hint="--only" if only is not None else "--tiny")
    device = checked_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    logging.disable_progress_bar()
    _check_plot(plot)
    for text in tree or ():
        or_bad_parameter("--tree", parse_tree, text)
    dtype, loaded = checked_dtype(dtype, device, may_be_auto=True), list[PreTrainedModel]()
    if dtype == "auto":
        load = partial(loading.load_target, target, device=device)
        model, times = or_bad_parameter("TARGET", dtypes.measure, load)
        typer.echo(dtypes.describe(times), err=True)
        dtype = dtypes.fastest(times)
        loaded.append(model)
        del model
    request = Request(
        target=target,
        draft=draft,
        device=device,
        trees=list(dict.fromkeys(tree or ["default"])),
        baselines=list(dict.fromkeys(["eager", *(baseline or [])])),
        texts=_texts(suite, prompts, task, num_prompts),
        suite=suite,
        method=benchmark.Method(
            temperatures=tuple(dict.fromkeys(temperature or [0.0])),
            max_new_tokens=max_new_tokens,
            rounds=rounds,
            seed=seed,
        ),
        dtype=dtype,
        loaded=loaded,
    )
    with progress_bar() as progress:
        report = request.measure(progress, gate=gate, profile=profile)
    _show(report, plot)
    if report.is_lossless is False:
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The checked arguments of a benchmark."""

    target: str | None
    draft: str
    dtype: str
    device: str
    trees: list[str]
    baselines: list[str]
    texts: list[prompt_sets.Prompt]
    suite: str | None = None
    method: benchmark.Method
    loaded: list[PreTrainedModel] = field(default_factory=list)
    """The target in float32, if it has been loaded: the first use takes it out."""

    def measure(self, progress: Progress, *, gate: bool, profile: Path | None) -> benchmark.Report:
        """Compares texts in float32 if `gate`, then times the contenders unless a text differs."""
        tokenizer = or_bad_parameter("TARGET", loading.load_tokenizer, self.target)
        prompts = prompt_sets.encode(tokenizer, self.texts, self.device)
        report = benchmark.Report(setting=self.setting, gate=None)
        model, contenders = self.load("float32" if gate else self.dtype, tokenizer, prompts[0])
        say_how_it_drafts(contenders[-1].options["assistant_model"])
        if later := sum(len(text.later_turns) for text in self.texts):
            bar = progress.add_task("Answering first turns", total=later)
            longest, step = self.method.max_new_tokens, partial(progress.advance, bar)
            prompts = suites.with_later_turns(model, tokenizer, self.texts, prompts, longest, step)
        if gate:
            total = benchmark.num_gate_calls(len(prompts), contenders)
            bar = progress.add_task("Comparing texts in float32", total=total)
            report.gate = benchmark.gate(model, prompts, contenders, self.method, lambda: progress.advance(bar))
        if report.is_lossless is False:
            return report
        if gate and self.dtype != "float32":
            del model, contenders  # free memory before loading in another dtype
            model, contenders = self.load(self.dtype, tokenizer, prompts[0])
        total = benchmark.num_timed_calls(len(prompts), contenders, self.method)
        bar = progress.add_task("Timing", total=total)
        benchmark.measure(report, model, prompts, contenders, self.method, lambda: progress.advance(bar))
        if profile is not None:
            report.setting["trace"] = str(benchmark.trace(model, prompts, contenders, self.method, profile))
        return report

    def load(
        self, dtype: str, tokenizer: PreTrainedTokenizerBase, prompt: prompt_sets.EncodedPrompt
    ) -> tuple[PreTrainedModel, list[ways.Contender]]:
        """
        The target and the contenders. Every tree has generated two tokens, so that a draft that does not fit raises
        `typer.BadParameter` early.
        """
        place = loading.DTYPES[dtype], self.device
        model = self.loaded.pop() if self.loaded else None
        if model is None or dtype != "float32":
            model = None  # frees its memory
            model = or_bad_parameter("TARGET", loading.load_target, self.target, *place)
        draft = or_bad_parameter("--draft", loading.load_draft_to, self.draft, *place, model, tokenizer)
        contenders = [or_bad_parameter("--baseline", ways.baseline, name, draft) for name in self.baselines]
        ours = ways.speculative_with_all(draft, self.trees)
        for contender, temperature in itertools.product(ours, self.method.temperatures):
            options = ways.sampling_options(temperature) | {"max_new_tokens": 2}
            try:
                generate(model, contender, prompt, **options)
            except ValueError as error:
                raise typer.BadParameter(str(error), param_hint=f"--draft {self.draft}, {contender.name}") from error
        return model, contenders + ours

    @property
    def setting(self) -> dict[str, Any]:
        """Models, machine and method as a dictionary for JSON; folders are named by their last part."""
        method = self.method
        return {
            "target": Path(self.target).name if self.target else loading.SMOLLM2,
            "draft": Path(self.draft).name,
            "dtype": self.dtype,
            **environment(self.device),
            "max_new_tokens": method.max_new_tokens,
            "rounds": method.rounds,
            "seed": method.seed,
            "prompts": Counter(text.task for text in self.texts),
            **({} if self.suite is None else {"suite": self.suite}),
        }


# ---------------------------------------------------------------------------------------------------------- arguments


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("needs matplotlib: `pip install 'hf-specdec[bench]'`.", param_hint="--plot")
    if plot.suffix not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(f"{plot} must end in .png, .svg or .pdf.", param_hint="--plot")
    if not plot.absolute().parent.is_dir():
        raise typer.BadParameter(f"{plot.parent} is no folder. Make it first.", param_hint="--plot")


def _texts(
    suite: str | None, prompts: Path | None, task: list[str] | None, num_prompts: int | None
) -> list[prompt_sets.Prompt]:
    if suite is None:
        return checked_prompts(prompts, task, num_prompts)
    if task:
        raise typer.BadParameter("give this or --suite, not both.", param_hint="--task")
    hint = "--suite" if prompts is None else "--prompts"
    return prompt_sets.first_of_each(or_bad_parameter(hint, suites.questions, suite, prompts), num_prompts)


WITH_SUITE = ("suite", "only", "tiny", "target", "draft", "device", "threads", "rounds", "profile")


def _measure_speed_targets(context: typer.Context) -> int:
    """The exit status of `SPEED_TARGETS` with the options that were given."""
    words: list[str] = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name == "suite" or source is None or source.name == "DEFAULT":
            continue
        if parameter.name not in WITH_SUITE:
            raise typer.BadParameter("does not go with --suite gpu.", param_hint=parameter.opts[0])
        value = context.params[parameter.name]
        words += [f"--{parameter.name}", *([] if value is True else [str(value)])]
    if not SPEED_TARGETS.is_file():
        raise typer.BadParameter(
            "the speed targets are measured in a checkout of the repository, by `python benchmarks/speed_targets.py`.",
            param_hint="--suite",
        )
    return subprocess.call([sys.executable, str(SPEED_TARGETS), *words])


# ------------------------------------------------------------------------------------------------------------- output


def _show(report: benchmark.Report, plot: Path | None) -> None:
    console, setting = Console(), report.setting
    names = ("target", "draft", "dtype", "device", "threads", "torch", "transformers")
    console.print(", ".join(f"{name} {setting[name]}" for name in names), markup=False, highlight=False)
    gate = report.gate
    if gate is None:
        console.print("texts were not compared in float32")
    else:
        for name, count in gate.identical.items():
            note = f"{name}: {count} of {gate.num_prompts} texts identical to plain generate in float32"
            console.print(note, markup=False)
    if gate is not None and not gate.is_passed:
        show(console, differences_table(gate.differences))
        console.print("Not timed: a speed-up of another text would mean nothing.")
    else:
        console.print()
        show(console, table(report), table(report, is_brief=True))
        if "suite" in setting:
            console.print("\nAs Spec-Bench counts (means over steps, and over questions):")
            show(console, suite_table(report))
        if report.no_ties:
            show(console, differences_table(report.no_ties))
            console.print(
                f"In {setting['dtype']}, these texts part from plain generate's where no rounding explains it."
            )
        elif report.differences:
            console.print(f"In {setting['dtype']}, texts part where the two best logits all but tie.")
        if plot is not None:
            from ..benchmarking.plot import save_plot

            save_plot(report, plot)
            console.print(f"drawn: {plot}", markup=False)
        if "trace" in setting:
            console.print(f"traced: {setting['trace']} (open it in Perfetto)", markup=False)
    typer.echo(json.dumps(report.to_dict()))
