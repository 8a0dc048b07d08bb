"""
`EagleHead`: one or a few decoder layers that predict the token after next from the target's hidden states.

The arithmetic is that of EAGLE (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840). Row t pairs the target's feature of
position t with the embedding of the token at position t + 1, and predicts the token at position t + 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModel, Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ..compat import CACHE
from ..head_layers import HeadOutput, WithDraftVocabulary, fuse_features, layers_of, lm_head_of, window_argument
from .configuration_eagle import EagleConfig
from .layers import Eagle1Layer, Eagle3Layer
from .pretrained import EaglePreTrainedModel


class EagleHead(WithDraftVocabulary, EaglePreTrainedModel):
    """
    An EAGLE head, to be passed as `generate(assistant_model=head)`.

    The head is a model of its own, but not a language model: besides tokens it reads the target's hidden states. Where
    the format shares token embeddings or lm_head with the target, the head does not hold them.

    `from_pretrained` reads every published format: SafeAILab EAGLE-1, EAGLE-2 (and HASS) and EAGLE-3, speculators,
    SpecForge, ModelOpt, AngelSlim, and our own. Its arguments may override the checkpoint's config: any field of
    `EagleConfig`, such as `aux_layer_ids=[2, 15, 27]`, and `rope_theta`, the base of the head's rotary embedding.

    The arithmetic is that of EAGLE (arXiv 2401.15077; version 1) and EAGLE-3 (arXiv 2503.01840; version 3).

    Args:
        config (`EagleConfig`): the head's configuration.

    Raises:
        ValueError: for a `text_config` whose `model_type` is not that of Llama, Qwen2 or Qwen3.
    """

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        text_config, kind = config.text_config, layers_of(config.text_config)
        text_config._attn_implementation = config._attn_implementation  # what the layers read
        hidden_size, eps = config.hidden_size, text_config.rms_norm_eps
        is_eagle3 = config.eagle_version == 3
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden_size) if config.has_embeddings else None
        self.input_norm = kind.norm(config.feature_size, eps=eps) if config.norm_before_fc else None
        self.fc_norm = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                kind.norm(config.target_hidden_size, eps=eps) for _ in range(config.num_aux_features or 0)
            )
        fc_size = config.feature_size if is_eagle3 else config.feature_size + hidden_size
        self.fc = nn.Linear(fc_size, hidden_size, bias=config.fc_bias) if config.has_fc else None
        first = Eagle3Layer(config) if is_eagle3 else Eagle1Layer(config)
        rest = (kind.decoder(text_config, layer) for layer in range(1, text_config.num_hidden_layers))
        self.layers = nn.ModuleList([first, *rest])
        self.rotary_emb = kind.rotary(config=text_config)
        self.norm = kind.norm(hidden_size, eps=eps) if is_eagle3 and config.final_norm else None
        self.lm_head = nn.Linear(hidden_size, config.num_draft_tokens, bias=False) if config.has_lm_head else None
        self._register_offsets(config.draft_vocab_size)
        self.post_init()

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """
        Projects the target's features to the head's input.

        Args:
            features (`torch.Tensor` of shape `[batch, rows, feature_size]`): EAGLE-3: the hidden states at the
                boundaries, in ascending order; EAGLE-1: the last hidden state after the final norm.

        Returns:
            `torch.Tensor`: EAGLE-3: `[batch, rows, H]`; EAGLE-1: the features as they are, since its `fc` reads the
            embedding too.
        """
        if self.config.eagle_version == 1:
            return features
        return fuse_features(features, self)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
        hidden_states: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        lm_head: nn.Module | None = None,
        logits_to_keep: int | None = 0,
        only_cache: bool = False,
        use_cache: bool = True,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> HeadOutput:
        """
        Predicts the token after next for every row, a pair of a feature (or a state fed back) and the next token.

        Args:
            input_ids (`torch.Tensor` of shape `[batch, rows]`, int64, *optional*):
                For every row the token one position *after* its feature; for heads with embeddings of their own.
            features (`torch.Tensor` of shape `[batch, rows, feature_size]`, *optional*):
                The target's features, see `fuse`.
            hidden_states (`torch.Tensor` of shape `[batch, rows, H]`, *optional*):
                Instead of `features`: the states fed back from the rows before.
            inputs_embeds (`torch.Tensor` of shape `[batch, rows, H]`, *optional*):
                Instead of `input_ids`: the tokens' embeddings, the target's where the head has none.
            attention_mask (`torch.Tensor`, *optional*):
                `[batch, keys]` with 0 for padding, or an additive mask `[batch, 1, rows, keys]`.
            position_ids (`torch.Tensor` of shape `[batch, rows]`, int64, *optional*): positions of the features.
            past_key_values (`Cache`, *optional*): the head's own K/V.
            lm_head (`nn.Module`, *optional*): the target's lm_head, for heads that have none.
            logits_to_keep (`int`, *optional*, defaults to 0): how many of the last rows get logits (0: all, None:
                none).
            only_cache (`bool`, *optional*, defaults to `False`): whether to do no more than write the rows' K/V to
                `past_key_values`, and return neither states nor logits. Saves work in heads of one layer.
            use_cache, return_dict: for callers that pass them to every model; `past_key_values` decides, and the
                result is a `HeadOutput`.
            kwargs: arguments of the attention layers.

        Raises:
            ValueError: unless exactly one of `input_ids` and `inputs_embeds`, and of `features` and `hidden_states`,
                is given; for `only_cache` without a cache; if the head has no embeddings for `input_ids`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either `input_ids` or `inputs_embeds`.")
        if only_cache and past_key_values is None:
            raise ValueError("`only_cache=True` without `past_key_values` would compute nothing. Give a cache.")
        if inputs_embeds is None:
            if self.embed_tokens is None:
                raise ValueError("`input_ids`: this head has no token embeddings. Pass the target's `inputs_embeds`.")
            inputs_embeds = self.embed_tokens(input_ids)
        if features is not None and hidden_states is None:
            fused = self.fuse(features)
        elif hidden_states is not None and features is None:
            fused = hidden_states
        else:
            raise ValueError(
                "Give either `features` (the target's) or `hidden_states` (fed back): a row has one of them."
            )
        if position_ids is None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(past, past + inputs_embeds.shape[1], device=inputs_embeds.device)[None]
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids)
        states = fused
        if self.config.eagle_version == 1 and self.fc is not None:
            states = self.fc(torch.cat([inputs_embeds, fused], dim=-1))
        # All masks are made before the first layer runs, which lengthens the cache.
        masks = self._masks(attention_mask, inputs_embeds, past_key_values, position_ids)
        first = {"embeddings": inputs_embeds, "only_cache": only_cache and len(self.layers) == 1}
        for index, layer in enumerate(self.layers):
            options = first if index == 0 else {}
            states = layer(
                states,
                **options,
                **window_argument(self.config.text_config, index),
                attention_mask=masks[index],
                position_ids=position_ids,
                position_embeddings=position_embeddings,
                **{CACHE: past_key_values},
                **kwargs,
            )
        if only_cache:
            return HeadOutput()
        if self.config.norm_output and self.norm is not None:
            states = self.norm(states)
        logits = None
        if logits_to_keep is not None and (self.lm_head is not None or lm_head is not None):
            logits = self.compute_logits(states[:, -logits_to_keep:], lm_head)
        return HeadOutput(hidden_states=states, logits=logits)

    def inputs_of_one_row(self, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor | None]:
        """Keyword arguments of a forward over one row of zeros, without logits: to see what the head's layers do."""
        zeros = torch.zeros(1, 1, max(self.config.feature_size, self.config.hidden_size), dtype=dtype, device=device)
        return {
            "inputs_embeds": zeros[..., : self.config.hidden_size],
            "features": zeros[..., : self.config.feature_size],
            "position_ids": torch.zeros(1, 1, dtype=torch.long, device=device),
            "attention_mask": torch.zeros(1, 1, 1, 1, dtype=dtype, device=device),
            "logits_to_keep": None,
        }

    def compute_logits(self, hidden_states: torch.Tensor, lm_head: nn.Module | None = None) -> torch.Tensor:
        """
        Logits `[batch, rows, draft vocab]` for states as the forward returns them, `[batch, rows, H]`.

        Args:
            lm_head (`nn.Module`, *optional*): the target's lm_head, for heads that have none.

        Raises:
            ValueError: without `lm_head`, for a head that has none.
        """
        if self.norm is not None and not self.config.norm_output:
            hidden_states = self.norm(hidden_states)
        return lm_head_of(self, lm_head)(hidden_states)

    def _masks(
        self,
        attention_mask: torch.Tensor | None,
        inputs_embeds: torch.Tensor,
        past_key_values: Cache | None,
        position_ids: torch.Tensor,
    ) -> list[torch.Tensor | None]:
        """The mask of each layer: as given if it has four dimensions, else causal, within the layer's window."""
        config = self.config.text_config
        if attention_mask is not None and attention_mask.dim() == 4:
            return [attention_mask] * config.num_hidden_layers
        types = getattr(config, "layer_types", None)
        if types is None:
            has_window = getattr(config, "sliding_window", None) is not None
            types = ["sliding_attention" if has_window else "full_attention"] * config.num_hidden_layers
        create = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        masks = {
            kind: create[kind](
                config=config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                position_ids=position_ids,
                **{CACHE: past_key_values},
            )
            for kind in set(types)
        }
        return [masks[kind] for kind in types]


AutoModel.register(EagleConfig, EagleHead, exist_ok=True)
