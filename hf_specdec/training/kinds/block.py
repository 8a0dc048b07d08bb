"""Block heads, DFlash and DSpark: new ones, and ones to train further."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...block import BlockConfig, BlockHead
from ...block.configuration_block import spread_layers
from ...models.structure import num_logits_of
from ..blocks import BlockObjective
from ..data import Text
from ..heads import begun_from, layers_like
from ..loss_weights import WEIGHTS, LossWeights
from ..packing import ids_and_masks
from ..vocabulary import count_tokens
from .base import Kind


_RATE = 6e-4  # z-lab's and DeepSpec's, for widths from 2560 to 5120
_LAYERS, _FEATURES = 5, 3


class Block(Kind):
    """A head that drafts blocks."""

    kind: ClassVar[str]
    block_size: ClassVar[int]
    rate_times_width = 0.7
    warmup, max_grad_norm = 0.04, 1.0
    reads_all_logits = True

    def check(self) -> None:
        self._config(self.options.mask_token_id or 0)

    def new(self, texts: list[Text]) -> tuple[BlockHead, torch.Tensor | None]:
        token_ids = self.vocabulary(texts, self.options.draft_vocab_size or 0)
        mask_token_id = self.options.mask_token_id
        if mask_token_id is None:
            vocab_size = num_logits_of(self.target)
            counts = count_tokens(ids_and_masks(texts), vocab_size)[1]
            mask_token_id = choose_mask_token(self.tokenizer, counts)
        config = self._config(mask_token_id, None if token_ids is None else len(token_ids))
        return new_block_head(self.target, config, token_ids), token_ids

    def _config(self, mask_token_id: int, draft_vocab_size: int | None = None) -> BlockConfig:
        options = self.options
        return new_block_config(
            self.target,
            block_size=options.block_size or self.block_size,
            mask_token_id=mask_token_id,
            num_layers=options.num_layers,
            intermediate_size=options.intermediate_size,
            num_heads=options.num_heads,
            num_kv_heads=options.num_kv_heads,
            aux_layer_ids=None if options.aux_layer_ids is None else list(options.aux_layer_ids),
            causal=options.causal,
            draft_vocab_size=draft_vocab_size,
            has_lm_head=draft_vocab_size is not None and not options.shares_lm_head,
            target_name=self.target_name,
            **self.fields,
        )

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a new head's config that this kind has."""
        return {}

    def start(self, name: str) -> tuple[BlockHead, torch.Tensor | None]:
        head = BlockHead.from_pretrained(name, dtype=torch.float32)
        if head.config.kind != self.kind:
            known = head.config.kind in ("dflash", "dspark")
            remedy = f"use `kind={head.config.kind!r}`" if known else "'dflash' and 'dspark' are trained"
            raise ValueError(f"`start_from`={name!r} is a head of kind {head.config.kind!r}: {remedy}.")
        self.check_head(name, head)
        # It may name another target.
        head.config.target_name, head.config.num_target_layers = self.target_name, self.num_layers_of_target
        head = head.to(self.target.device)
        return head, head.target_ids

    def objective(self, model: Any, packed: bool) -> nn.Module:
        options = self.options
        return BlockObjective(model, self.weights, num_anchors=options.num_anchors, gamma=options.gamma)

    @property
    def weights(self) -> LossWeights:
        """Weights of the loss, as asked for or the kind's own."""
        given = self.options.loss_weights
        return WEIGHTS[self.kind] if given is None else LossWeights.parse(given)

    def learning_rate(self, model: Any) -> float:
        return max(super().learning_rate(model), _RATE)

    def recipe(self, objective: Any) -> dict[str, Any]:
        weights = {name: weight for name, weight in asdict(objective.weights).items() if weight}
        loss = " + ".join(f"{weight:g} · {name.replace('_', '-')}" for name, weight in weights.items())
        return {
            "block_size": objective.model.config.block_size,
            "anchors": objective.num_anchors,
            "gamma": objective.gamma,
            "loss": loss,
        }


class DFlash(Block):
    """A DFlash head, whose rows are in place; with `causal`, a JetSpec head."""

    kind = "dflash"
    method = "DFlash"
    block_size = 16


class DSpark(Block):
    """A DSpark head, anchor first, with a Markov head and a confidence head."""

    kind = "dspark"
    method = "DSpark"
    block_size = 7

    @property
    def fields(self) -> dict[str, Any]:
        has_confidence_head = self.weights.confidence > 0
        return {
            "anchor_first": True,
            "markov_rank": self.options.markov_rank or 64,
            "has_confidence_head": has_confidence_head,
            "confidence_with_markov": has_confidence_head,
        }


