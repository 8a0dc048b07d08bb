"""
`MtpHead`: the MTP modules of a checkpoint as a head.

The arithmetic is that of DeepSeek-V3 (arXiv 2412.19437, section 2.2), which all families share: row t of a module
pairs the target's last hidden state at position t, after the final norm, with the embedding of the token at t + 1, and
its output predicts the token at t + 2.
"""

from __future__ import annotations

import copy
from dataclasses import fields
from os import PathLike
from typing import Any, Self

import torch
from torch import nn
from transformers import AutoModel, Cache, PreTrainedModel

from ..checkpoints.pretrained import PublishedModel
from ..checkpoints.reading import HubOptions
from ..compat import CACHE
from ..head_layers import HeadOutput
from ..models.structure import execution_device
from .building import build_block, config_of_layers, is_sparse, layer_types_of
from .configuration_mtp import MtpConfig
from .reading import ModuleWeights, read_modules


class MtpModule(nn.Module):
    """
    One module: norms of embedding and hidden state, their projection to one, and a decoder layer with its norm.

    Args:
        block (`PreTrainedModel`): the target's decoder with one layer, see `build_block`.
        weights (`dict[str, torch.Tensor]`): `fc.…`, `enorm.…` and `hnorm.…`.
        norm (`nn.Module`): a norm of the target.
        hidden_first (`bool`): whether the projection reads the hidden state before the embedding.
    """

    def __init__(self, block: PreTrainedModel, weights: dict[str, torch.Tensor], norm: nn.Module, hidden_first: bool):
        super().__init__()
        self.hidden_first = hidden_first
        self.enorm, self.hnorm = _like(norm, weights["enorm.weight"]), _like(norm, weights["hnorm.weight"])
        matrix, bias = weights["fc.weight"], weights.get("fc.bias")
        self.fc = nn.Linear(matrix.shape[1], matrix.shape[0], bias=bias is not None, device="meta")
        self.fc.load_state_dict({name[3:]: part for name, part in weights.items() if name[:3] == "fc."}, assign=True)
        self.block = block

    def forward(self, states: torch.Tensor, embeddings: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """
        Args:
            states (`torch.Tensor` of shape `[batch, rows, H]`): hidden states of the positions.
            embeddings (`torch.Tensor` of shape `[batch, rows, H]`): embeddings of the tokens after them.
            kwargs: what the target's decoder takes besides.
        """
        parts = [self.enorm(embeddings), self.hnorm(states)]
        inputs = self.fc(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))
        return self.block(inputs_embeds=inputs, **kwargs)[0]


