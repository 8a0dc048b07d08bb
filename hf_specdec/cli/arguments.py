"""Checked arguments and the progress bar that several commands share."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel

from .. import loading
from ..benchmarking import dtypes
from ..benchmarking import prompts as prompt_sets
from ..drafters import OtherVocabularyDrafter


def or_bad_parameter(hint: str, function: Any, *arguments: Any) -> Any:
    """Calls a function; its errors become `typer.BadParameter` with `hint` as the parameter."""
    try:
        return function(*arguments)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint=hint) from error


def checked_device(device: str | None) -> str:
    """The device given on the command line, or the default device; `typer.BadParameter` if there is no such device."""
    device = device or loading.default_device()
    try:
        kind, index = torch.device(device).type, torch.device(device).index
    except RuntimeError as error:
        raise typer.BadParameter(
            f"{device!r} is no device. Write cpu, cuda or cuda:1.", param_hint="--device"
        ) from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(f"{device!r}: PyTorch finds no CUDA device here. Use cpu.", param_hint="--device")
    if kind == "cuda" and index is not None and index >= (number := torch.cuda.device_count()):
        raise typer.BadParameter(
            f"{device!r}: PyTorch finds {number} CUDA devices here, from 0 to {number - 1}.", param_hint="--device"
        )
    return device


def checked_dtype(dtype: str | None, device: str, *, may_be_auto: bool = False) -> str:
    """The dtype given on the command line, by default float32 on a CPU, else bfloat16; on a CPU it may be `auto`."""
    if dtype == "auto" and may_be_auto:
        if device == "cpu":
            return dtype
        dtype = None
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    if dtype not in loading.DTYPES:
        auto = ", auto" if may_be_auto else ""
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(loading.DTYPES)}{auto}.", param_hint="--dtype")
    return dtype


def load_in(dtype: str, device: str, target: str | None, hint: str) -> tuple[PreTrainedModel, str]:
    """
    The target, a parameter called `hint`, in a dtype, and the dtype's name. `auto`: on a CPU the faster of two, by
    forwards of the target that are timed, and a line on stderr says so.
    """
    load = partial(loading.load_target, target, device=device)
    if dtype == "auto":
        return or_bad_parameter(hint, dtypes.load_fastest, load, partial(typer.echo, err=True))
    return or_bad_parameter(hint, load, loading.DTYPES[dtype]), dtype


def checked_prompts(path: Path | None, tasks: list[str] | None, num_prompts: int | None) -> list[prompt_sets.Prompt]:
    """The prompts of the file at `path`, or of the built-in sets `tasks` (two of each by default)."""
    if path is None:
        return or_bad_parameter("--task", prompt_sets.built_in, tasks or prompt_sets.TASKS, num_prompts or 2)
    if tasks:
        raise typer.BadParameter("give this or --task, not both.", param_hint="--prompts")
    return prompt_sets.first_of_each(or_bad_parameter("--prompts", prompt_sets.read, path), num_prompts)


def say_how_it_drafts(draft: Any) -> None:
    """Says on stderr how a draft of another tokenizer drafts, and what it shares with the target."""
    if isinstance(draft, OtherVocabularyDrafter):
        typer.echo(draft.summary, err=True)


def progress_bar(*further: str) -> Progress:
    """A progress bar on stderr that disappears at the end. `further` are formats of what comes after its numbers."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *map(TextColumn, further))
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    # One refresh per second: the drawing thread takes time from the measured calls.
    return Progress(*columns, *times, console=Console(stderr=True), transient=True, refresh_per_second=1)