def new_block_config(
    target: PreTrainedModel,
    *,
    block_size: int,
    mask_token_id: int,
    num_layers: int | None = None,
    intermediate_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    aux_layer_ids: list[int] | None = None,
    **fields: Any,
) -> BlockConfig:
    """
    The config of a new head: "qwen3" layers (as all formats have), as wide as the target, and plain rotary embeddings
    with theta 10000.

    Args:
        target (`PreTrainedModel`): the target of the head.
        block_size (`int`): B, rows of a block.
        mask_token_id (`int`): the token whose embedding stands for unknown tokens.
        num_layers (`int`, *optional*): decoder layers; defaults to 5, or the target's if it has fewer.
        intermediate_size (`int`, *optional*): width of the MLP; defaults to the target's.
        num_heads, num_kv_heads (`int`, *optional*): attention heads, of the target's size; default to the target's.
        aux_layer_ids (`list[int]`, *optional*): boundaries to read; default to as many as there are layers, at least
            3, spread as z-lab's (`spread_layers`), without repetition.
        fields: other fields of `BlockConfig`.

    Raises:
        ValueError: for hidden states that the target does not have, heads that cannot share keys, a mask token outside
            the vocabulary, and other impossible values.
    """
    source = target.config.get_text_config(decoder=True)
    whole = source.num_hidden_layers
    num_layers = num_layers or min(_LAYERS, whole)
    text_config = layers_like(target, "qwen3", num_layers, intermediate_size)
    heads = num_heads or text_config["num_attention_heads"]
    kv_heads = num_kv_heads or min(text_config["num_key_value_heads"], heads)
    if heads % kv_heads:
        raise ValueError(
            f"`num_heads`={heads} and `num_kv_heads`={kv_heads}: heads share keys in groups of equal size. Choose "
            f"`num_heads` as a multiple of `num_kv_heads`."
        )
    text_config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    if aux_layer_ids is None:
        spread = spread_layers(whole, max(num_layers, _FEATURES))
        # The last layer's output is read before or after the final norm, by whose code it is: better not at all.
        aux_layer_ids = sorted({min(max(boundary, 0), max(whole - 1, 0)) for boundary in spread})
    config = BlockConfig(
        text_config=text_config,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_hidden_size=source.hidden_size,
        num_target_layers=whole,
        aux_layer_ids=sorted(aux_layer_ids),
        final_logit_softcapping=getattr(source, "final_logit_softcapping", None),
        **fields,
    )
    config.aux_boundaries(whole)  # raises for hidden states that the target does not have
    return config


def new_block_head(target: PreTrainedModel, config: BlockConfig, token_ids: torch.Tensor | None = None) -> BlockHead:
    """
    A new head in float32 on the target's device; its final norm, and its lm_head if it has one, are the target's, the
    rest is random.

    Args:
        target (`PreTrainedModel`): the target of the head.
        config (`BlockConfig`): config of the head, see `new_block_config`.
        token_ids (`torch.Tensor` of shape `[draft vocab]`, int64, *optional*): the draft vocabulary, ascending.
    """
    with torch.device("cpu"):
        head = BlockHead(config).float()
    return begun_from(target, head, token_ids)


def choose_mask_token(tokenizer: PreTrainedTokenizerBase, counts: torch.Tensor) -> int:
    """
    A token that the texts do not use, to stand for unknown tokens: the tokenizer's own mask token; one that is named
    as a mask, as reserved, unused or padding; another special one; any other. The first that there is, of the lowest
    number.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the target's tokenizer.
        counts (`torch.Tensor` of shape `[V]`, int64): how often the texts use each token.

    Raises:
        ValueError: if the texts use all tokens.
    """
    special = {index: str(token).lower() for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= {index: "" for index in tokenizer.all_special_ids if index not in special}
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    named = [
        index for word in ("mask", "reserved", "unused", "pad") for index in sorted(special) if word in special[index]
    ]
    candidates = [tokenizer.mask_token_id, *named, *sorted(special), *range(len(counts))]
    for index in candidates:
        if index is not None and index not in ends and 0 <= index < len(counts) and not counts[index]:
            return index
    raise ValueError("`mask_token_id`: the texts use every token of the vocabulary. Name one that is rare in them.")
