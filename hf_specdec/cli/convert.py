"""`hf-specdec convert`: writes a head of any published format in another format."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..eagle import EagleHead
from ..eagle.formats import WRITERS, HubOptions, TargetFiles, write_head
from ..eagle.formats.native import NAME as OURS


FORMATS = (OURS, *WRITERS)


def convert(
    source: Annotated[str, typer.Argument(help="Hub id or folder of the head, in any published format.")],
    output: Annotated[Path, typer.Argument(help="Folder to write to; new or empty.")],
    to: Annotated[str, typer.Option(help=f"The format to write: {', '.join(FORMATS)}.")] = OURS,
    target: Annotated[
        str | None,
        typer.Option(
            help="Hub id or folder of the target, for formats that copy its embeddings or lm_head, and where layer "
            "numbers depend on its number of layers."
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A field of the head's config to read otherwise, such as norm_hidden_twice=false. Repeatable.",
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the source.")] = None,
) -> None:
    """Write an EAGLE head in another format, bit for bit. What the format cannot say is refused by name."""
    if to not in FORMATS:
        raise typer.BadParameter(f"{to!r} is not one of {', '.join(FORMATS)}.", param_hint="--to")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise typer.BadParameter(f"{output} is there already and not an empty folder.", param_hint="OUTPUT")
    changes = dict(_parse(option) for option in options or ())
    try:
        head = EagleHead.from_pretrained(source, revision=revision, **changes)
        given = None if target is None else TargetFiles(target, HubOptions())
        if to == OURS:
            if target is not None:
                head.config.target_name = target
            head.save_pretrained(output)
        else:
            write_head(head, output, to, given)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="SOURCE") from error
    console = Console()
    console.print(f"{head.config.source_format or OURS} → {to}: {output}", markup=False)
    for name, reason in (head.config.conventions or {}).items():
        console.print(f"  assumed {name}: {reason}", markup=False)


def _parse(option: str) -> tuple[str, Any]:
    name, separator, value = option.partition("=")
    if not separator or name not in EagleHead.config_arguments:
        raise typer.BadParameter(
            f"{option!r} must be NAME=VALUE with a field of EagleConfig, such as aux_layer_ids=[2,16,29].",
            param_hint="--set",
        )
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value  # not JSON: a plain string
