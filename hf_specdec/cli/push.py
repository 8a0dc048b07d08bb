"""`hf-specdec push-space`, `push-kernel` and `push-generate`: the project's repositories on the Hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .. import repositories
from ..repositories import HubRepository
from .arguments import or_bad_parameter


_Repository = Annotated[str, typer.Argument(metavar="REPO", help="Repository on the Hub, owner/name.")]
_Checkout = Annotated[Path, typer.Option(help="Checkout of hf_specdec whose files are uploaded.")]
_Push = Annotated[bool, typer.Option("--push", help="Upload. Without it, the files are listed and nothing is sent.")]
_Private = Annotated[bool | None, typer.Option("--private/--public", help="Of a new one. Default: the owner's.")]
_Revision = Annotated[str | None, typer.Option(help="Branch to commit to; it has to be there.")]
_Proposal = Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")]
_HERE = Path(".")


def push_space(
    repo: _Repository,
    checkout: _Checkout = _HERE,
    requirement: Annotated[
        str | None,
        typer.Option(help='What the Space installs, such as "hf-specdec @ git+https://…". Default: from PyPI.'),
    ] = None,
    push: _Push = False,
    private: _Private = None,
    revision: _Revision = None,
    create_pr: _Proposal = False,
) -> None:
    """Upload the page of examples/space, with the head and the draft model that it shows, to a Space."""
    _push(repo, lambda: repositories.space(checkout, requirement), push, private, revision, create_pr)


def _command(about: str, collect: Callable[[Path], HubRepository]) -> Callable[..., None]:
    """A command that uploads what `collect` finds in a checkout."""

    def command(
        repo: _Repository,
        checkout: _Checkout = _HERE,
        push: _Push = False,
        private: _Private = None,
        revision: _Revision = None,
        create_pr: _Proposal = False,
    ) -> None:
        _push(repo, lambda: collect(checkout), push, private, revision, create_pr)

    command.__doc__ = about
    return command


push_kernel = _command("Build the Hub kernel and upload it, with its sources and its card.", repositories.kernel)
push_generate = _command(
    'Upload what `generate(custom_generate="REPO", trust_remote_code=True)` reads.', repositories.custom_generate
)


def _push(
    repo: str,
    collect: Callable[[], HubRepository],
    push: bool,
    private: bool | None,
    revision: str | None,
    create_pr: bool,
) -> None:
    repository = or_bad_parameter("--checkout", collect)
    console = Console()
    sizes = repository.sizes()
    for path, size in sizes.items():
        console.print(f"{size:>12,}  {path}", markup=False, highlight=False)
    total = f"{len(sizes)} files, {sum(sizes.values()):,} bytes, for the {repository.kind} {repo}"
    if not push:
        console.print(
            f"{total}. Nothing was sent: --push uploads them.", markup=False, highlight=False, soft_wrap=True
        )
        return
    # The Hub's errors are OSErrors, those of names ValueErrors.
    url = or_bad_parameter(
        "REPO", lambda: repository.push(repo, private=private, revision=revision, create_pr=create_pr)
    )
    console.print(f"{total}: {url}", markup=False, highlight=False, soft_wrap=True)
