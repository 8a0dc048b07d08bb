"""`hf-specdec generate-file`: answers to a file of prompts, as the server would give them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from .. import loading
from ..config import SpeculativeConfig
from ..trees.text import parse_tree
from .arguments import checked_device, checked_dtype, or_bad_parameter, progress_bar
from .options import (
    CompileCacheOption,
    CompileOption,
    DeviceMapOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    ImageHostsOption,
    LogprobsMode,
    LogprobsModeOption,
    LorasOption,
    MaxBatchTokensOption,
    MaxRequestsOption,
    NumBlocksOption,
    TargetOption,
    TreeOption,
)
from .serve_checks import adapters_in, check_packages


if TYPE_CHECKING:
    from ..bulk import Output, Progress

MOST_TOLD = 10
"""Bad records that a process names on stderr; all are in the run's file."""
STOPPED, SOME_SKIPPED = 1, 3
"""
Exit codes of a run that the same command can go on with, and of a complete one with bad records: 0 for several
processes, whose launcher takes any other for a failure.
"""


def generate_file(
    prompts: Annotated[
        Path,
        typer.Argument(
            help='A .jsonl with {"prompt": …} or {"messages": […]} a line, and options as requests have them.',
        ),
    ],
    output: Annotated[Path, typer.Argument(help="The .jsonl of the answers. Given again, the run goes on.")],
    target: TargetOption = None,
    draft: DraftOption = "ngram",
    tree: TreeOption = "default",
    model_name: Annotated[str | None, typer.Option(help="What records call the model.")] = None,
    loras: LorasOption = None,
    compiles: CompileOption = False,
    compile_cache: CompileCacheOption = None,
    max_requests: MaxRequestsOption = None,
    max_batch_tokens: MaxBatchTokensOption = None,
    num_blocks: NumBlocksOption = None,
    records_at_once: Annotated[
        int, typer.Option(min=1, help="Most records that the engine has at once, running or waiting.")
    ] = 512,
    image_hosts: ImageHostsOption = None,
    logprobs_mode: LogprobsModeOption = LogprobsMode.RAW,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
) -> None:
    """
    Answer a file of prompts as the server answers requests, in the order of the file.

    Over several GPUs: accelerate launch --module hf_specdec.cli generate-file …
    """
    check_packages("generate-file")
    from ..bulk import Job, Output, Records, answering
    from ..bulk.answers import EngineFailed
    from ..compiling.kept import compile_cache_of
    from ..serving.engine import EngineOptions, StartError
    from ..serving.termination import unwound_by_sigterm

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if device_map is not None and (device is not None or world_size > 1):
        other = "--device" if device is not None else "several processes"
        raise typer.BadParameter(f"is not for {other}. Leave one out.", param_hint="--device-map")
    device = checked_device(device or _device_of_rank(world_size))
    name = model_name or target or loading.SMOLLM2
    options = EngineOptions(
        target=target,
        draft=draft,
        speculative_config=or_bad_parameter(
            "--tree", lambda: SpeculativeConfig(tree=parse_tree(tree), compile=compiles)
        ),
        device=device,
        dtype=checked_dtype(dtype, device),
        device_map=device_map,
        max_requests=max_requests,
        max_batch_tokens=max_batch_tokens,
        num_blocks=num_blocks,
        with_images=True,
        adapters=or_bad_parameter("--lora", adapters_in, loras or [], name),
        compile_cache=compile_cache_of(compile_cache) if compiles or device.startswith("cuda") else None,
    )
    or_bad_parameter("--target", loading.check_place, target)
    or_bad_parameter("--draft", loading.check_place, None if draft in loading.WORDS else draft)
    records = or_bad_parameter("PROMPTS", Records, prompts)
    changing: dict[str, Any] = {"target": _place(target or loading.SMOLLM2), "model_name": name}
    changing |= {"dtype": options.dtype, "logprobs_mode": logprobs_mode.value}
    changing["lora"] = {adapter: _place(place) for adapter, place in options.adapters.items()}
    run = or_bad_parameter("OUTPUT", Output, output, records, changing, rank, world_size)
    if not run.is_complete:
        bar = _Bar(run, is_shown=rank == 0)
        about: dict[str, Any] = {"model_name": name, "logprobs_mode": logprobs_mode.value, "tell": bar.say}
        about["image_hosts"] = frozenset(map(str.lower, image_hosts or ()))
        try:
            with unwound_by_sigterm(), answering(options, **about) as answers, bar:
                asyncio.run(Job(run, answers, records_at_once, bar.show, bar.name_bad).run())
        except StartError as error:
            raise typer.BadParameter(error.reason, param_hint=error.option) from error
        except (EngineFailed, OSError) as error:
            typer.echo(f"{error}\nStopped. The same command goes on.", err=True)
            raise typer.Exit(STOPPED) from error
        except KeyboardInterrupt:
            typer.echo("Stopped. The same command goes on.", err=True)
            raise
    if rank == 0:
        _report(run)
        raise typer.Exit(SOME_SKIPPED if run.skipped and world_size == 1 else 0)


def _device_of_rank(world_size: int) -> str | None:
    """The GPU of this process, if there are several processes and GPUs."""
    if world_size == 1 or not torch.cuda.is_available():
        return None
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def _place(name: str) -> str:
    """A Hub id, or the whole path of a folder."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _report(run: Output) -> None:
    skipped = f", {len(run.skipped)} bad records skipped (see {run.path}.run.json)" if run.skipped else ""
    typer.echo(f"{run.path}: {run.num_answered} answers of {run.num_tokens} tokens{skipped}.", err=True)


class _Bar:
    """The progress bar, and what is told beside it."""

    def __init__(self, run: Output, is_shown: bool):
        self._run, self._is_shown, self._num_bad = run, is_shown, 0
        self._bar = progress_bar("{task.fields[speed]}")
        self._bar.disable = not is_shown
        self._task = self._bar.add_task("records", total=len(run.records), completed=run.num_done, speed="")

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a line."""
        if self._is_shown:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, progress: Progress) -> None:
        """Shows how far the run is."""
        speed = f"{progress.tokens_per_second:,.0f} tokens/s"
        if progress.acceptance_length is not None:
            speed += f", acceptance length {progress.acceptance_length:.2f}"
        self._bar.update(self._task, completed=progress.num_done, speed=speed)

    def name_bad(self, line: int, reason: str) -> None:
        """Names a bad record, if it is one of the first."""
        self._num_bad += 1
        if self._num_bad <= MOST_TOLD:
            last = " More are not shown." if self._num_bad == MOST_TOLD else ""
            text = f"{self._run.records.path}, line {line}: skipped. {reason}{last}"
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
