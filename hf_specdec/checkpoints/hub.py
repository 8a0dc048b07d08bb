"""Writing to the Hugging Face Hub: a folder with its model card, in one commit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError


def push_to_hub(
    save: Callable[[Path], None],
    repo_id: str,
    *,
    card: ModelCard | Callable[[str], ModelCard],
    commit_message: str,
    commit_description: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    tags: list[str] | None = None,
) -> str:
    """
    Makes the repository if there is none and uploads what `save` writes, in one commit.

    Args:
        save (`Callable[[Path], None]`): writes the files into a folder.
        repo_id (`str`): the repository, `name` or `owner/name`.
        card (`ModelCard` or `Callable[[str], ModelCard]`):
            The card to write. A function makes one from the repository's full name, and is asked only where the
            repository has no card yet.
        commit_message (`str`), commit_description (`str`, *optional*): message and description of the commit.
        private (`bool`, *optional*): whether a new repository is private; None: the owner's default.
        token (`str` or `bool`, *optional*): Hub token; None: the token saved by `hf auth login`.
        revision (`str`, *optional*): the branch, created if there is none; None: the main branch.
        create_pr (`bool`, *optional*, defaults to `False`): whether to open a pull request.
        tags (`list[str]`, *optional*): added to the card.

    Returns:
        `str`: the URL of the commit, or of the pull request.

    Raises:
        HfHubHTTPError: if the Hub refuses.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    if not isinstance(card, ModelCard):
        card = _card_on_hub(api, repo_id, revision) or card(repo_id)
    data: Any = card.data  # its fields are those of the card's front matter
    data.tags = list(dict.fromkeys([*(data.tags or []), *(tags or [])])) or None
    with TemporaryDirectory() as folder:
        save(Path(folder))
        card.save(Path(folder) / "README.md")
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message,
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )
    return commit.pr_url or commit.commit_url


def _card_on_hub(api: HfApi, repo_id: str, revision: str | None) -> ModelCard | None:
    try:
        return ModelCard.load(api.hf_hub_download(repo_id, "README.md", revision=revision))
    except (EntryNotFoundError, RevisionNotFoundError):
        return None
