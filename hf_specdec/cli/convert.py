"""`hf-specdec convert`: writes a head of any published format in another format."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..block import BlockHead
from ..block.formats import WRITERS as BLOCK_WRITERS
from ..block.formats import write_block
from ..checkpoints.reading import HubOptions
from ..checkpoints.target_files import TargetFiles
from ..eagle import EagleHead
from ..eagle.formats import WRITERS as EAGLE_WRITERS
from ..eagle.formats import write_head
from ..eagle.formats.native import NAME as OURS
from ..loading import kind_of_draft
from .arguments import or_bad_parameter


_KINDS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "eagle": (EagleHead, EAGLE_WRITERS, write_head),
    "block": (BlockHead, BLOCK_WRITERS, write_block),
}
"""By kind of head: its class, the formats that it can be written in, and the function that does it."""


def convert(
    source: Annotated[str, typer.Argument(help="Hub id or folder of the head, in any published format.")],
    output: Annotated[Path, typer.Argument(help="Folder to write to; new or empty.")],
    to: Annotated[
        str,
        typer.Option(
            help=f"The format to write: {OURS}; for EAGLE heads {', '.join(EAGLE_WRITERS)}; for block heads "
            f"{', '.join(BLOCK_WRITERS)}."
        ),
    ] = OURS,
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
            help="A field of the head's config to read otherwise, such as anchor_first=true. Repeatable.",
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the source.")] = None,
) -> None:
    """Write an EAGLE or block head in another format, bit for bit. What the format cannot say is refused by name."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise typer.BadParameter(f"{output} is there already and not an empty folder.", param_hint="OUTPUT")
    kind = or_bad_parameter("SOURCE", lambda: kind_of_draft(source, revision=revision))
    head_class, writers, write = _KINDS["block" if kind == "block" else "eagle"]
    if to not in (OURS, *writers):
        raise typer.BadParameter(
            f"{to!r} is not one of {', '.join((OURS, *writers))}, the formats for {head_class.kind}.",
            param_hint="--to",
        )
    changes = dict(_parse(option, head_class) for option in options or ())
    try:
        head = head_class.from_pretrained(source, revision=revision, **changes)
        given = None if target is None else TargetFiles(target, HubOptions())
        if to == OURS:
            if target is not None:
                head.config.target_name = target
            head.save_pretrained(output)
        else:
            write(head, output, to, given)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="SOURCE") from error
    console = Console()
    console.print(f"{head.config.source_format or OURS} → {to}: {output}", markup=False)
    verb = "read" if kind == "block" else "assumed"
    for name, reason in (head.config.conventions or {}).items():
        console.print(f"  {verb} {name}: {reason}", markup=False)


def _parse(option: str, head_class: Any) -> tuple[str, Any]:
    name, separator, value = option.partition("=")
    if not separator or name not in head_class.config_arguments:
        raise typer.BadParameter(
            f"{option!r} must be NAME=VALUE with a field of {head_class.config_class.__name__}, such as "
            "aux_layer_ids=[2,16,29].",
            param_hint="--set",
        )
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value  # not JSON: a plain string
