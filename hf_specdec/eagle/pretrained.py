"""Reading a head of any published format, and its card."""

from __future__ import annotations

from os import PathLike
from typing import Any, Self

import torch
from huggingface_hub import ModelCard
from transformers.utils import logging

from ..checkpoints.publishing import PublishableModel
from .card import model_card
from .configuration_eagle import EagleConfig
from .formats import Checkpoint, HubOptions, read_head


logger = logging.get_logger(__name__)


class EaglePreTrainedModel(PublishableModel):
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

    def model_card(self, repo_id: str | None = None, **fields: Any) -> ModelCard:
        """The head's model card; `fields` are the arguments of `hf_specdec.eagle.card.model_card`."""
        return model_card(self, repo_id, **fields)
