"""Reading a head of any published format, writing it in ours, and publishing it with its card."""

from __future__ import annotations

import copy
import functools
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelCard
from transformers import PreTrainedModel

from ..hub import push_to_hub
from .card import model_card
from .configuration_eagle import EagleConfig
from .formats import Checkpoint, HubOptions, check_weights, read_head


if TYPE_CHECKING:
    from .modeling_eagle import EagleHead


class EaglePreTrainedModel(PreTrainedModel):
    """What `EagleHead` can do as a file: the arithmetic is in `modeling_eagle`."""

    config_class = EagleConfig
    base_model_prefix = ""
    main_input_name = "inputs_embeds"
    _no_split_modules = ["LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike,
        *,
        config: EagleConfig | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | PathLike | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        subfolder: str = "",
        dtype: torch.dtype | str | None = None,
        **kwargs: Any,
    ) -> EagleHead:
        """
        Loads a head of any published format from a folder or the Hub: SafeAILab EAGLE-1, EAGLE-2 (and HASS) and
        EAGLE-3, speculators, SpecForge, ModelOpt, AngelSlim, and our own.

        Args:
            pretrained_model_name_or_path (`str`): the folder or Hub repository.
            config (`EagleConfig`, *optional*): in place of what the checkpoint's config says.
            revision (`str`, *optional*), token (`str` or `bool`, *optional*), cache_dir (`str`, *optional*),
                local_files_only (`bool`, *optional*), force_download (`bool`, *optional*), subfolder (`str`,
                *optional*): where the files are, as in transformers' `from_pretrained`.
            dtype (`torch.dtype`, *optional*): dtype of the weights. Without it they keep the checkpoint's, and the
                head runs in the dtype of the target it drafts for.
            kwargs: fields of `EagleConfig` to set otherwise than the checkpoint says, such as `aux_layer_ids=[2, 15,
                27]`; what is left goes to transformers' `from_pretrained`, such as `device_map=`.

        Raises:
            OSError: if there is no such folder or repository, or it has no config or weights.
            ValueError: if the checkpoint is damaged, or not that of an EAGLE head; the message names the key.
        """
        name = str(pretrained_model_name_or_path)
        options = HubOptions(
            revision=revision,
            token=token,
            cache_dir=None if cache_dir is None else str(cache_dir),
            local_files_only=local_files_only,
            force_download=force_download,
            subfolder=subfolder,
        )
        reading = read_head(Checkpoint.read(name, options))
        changes = {field: kwargs.pop(field) for field in list(kwargs) if field in EagleConfig.__annotations__}
        config = _changed(reading.config if config is None else config, changes)
        check_weights(name, _expected_weights(cls, config, name), reading.weights)
        if "torch_dtype" in kwargs:
            dtype = kwargs.pop("torch_dtype")
        keeps_dtype = dtype in (None, "auto")
        head = super().from_pretrained(
            None,
            config=config,
            state_dict=reading.weights,
            dtype=_widest_dtype(reading.weights) if keeps_dtype else dtype,
            **kwargs,
        )
        head.name_or_path = head.config._name_or_path = name
        head.follows_target_dtype = keeps_dtype
        return head

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
        again. What the head shares with its target is not written.

        Args:
            save_directory (`str`): the folder.
            args, kwargs: as of transformers' `save_pretrained`, such as `max_shard_size=`.
            card (`ModelCard`, *optional*): written to README.md, such as that of `model_card`.
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
            repo_id (`str`): the repository; made if there is none.
            card (`ModelCard`, *optional*):
                The card, such as `head.model_card(repo_id, measurements=[…])`. Without it a card that is there is
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


def _changed(config: EagleConfig, changes: dict[str, Any]) -> EagleConfig:
    """A copy with other values, which are checked as those of a new config are."""
    config = copy.deepcopy(config)
    if "aux_layer_ids" in changes:  # a user's ids are boundaries unless said otherwise
        changes = {"aux_layer_convention": "boundaries"} | changes
    for field, value in changes.items():
        setattr(config, field, value)
    config.check()
    return config


def _expected_weights(cls: type[EagleHead], config: EagleConfig, name: str) -> dict[str, torch.Tensor]:
    """The parameters and buffers that a head of this config has, without memory."""
    try:
        with torch.device("meta"):
            return cls(copy.deepcopy(config)).state_dict()
    except (KeyError, TypeError) as error:  # rotary embeddings say no more than the name of what they lack
        raise ValueError(f"{name}: config.json describes no head that can be built ({error!r}).") from error


def _widest_dtype(weights: dict[str, torch.Tensor]) -> torch.dtype:
    """The dtype that holds all weights as they are; in nearly all checkpoints they have the same."""
    dtypes = (tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    return functools.reduce(torch.promote_types, dtypes)
