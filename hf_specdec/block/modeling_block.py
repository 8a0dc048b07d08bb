"""
`BlockHead`: a few decoder layers that draft a whole block of tokens in one forward.

DFlash (arXiv 2602.06036, z-lab/dflash): the target's hidden states at several boundaries, projected once, are the
context; their keys and values are all that the cache keeps. The rows of a block are the newest token (the anchor) and
mask tokens, and each predicts the token of a place of its own. JetSpec makes the block causal; DSpark
(deepseek-ai/DeepSpec) adds what the token before tells of the next, DFlash 2 convolutions and a selector. P-EAGLE is
an EAGLE-3 head whose later rows are masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, Cache

from ..compat import CACHE
from ..head_layers import (
    HeadOutput,
    WithDraftVocabulary,
    fuse_features,
    keys_and_values,
    lm_head_of,
    rotations_of,
    window_argument,
)
from .configuration_block import BlockConfig
from .heads import CandidateSelector, ConfidenceHead, MarkovHead
from .layers import block_layers_of, build_layers
from .masks import masks_of_rows
from .pretrained import BlockPreTrainedModel


class BlockHead(WithDraftVocabulary, BlockPreTrainedModel):
    """
    A head that drafts a block of tokens in one forward, to be passed as `generate(assistant_model=head)`.

    The head is no language model: besides tokens it reads the target's hidden states. Where the format shares token
    embeddings or lm_head with the target, the head does not hold them.

    `from_pretrained` reads z-lab's DFlash and DFlash 2, JetSpec, DeepSpec's DFlash and DSpark, SpecForge's DSpark, the
    block heads and P-EAGLE heads of speculators, and our own format. Its arguments may override the checkpoint's
    config: any field of `BlockConfig`, such as `mask_token_id=` or `anchor_first=`, and `rope_theta`, the base of the
    head's rotary embedding. The arithmetic is that of DFlash (arXiv 2602.06036) and of what came after it.

    Args:
        config (`BlockConfig`): the head's configuration.

    Raises:
        ValueError: for a `text_config` of a `model_type` of which there are no such heads.
    """

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        text_config, kind = config.text_config, block_layers_of(config)
        text_config._attn_implementation = config._attn_implementation  # what the layers read
        size, eps = config.hidden_size, text_config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if config.has_embeddings else None
        self.input_norm = kind.norm(config.feature_size, eps=eps) if config.norm_before_fc else None
        self.fc_norm = None
        if config.fc_norm:
            sizes = [config.target_hidden_size] * (config.num_aux_features or 0)
            self.fc_norm = nn.ModuleList(kind.norm(size, eps=eps) for size in sizes)
        self.fc = nn.Linear(config.feature_size, size, bias=False)
        self.hidden_norm = None if config.is_peagle else kind.norm(size, eps=eps)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, config.feature_size)) if config.is_peagle else None
        self.mask_embedding = nn.Parameter(torch.zeros(size)) if config.has_mask_embedding else None
        self.layers = build_layers(config)
        self.rotary_emb = kind.rotary(config=text_config)
        self.norm = kind.norm(size, eps=eps)
        self.lm_head = nn.Linear(size, config.num_draft_tokens, bias=False) if config.has_lm_head else None
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.has_confidence_head else None
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        self._register_offsets(config.draft_vocab_size)
        self.post_init()

    # --------------------------------------------------------------------------------------------------------- block

    @property
    def num_drafts(self) -> int:
        """Tokens that one forward drafts: the most levels of a tree."""
        return self.config.num_drafts

    @property
    def first_row(self) -> int:
        """
        The block row that predicts the token right after the anchor. P-EAGLE: 0, which predicts the token after that
        one; the token right after the anchor is predicted by the last row with a feature of the target.
        """
        return 0 if self.config.is_peagle or self.config.anchor_first else 1

    def block_tokens(self, anchors: torch.Tensor) -> torch.Tensor:
        """Input tokens `[batch, rows]` of blocks after `anchors` `[batch]`, int64 both. P-EAGLE: masks alone."""
        tokens = anchors.new_full((len(anchors), self.config.num_rows), self.config.mask_token)
        if not self.config.is_peagle:
            tokens[:, 0] = anchors
        return tokens

    def block_embeddings(self, tokens: torch.Tensor, embed: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """
        Embeddings `[batch, rows, H]` of one block or several in a row, of `tokens` as `block_tokens` makes them, with
        the head's own embedding of masks if it has one. `embed` embeds tokens.
        """
        embeddings = embed(tokens)
        if self.mask_embedding is None:
            return embeddings
        is_mask = torch.arange(tokens.shape[1], device=tokens.device) % self.config.num_rows != 0
        return torch.where(is_mask[:, None], self.mask_embedding.to(embeddings), embeddings)

    def block_mask(self, device: torch.device | str) -> torch.Tensor:
        """Which rows of a block see which, `[rows, rows]` bool, in layers without a sliding window."""
        seen = torch.ones(self.config.num_rows, self.config.num_rows, dtype=torch.bool, device=device)
        return seen.tril() if self.config.causal or self.config.is_peagle else seen

    # ------------------------------------------------------------------------------------------------------- forward

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """
        What the decoder layers read of the target's features, `[batch, rows, H]`: the context, or P-EAGLE's input.

        Args:
            features (`torch.Tensor` of shape `[batch, rows, feature_size]`): the hidden states at the boundaries, in
                ascending order.
        """
        fused = fuse_features(features, self)
        return fused if self.hidden_norm is None else self.hidden_norm(fused)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
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
        With `features`, adds context to the cache; without, predicts the tokens of a block from it. The rows of a
        block are in the cache, too, afterwards, and have to be cropped before more context is added.

        A P-EAGLE head reads rows of EAGLE-3 with `features`: row t pairs them with the token one position after, and
        predicts the token after that.

        Args:
            input_ids (`torch.Tensor` of shape `[batch, rows]`, int64, *optional*):
                Tokens of a block, as `block_tokens` makes them, or of P-EAGLE's rows; for heads with embeddings of
                their own. Context has none.
            features (`torch.Tensor` of shape `[batch, rows, feature_size]`, *optional*): the target's features at
                `position_ids`, see `fuse`.
            inputs_embeds (`torch.Tensor` of shape `[batch, rows, H]`, *optional*):
                Instead of `input_ids`: the tokens' embeddings, the target's where the head has none.
            attention_mask (`torch.Tensor`, *optional*):
                `[batch, keys]` with 0 for padding, or an additive mask `[batch, 1, rows, keys]`, of all layers. By
                default rows see what the cache holds and one another as the config says.
            position_ids (`torch.Tensor` of shape `[batch, rows]`, int64, *optional*): positions of features or tokens;
                those after the cache by default.
            past_key_values (`Cache`, *optional*): the head's own K/V, without sliding windows.
            lm_head (`nn.Module`, *optional*): the target's lm_head, for heads that have none.
            logits_to_keep (`int`, *optional*, defaults to 0): how many of the last rows get logits (0: all, None:
                none).
            only_cache (`bool`, *optional*, defaults to `False`): P-EAGLE: whether to do no more than write the rows'
                K/V to `past_key_values`, as all heads do with context.
            use_cache, return_dict: for callers that pass them to every model; `past_key_values` decides, and the
                result is a `HeadOutput`.
            kwargs: arguments of the attention layers.

        Raises:
            ValueError: unless exactly one of `input_ids` and `inputs_embeds` is given where rows have tokens; for
                rows that are only to be cached without a cache; if the head has no embeddings for `input_ids`.
        """
        is_peagle = self.config.is_peagle
        if past_key_values is None and (only_cache or (features is not None and not is_peagle)):
            raise ValueError(
                "`past_key_values`: context rows and `only_cache=True` are written to a cache alone. Give one."
            )
        if features is not None and not is_peagle:
            self._write_context(self.fuse(features), position_ids, past_key_values)
            return HeadOutput()
        states = self._embed(input_ids, inputs_embeds)
        embeddings = states
        if is_peagle:
            states = self.fuse(self._mask_features(states) if features is None else features)
        elif self.config.embedding_scale != 1:
            states = states * self.config.embedding_scale
        if attention_mask is not None and attention_mask.dim() == 4:
            masks: list[torch.Tensor | None] = [attention_mask] * len(self.layers)
        else:
            masks = masks_of_rows(self.config, _length(past_key_values), states, attention_mask)
        if position_ids is None:
            position_ids = _positions_after(past_key_values, states)
        rotations = rotations_of(self.rotary_emb, self.config.text_config, states, position_ids)
        for index, layer in enumerate(self.layers):
            options: dict[str, Any] = {}
            if is_peagle and index == 0:
                options = {"embeddings": embeddings, "only_cache": only_cache and len(self.layers) == 1}
            if self.config.text_config.model_type == "gemma4_text":
                options = {"shared_kv_states": {}}
            states = layer(
                states,
                **options,
                **window_argument(self.config.text_config, index),
                attention_mask=masks[index],
                position_ids=position_ids,
                position_embeddings=rotations[index],
                **{CACHE: past_key_values},
                **kwargs,
            )
        if only_cache:
            return HeadOutput()
        if not is_peagle:
            states = self.norm(states)
        logits = None
        if logits_to_keep is not None and (self.lm_head is not None or lm_head is not None):
            logits = self.compute_logits(states[:, -logits_to_keep:], lm_head)
        return HeadOutput(hidden_states=states, logits=logits)

    def _embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either `input_ids` or `inputs_embeds`.")
        if inputs_embeds is not None:
            return inputs_embeds
        if self.embed_tokens is None:
            raise ValueError("`input_ids`: this head has no token embeddings. Pass the target's `inputs_embeds`.")
        assert input_ids is not None
        return self.block_embeddings(input_ids, self.embed_tokens)

    def _mask_features(self, states: torch.Tensor) -> torch.Tensor:
        """P-EAGLE's feature of every row whose feature is unknown, `[batch, rows, feature_size]`."""
        mask_hidden: Any = self.mask_hidden
        return mask_hidden.expand(*states.shape[:2], -1)

    def _write_context(self, context: torch.Tensor, position_ids: torch.Tensor | None, cache: Any) -> None:
        """Writes keys and values of context rows `[batch, rows, H]`, the same in all layers, to the cache."""
        if position_ids is None:
            position_ids = _positions_after(cache, context)
        rotations = rotations_of(self.rotary_emb, self.config.text_config, context, position_ids)
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        found = keys_and_values(attentions, context, rotations)
        for attention, (keys, values) in zip(attentions, found, strict=True):
            cache.update(keys, values, attention.layer_idx)

    def inputs_of_one_row(self, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor | None]:
        """Keyword arguments of a forward over one row of zeros, without logits: to see what the head's layers do."""
        return {
            "inputs_embeds": torch.zeros(1, 1, self.config.hidden_size, dtype=dtype, device=device),
            "position_ids": torch.zeros(1, 1, dtype=torch.long, device=device),
            "attention_mask": torch.zeros(1, 1, 1, 1, dtype=dtype, device=device),
            "logits_to_keep": None,
        }

    # -------------------------------------------------------------------------------------------------------- logits

    def compute_logits(self, hidden_states: torch.Tensor, lm_head: nn.Module | None = None) -> torch.Tensor:
        """
        Logits `[batch, rows, draft vocab]` for states as the forward returns them, `[batch, rows, H]`.

        Args:
            lm_head (`nn.Module`, *optional*): the target's lm_head, for heads that have none.

        Raises:
            ValueError: without `lm_head`, for a head that has none.
        """
        if self.config.is_peagle:
            hidden_states = self.norm(hidden_states)
        logits = lm_head_of(self, lm_head)(hidden_states)
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @property
    def conditions(self) -> bool:
        """Whether a position's logits depend on the token before it, see `conditional_logits`."""
        return self.markov_head is not None or self.candidate_selector is not None

    def conditional_logits(
        self, base: torch.Tensor, states: torch.Tensor, parents: torch.Tensor, carried: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Logits of the positions after nodes of a tree, given the nodes' tokens.

        Args:
            base (`torch.Tensor` of shape `[batch, nodes, draft vocab]`): the positions' logits, see `compute_logits`.
            states (`torch.Tensor` of shape `[batch, nodes, H]`): their states.
            parents (`torch.Tensor` of shape `[batch, nodes]`, int64): the nodes' tokens, as the target numbers them.
            carried (`torch.Tensor` of shape `[batch, nodes, r]`, *optional*): what this method returned for the nodes'
                parents; None for the anchor.

        Returns:
            `tuple`: logits `[batch, nodes, draft vocab]`, -inf but for the candidates of a selector; and what is to be
            carried to the nodes' children, None for most heads.
        """
        if self.candidate_selector is not None:
            return self.candidate_selector(base, states, parents), None
        if self.markov_head is None:
            return base, None
        added, carried = self.markov_head(states, parents, carried)
        return base + added, carried

    @property
    def pairs_tokens(self) -> bool:
        """Whether `conditional_logits` depend on a node's own token alone, and not on the path to it."""
        conditions = self.candidate_selector or self.markov_head
        return conditions is not None and conditions.keys is not None

    def confidence_logits(self, states: torch.Tensor, parents: torch.Tensor) -> torch.Tensor | None:
        """
        The estimated probability that the token of a position is accepted if those before it are, as logits `[batch,
        nodes]`; None for a head without such an estimate. Arguments as of `conditional_logits`.
        """
        if self.confidence_head is None:
            return None
        embeddings = None
        if self.markov_head is not None and self.config.confidence_with_markov:
            embeddings = self.markov_head.markov_w1(parents)
        return self.confidence_head(states, embeddings)


def _length(cache: Cache | None) -> int:
    """Rows in the cache."""
    return 0 if cache is None else cache.get_seq_length()


def _positions_after(cache: Cache | None, states: torch.Tensor) -> torch.Tensor:
    """Positions `[1, rows]` of rows `[batch, rows, H]` that follow those in the cache."""
    past = _length(cache)
    return torch.arange(past, past + states.shape[1], device=states.device)[None]


AutoModel.register(BlockConfig, BlockHead, exist_ok=True)
