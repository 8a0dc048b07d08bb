"""Reading a head of any published format, writing it in ours, and publishing it with its card."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import ModelCard
from transformers.utils import logging

from ..checkpoints.hub import push_to_hub
from ..checkpoints.pretrained import PublishedModel
from .card import model_card
from .configuration_eagle import EagleConfig
from .formats import Checkpoint, HubOptions, read_head


logger = logging.get_logger(__name__)


class EaglePreTrainedModel(PublishedModel):
    """Loading, saving and publishing of an `EagleHead`; its arithmetic is in `modeling_eagle`."""

    config_class = EagleConfig
    config_arguments = (*EagleConfig.__annotations__, "rope_theta")
    kind = "an EAGLE head"
    base_model_prefix = ""
    main_input_name = "inputs_embeds"
    _no_split_modules = ["LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike, **kwargs: Any) -> Self:
        """As `PublishedModel.from_pretrained`, with a warning where the numbers of the layers may mean either kind."""
        head = super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        if head.config.has_open_numbering:
            logger.warning(
                f"{head.name_or_path}: `aux_layer_ids`={head.config.aux_layer_ids} may number hidden states "
                "(boundaries) or outputs of layers, and the config does not say which. Unless the target's number of "
                "layers decides, they are read as boundaries. `hf-specdec doctor` tries both; "
                '`from_pretrained(…, aux_layer_convention="outputs")` (or "boundaries") decides.'
            )
        return head

    @classmethod
    def read_published(
        cls, name: str, options: HubOptions
    ) -> tuple[EagleConfig, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Config, weights and ignored tensors of a head in any published format, see `read_head`."""
        reading = read_head(Checkpoint.read(name, options))
        return reading.config, reading.weights, reading.ignored

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

    def model_card(self, repo_id: str | None = None, **fields: Any) -> ModelCard:
        """The head's model card; `fields` are the arguments of `hf_specdec.eagle.card.model_card`."""
        return model_card(self, repo_id, **fields)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        card: ModelCard | None = None,
        commit_message: str = "Upload EagleHead",
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
            commit_message=commit_message,
            commit_description=commit_description,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
            tags=tags,
        )
