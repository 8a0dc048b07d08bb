"""What the project's repositories on the Hub hold besides heads: the Space, the kernel, and `custom_generate`."""

from __future__ import annotations

import importlib.util
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, constants


_OF_SPACE = tuple(f"SmolLM2-135M-Instruct-{draft}" for draft in ("EAGLE3", "DSpark", "draft"))
"""Folders of model_cards/ that the page looks for beside itself."""
_REQUIREMENT = "hf-specdec"


@dataclass(frozen=True)
class HubRepository:
    """
    Files of a repository.

    Attributes:
        kind (`str`): its type on the Hub: `model`, `space` or `kernel`.
        files (`dict[str, pathlib.Path | bytes]`): files, or their contents, by their path in the repository.
        options (`dict[str, Any]`): arguments of `HfApi.create_repo`.
    """

    kind: str
    files: dict[str, Path | bytes]
    options: dict[str, Any] = field(default_factory=dict)

    def sizes(self) -> dict[str, int]:
        """Bytes of every file, in the order of the paths."""
        return {
            path: len(file) if isinstance(file, bytes) else file.stat().st_size
            for path, file in sorted(self.files.items())
        }

    def push(
        self, repo_id: str, *, private: bool | None = None, revision: str | None = None, create_pr: bool = False
    ) -> str:
        """
        Makes the repository if there is none and uploads all files in one commit. Other files that are there stay.

        Args:
            repo_id (`str`): the repository, `name` or `owner/name`.
            private (`bool`, *optional*): whether a new repository is private; None: the owner's default.
            revision (`str`, *optional*): an existing branch; None: the main branch.
            create_pr (`bool`, *optional*, defaults to `False`): whether to open a pull request.

        Returns:
            `str`: the URL of the commit, or of the pull request.

        Raises:
            HfHubHTTPError: if the Hub refuses.
        """
        api = HfApi()
        made = api.create_repo(repo_id, repo_type=self.kind, private=private, exist_ok=True, **self.options)
        commit = api.create_commit(
            made.repo_id,
            [CommitOperationAdd(path, file) for path, file in self.files.items()],
            commit_message=f"Upload {len(self.files)} files",
            repo_type=self.kind,
            revision=revision,
            create_pr=create_pr,
        )
        return commit.pr_url or commit.commit_url


def custom_generate(checkout: Path) -> HubRepository:
    """
    What `generate(custom_generate="owner/name")` reads.

    Args:
        checkout (`pathlib.Path`): a checkout of the project.

    Raises:
        FileNotFoundError: if the folder is none.
    """
    return HubRepository("model", {**_files(checkout, "hub")})


def space(checkout: Path, requirement: str | None = None) -> HubRepository:
    """
    The page of examples/space, with the heads and the draft model that it shows.

    Args:
        checkout (`pathlib.Path`): a checkout of the project.
        requirement (`str`, *optional*): what to install for `hf-specdec`, such as `hf-specdec @ git+https://…`;
            extras are added to the name.

    Raises:
        FileNotFoundError: if the folder is no checkout.
        ValueError: if the requirement is not one of `hf-specdec`.
    """
    files: dict[str, Path | bytes] = {**_files(checkout, "examples/space")}
    for name in _OF_SPACE:
        files |= {f"{name}/{path}": file for path, file in _files(checkout, f"model_cards/{name}").items()}
    if requirement is not None:
        name, at, place = requirement.partition("@")
        if not name.startswith(_REQUIREMENT) or "[" in name:
            raise ValueError(
                f"requirement={requirement!r}: give `{_REQUIREMENT}` without extras, with a version or an address, "
                f"such as `{_REQUIREMENT} @ git+https://…`."
            )
        text = (checkout / "examples" / "space" / "requirements.txt").read_text(encoding="utf-8")
        version = name.removeprefix(_REQUIREMENT)
        lines = [
            f"{line}{version}{at}{place}".strip() if line.startswith(_REQUIREMENT) else line
            for line in text.splitlines()
        ]
        files["requirements.txt"] = ("\n".join(lines) + "\n").encode()
    return HubRepository("space", files, {"space_sdk": "gradio"})


def kernel(checkout: Path) -> HubRepository:
    """
    What `kernels.get_kernel("owner/name")` reads, built of what is in the checkout, with its sources and its card.

    Args:
        checkout (`pathlib.Path`): a checkout of the project.

    Raises:
        FileNotFoundError: if the folder is none.
    """
    place = "kernels/hf-specdec-kernels"
    all_files = _files(checkout, place)
    files: dict[str, Path | bytes] = {}
    files |= {path: file for path, file in all_files.items() if path.startswith(("torch-ext/", "build.toml"))}
    files["README.md"] = all_files["CARD.md"]
    spec = importlib.util.spec_from_file_location("hf_specdec_build_kernel", checkout / place / "build.py")
    assert spec is not None and spec.loader is not None
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    with tempfile.TemporaryDirectory() as folder:
        variant = Path(folder) / builder.VARIANT
        builder.build(variant)
        files |= {f"build/{builder.VARIANT}/{path}": file.read_bytes() for path, file in _in_folder(variant).items()}
    return HubRepository(getattr(constants, "REPO_TYPE_KERNEL", "model"), files)


def _files(checkout: Path, folder: str) -> dict[str, Path]:
    if not (checkout / folder).is_dir():
        raise FileNotFoundError(
            f"{checkout} has no folder {folder}: it is no checkout of hf_specdec. Name one, or call this in one."
        )
    return {path: file for path, file in _in_folder(checkout / folder).items() if not path.startswith("build/")}


def _in_folder(folder: Path) -> dict[str, Path]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path for path in files}
