"""Options of the commands that measure on prompts, as annotations of their parameters."""

from pathlib import Path
from typing import Annotated

import typer

from ..benchmarking import prompts as prompt_sets


TaskOption = Annotated[
    list[str] | None,
    typer.Option(help=f"A built-in set of prompts: {', '.join(prompt_sets.TASKS)}.", show_default="all"),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(help='Your prompts: a .txt with one a line, or a .jsonl with {"prompt": …, "task": …} a line.'),
]
NumPromptsOption = Annotated[
    int | None,
    typer.Option(min=1, help="Most prompts of each task.", show_default="2 of the built-in sets, all of a file"),
]
