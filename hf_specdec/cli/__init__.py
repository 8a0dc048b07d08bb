"""The command line `hf-specdec`. Typer and rich come with the `demo` extra; the library itself does not need them."""

import importlib.util
import sys
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from typer import Typer


def main() -> None:
    """Runs the command line, or exits with the command that installs missing packages."""
    missing = [package for package in ("typer", "rich") if importlib.util.find_spec(package) is None]
    if missing:
        sys.exit(f"hf-specdec needs {' and '.join(missing)}. Install with `pip install 'hf-specdec[demo]'`.")
    build_app()()


def build_app() -> "Typer":
    """The typer application, one command per module of this package."""
    import typer

    from .bench import bench
    from .convert import convert
    from .demo import demo
    from .doctor import doctor
    from .generate_file import generate_file
    from .push import push_generate, push_kernel, push_space
    from .serve import serve
    from .train import train
    from .tune import tune

    app = typer.Typer(
        name="hf-specdec",
        help="Lossless tree speculative decoding inside transformers' generate.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_keep_subcommands)
    app.command("demo")(demo)
    app.command("bench")(bench)
    app.command("convert")(convert)
    app.command("doctor")(doctor)
    app.command("push-generate")(push_generate)
    app.command("push-kernel")(push_kernel)
    app.command("push-space")(push_space)
    app.command("generate-file")(generate_file)
    app.command("serve")(serve)
    app.command("train")(train)
    app.command("tune")(tune)
    return app


def _keep_subcommands() -> None:
    # Without a callback, typer drops the command's name if an application has one command only.
    pass
