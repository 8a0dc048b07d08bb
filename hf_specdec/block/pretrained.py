"""Reading a block head of any published format, and its card."""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub import ModelCard
from torch import nn
from transformers import initialization as init

from ..checkpoints.publishing import PublishableModel
from ..checkpoints.reading import HubOptions
from .card import model_card
from .configuration_block import BlockConfig
from .formats import read_block_files
from .heads import CandidateSelector
from .layers import BlockConvolution


class BlockPreTrainedModel(PublishableModel):
    """Loading, saving and publishing of a `BlockHead`; its arithmetic is in `modeling_block`."""

    config_class = BlockConfig
    config_arguments = (*BlockConfig.__annotations__, "rope_theta")
    kind = "a block head"
    base_model_prefix = ""
    main_input_name = "inputs_embeds"
    _no_split_modules = [
        "LlamaDecoderLayer",
        "Qwen2DecoderLayer",
        "Qwen3DecoderLayer",
        "Gemma4TextDecoderLayer",
        "ConvolvedLayer",
    ]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    @classmethod
    def read_published(
        cls, name: str, options: HubOptions
    ) -> tuple[BlockConfig, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Config, weights and ignored tensors of a head in any published format, see `read_block_files`."""
        reading = read_block_files(name, options)
        return reading.config, reading.weights, reading.ignored

    def model_card(self, repo_id: str | None = None, **fields: Any) -> ModelCard:
        """The head's model card; `fields` are the arguments of `hf_specdec.block.card.model_card`."""
        return model_card(self, repo_id, **fields)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """New heads start as plain DFlash: convolutions pass their input on, and the selector adds nothing."""
        super()._init_weights(module)
        spread = getattr(self.config.text_config, "initializer_range", 0.02)
        if isinstance(module, BlockConvolution):
            kernel = torch.zeros_like(module.base_kernel)
            kernel[:, 0] = 1
            init.copy_(module.base_kernel, kernel)
            init.zeros_(module.kernel_projection.weight)
        elif isinstance(module, CandidateSelector):
            init.normal_(module.predecessor_codebook, std=spread)
            init.zeros_(module.successor_codebook)
        elif module is self:
            for parameter in (self.mask_hidden, self.mask_embedding):
                if parameter is not None:
                    init.normal_(parameter, std=spread)
        elif module is self._modules.get("rotary_emb") and not hasattr(module, "original_inv_freq"):
            # Frequencies by type of layer, which transformers leaves to each model's own class.
            for name, values in type(module)(config=module.config).named_buffers():
                init.copy_(getattr(module, name), values)