class MtpHead(PublishedModel):
    """
    The MTP modules of a target, to be passed as `generate(assistant_model=head)`; `assistant_model="mtp"` makes one
    for the target of the call. Embeddings and lm_head are the target's. The arithmetic is that of DeepSeek-V3 (arXiv
    2412.19437, section 2.2).

    Make it with `MtpHead.from_target`.

    Args:
        config (`MtpConfig`): the head's configuration.
        modules (`list[MtpModule]`): the modules, in their order.
    """

    config_class = MtpConfig
    kind = "MTP modules"
    base_model_prefix = ""
    main_input_name = "inputs_embeds"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    embed_tokens = lm_head = target_ids = None
    """The target's embeddings and lm_head are used, over its whole vocabulary."""

    def __init__(self, config: MtpConfig, modules: list[MtpModule]):
        super().__init__(config)
        self.mtp = nn.ModuleList(modules)

    @classmethod
    def from_target(cls, target: PreTrainedModel, checkpoint: str | PathLike | None = None, **kwargs: Any) -> Self:
        """
        Reads a target's MTP modules from the checkpoint that it was loaded from, in the target's dtype and on its
        device.

        Args:
            target (`PreTrainedModel`): the target.
            checkpoint (`str`, *optional*): folder or Hub id of the checkpoint. Defaults to the target's
                `name_or_path`.
            kwargs: where the files are, as in `from_pretrained` (`revision=`, `token=`, `cache_dir=`,
                `local_files_only=`, `force_download=`, `subfolder=`), and `default_tree=`.

        Raises:
            OSError: if there is no such folder or repository, or it holds no weights.
            ValueError: if the target was not loaded from files, or its checkpoint holds no modules that can be read.
        """
        target = getattr(target, "_orig_mod", target)
        name = str(target.name_or_path if checkpoint is None else checkpoint)
        if not name:
            raise ValueError(
                f"`target`: {type(target).__name__} was not loaded from files, which would hold its MTP modules. Load "
                "it with `from_pretrained`, or name its checkpoint: `MtpHead.from_target(model, checkpoint=…)`."
            )
        places = {one.name for one in fields(HubOptions)}
        options = HubOptions(**{key: kwargs.pop(key) for key in list(kwargs) if key in places})
        text_config = target.config.get_text_config(decoder=True)
        layout, modules = read_modules(name, _num_layers(text_config), options)
        layers = config_of_layers(
            text_config,
            layer_types_of(text_config, len(modules)),
            [is_sparse(list(module.layer)) for module in modules],
        )
        told = {"num_modules": len(modules), "hidden_first": layout.hidden_first, "target_name": name}
        config = MtpConfig(text_config=layers, **told, **kwargs)
        config._attn_implementation = target.config._attn_implementation
        built = [_module(target, config, index, module) for index, module in enumerate(modules)]
        head = cls(config, built).to(device=execution_device(target), dtype=target.dtype).eval()
        head.name_or_path = config._name_or_path = name
        return head

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Self:
        """Refused: the modules are part of a target's checkpoint, and are made for the target."""
        raise ValueError(
            "MTP modules are read for a target: `MtpHead.from_target(model)`, or `assistant_model='mtp'`."
        )

    def forward(
        self,
        features: torch.Tensor | None = None,
        hidden_states: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        lm_head: nn.Module | None = None,
        logits_to_keep: int | None = 0,
        only_cache: bool = False,
        module_index: int | None = 0,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> HeadOutput:
        """
        Runs one module over rows, each of a hidden state and the token after it.

        Args:
            features (`torch.Tensor` of shape `[batch, rows, H]`, *optional*): the target's last hidden states.
            hidden_states (`torch.Tensor` of shape `[batch, rows, H]`, *optional*): instead of `features`, outputs of a
                module.
            inputs_embeds (`torch.Tensor` of shape `[batch, rows, H]`): the target's embeddings of the tokens after.
            attention_mask (`torch.Tensor`, *optional*): as the target's decoder takes it.
            position_ids (`torch.Tensor` of shape `[batch, rows]`, int64, *optional*): positions of the features.
            past_key_values (`Cache`, *optional*): the head's own K/V: a layer for each module.
            lm_head (`nn.Module`, *optional*): the target's lm_head.
            logits_to_keep (`int`, *optional*, defaults to 0): how many of the last rows get logits (0: all, None:
                none).
            only_cache (`bool`, *optional*, defaults to `False`): whether nothing is drafted from the rows.
            module_index (`int`, *optional*, defaults to 0): which module; None for all, each over the outputs of the
                one before.
            kwargs: what the target's decoder takes besides.

        Raises:
            ValueError: unless `inputs_embeds` and exactly one of `features` and `hidden_states` are given.
        """
        if (features is None) == (hidden_states is None):
            raise ValueError("Give either `features` (the target's) or `hidden_states` (fed back).")
        if inputs_embeds is None:
            raise ValueError("Give `inputs_embeds`: MTP modules have no token embeddings of their own.")
        cache = kwargs.pop(CACHE, past_key_values)
        kwargs.setdefault("use_cache", cache is not None)
        states: Any = features if hidden_states is None else hidden_states
        for index in range(len(self.mtp)) if module_index is None else (module_index,):
            states = self.mtp[index](
                states,
                inputs_embeds,
                attention_mask=attention_mask,
                position_ids=position_ids,
                **{CACHE: cache},
                **kwargs,
            )
        logits = None
        if logits_to_keep is not None and lm_head is not None and not only_cache:
            logits = self.compute_logits(states[:, -logits_to_keep:], lm_head)
        return HeadOutput(hidden_states=states, logits=logits)

    def compute_logits(self, hidden_states: torch.Tensor, lm_head: nn.Module | None = None) -> torch.Tensor:
        """Logits `[batch, rows, vocab]` of states as the forward returns them, by the target's lm_head."""
        if lm_head is None:
            raise ValueError("Give `lm_head`: MTP modules have none of their own.")
        return lm_head(hidden_states)

    def inputs_of_one_row(self, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor | None]:
        """Keyword arguments of a forward over one row of zeros, without logits: to see what the head's layers do."""
        zeros = torch.zeros(1, 1, self.config.hidden_size, dtype=dtype, device=device)
        return {
            "inputs_embeds": zeros,
            "features": zeros,
            "position_ids": torch.zeros(1, 1, dtype=torch.long, device=device),
            "attention_mask": torch.zeros(1, 1, 1, 1, dtype=dtype, device=device),
            "logits_to_keep": None,
            "module_index": None,
        }


def _num_layers(config: Any) -> int:
    """Decoder layers as checkpoints number them: those of LongCat-Flash attend twice."""
    return getattr(config, "num_layers", None) or config.num_hidden_layers


def _like(norm: nn.Module, weight: torch.Tensor) -> nn.Module:
    """A norm of the same class with another weight."""
    made = copy.deepcopy(norm)
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def _module(target: PreTrainedModel, config: MtpConfig, index: int, weights: ModuleWeights) -> MtpModule:
    norm = weights.own.get("norm.weight")
    block = build_block(target, config.text_config, index, weights.layer, norm, target.dtype)
    return MtpModule(block, weights.own, target.get_decoder().norm, config.hidden_first)


AutoModel.register(MtpConfig, MtpHead, exist_ok=True)
