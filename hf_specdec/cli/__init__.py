"""The command line `hf-specdec`. Typer and rich come with the `demo` extra; the library itself does not need them."""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from typer import Typer


COMMANDS = {name: name for name in ("demo", "bench", "convert", "doctor")}
COMMANDS |= {"generate-file": "generate_file"}
COMMANDS |= dict.fromkeys(("push-generate", "push-kernel", "push-space"), "push")
COMMANDS |= {name: name for name in ("serve", "train", "tune")}
"""The module of each command, in which a function has the command's name."""


def main() -> None:
    """Runs the command line, or exits with the command that installs missing packages."""
    missing = [package for package in ("typer", "rich") if importlib.util.find_spec(package) is None]
    if missing:
        sys.exit(f"hf-specdec needs {' and '.join(missing)}. Install with `pip install 'hf-specdec[demo]'`.")
    from ..serving.termination import leave_no_semaphore

    leave_no_semaphore()
    build_app(*set(sys.argv[1:2]).intersection(COMMANDS))()


def build_app(*names: str) -> "Typer":
    """
    The typer application.

    Args:
        names (`str`): the commands that it has; all of them by default. Importing one may take seconds.
    """
    import typer

    app = typer.Typer(
        name="hf-specdec",
        help="Lossless tree speculative decoding inside transformers' generate.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_keep_subcommands)
    for name in names or COMMANDS:
        module = importlib.import_module(f".{COMMANDS[name]}", __name__)
        app.command(name)(getattr(module, name.replace("-", "_")))
    return app


def _keep_subcommands() -> None:
    # Without a callback, typer drops the command's name if an application has one command only.
    pass
