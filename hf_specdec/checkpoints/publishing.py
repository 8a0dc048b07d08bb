"""Writing heads in our own format, and publishing them with their cards."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from .hub import push_to_hub
from .pretrained import PublishedModel


class PublishableModel(PublishedModel):
    """Base class of heads that are published with a model card, which a subclass makes in `model_card`."""

    def model_card(self, repo_id: str | None = None, **fields: Any) -> ModelCard:
        """The head's model card."""
        raise NotImplementedError(f"{type(self).__name__} must implement `model_card`.")

    def save_pretrained(
        self,
        save_directory: str | PathLike,
        *args: Any,
        card: ModelCard | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """
        Writes config.json and safetensors, from which `from_pretrained` and transformers' `AutoModel` make the head
        again. Tensors that the head shares with its target are not written.

        Args:
            save_directory (`str`): the folder.
            args, kwargs: as in transformers' `save_pretrained`, such as `max_shard_size=`.
            card (`ModelCard`, *optional*): the card to write to README.md, such as `head.model_card()`.
            push_to_hub (`bool`, *optional*, defaults to `False`):
                Whether to call `push_to_hub` as well, with `repo_id` (the folder's name by default) and its other
                arguments among `kwargs`.
        """
        names = ("repo_id", "commit_message", "commit_description", "private", "revision", "create_pr", "tags")
        pushing = {name: kwargs.pop(name) for name in names if name in kwargs}
        super().save_pretrained(save_directory, *args, **kwargs)
        if card is not None:
            card.save(Path(save_directory) / "README.md")
        if push_to_hub:
            pushing = {"repo_id": Path(save_directory).resolve().name, "token": kwargs.get("token")} | pushing
            self.push_to_hub(card=card, max_shard_size=kwargs.get("max_shard_size", "50GB"), **pushing)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        card: ModelCard | None = None,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "50GB",
        tags: list[str] | None = None,
    ) -> str:
        """
        Uploads the head and its model card to the Hub.

        Args:
            repo_id (`str`): the repository, created if there is none.
            card (`ModelCard`, *optional*):
                The card, such as `head.model_card(repo_id, measurements=[…])`. Without it the repository's own card is
                kept, and a new repository gets `head.model_card(repo_id)`.
            commit_message, commit_description, private, token, revision, create_pr, max_shard_size, tags: as of
                transformers' `push_to_hub`.

        Returns:
            `str`: the URL of the commit, or of the pull request.
        """
        return push_to_hub(
            lambda folder: self.save_pretrained(folder, max_shard_size=max_shard_size),
            repo_id,
            card=card or self.model_card,
            commit_message=commit_message or f"Upload {type(self).__name__}",
            commit_description=commit_description,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
            tags=tags,
        )
