"""
Blocks after many anchors of a text in one forward, as training and the doctor run them.

In drafting, a block follows the newest token, its anchor, and reads the features of the tokens before it. Here the
blocks of all anchors stand in one row behind the context of the whole text: each sees the context rows of its own text
before its anchor, and its own rows (z-lab/dflash and deepseek-ai/DeepSpec train so). The states are those that
drafting computes at these anchors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, DynamicCache

from ..attention import window_of
from ..whole_texts import attention_lent, check_rope
from .modeling_block import BlockHead


NAME = "hf_specdec_anchored"
_MASK_AT_ONCE = {"cuda": 2**26, "cpu": 2**23}
"""Entries of the mask of one piece of anchors over the context, by device type; attention without fused kernels, as on
a CPU, has scores for them, for every head."""


@dataclass
class AnchoredBlocks:
    """
    What the rows of the blocks see.

    Args:
        anchors (`torch.Tensor` of shape `[batch, anchors]`, int64): places of the anchors in the texts.
        starts (`torch.Tensor` of shape `[batch, anchors]`, int64): where the texts of the anchors begin.
        num_rows (`int`): B, rows of a block.
        num_tokens (`int`): tokens of the texts, the keys of the context.
        from_anchor (`bool`): whether windows count from the anchor; see `BlockConfig.window_from_anchor`.
        masks (`dict`): results of `pieces`, by window and whether blocks are causal.
    """

    anchors: torch.Tensor
    starts: torch.Tensor
    num_rows: int
    num_tokens: int
    from_anchor: bool = False
    masks: dict[tuple[int | None, bool], list[tuple[int, int, torch.Tensor]]] = field(default_factory=dict)

    def pieces(self, window: int | None, is_causal: bool) -> list[tuple[int, int, torch.Tensor]]:
        """
        Attention goes piece by piece, so that its memory is bounded: the first anchor of a piece, the one after its
        last, and which keys its rows see, `[batch, 1, piece · B, tokens + piece · B]` bool.
        """
        if (window, is_causal) not in self.masks:
            batch, anchors = self.anchors.shape
            most = _MASK_AT_ONCE.get(self.anchors.device.type, _MASK_AT_ONCE["cpu"])
            at_once = most // (batch * self.num_rows * self.num_tokens)
            # A piece has keys of its own blocks, of which a row sees one block: fewer than keys of the context.
            at_once = max(1, min(at_once, max(self.num_tokens // 2, 128) // self.num_rows))
            firsts = range(0, anchors, at_once)
            self.masks[window, is_causal] = [
                (first, min(first + at_once, anchors), self._mask(first, first + at_once, window, is_causal))
                for first in firsts
            ]
        return self.masks[window, is_causal]

    def _mask(self, first: int, end: int, window: int | None, is_causal: bool) -> torch.Tensor:
        anchors, starts = (places[:, first:end, None, None] for places in (self.anchors, self.starts))
        rows = torch.arange(self.num_rows, device=anchors.device)
        tokens = torch.arange(self.num_tokens, device=anchors.device)
        context = (tokens >= starts) & (tokens < anchors)  # [batch, piece, 1, tokens]
        own = torch.ones(self.num_rows, self.num_rows, dtype=torch.bool, device=anchors.device)
        if window is not None and self.from_anchor:
            context = context & (anchors - tokens <= window)
        elif window is not None:
            context = context & (anchors + rows[:, None] - tokens < window)
            own = own & (rows[:, None] - rows < window)
        if is_causal:
            own = own.tril()
        piece = anchors.shape[1]
        context = context.expand(-1, -1, self.num_rows, -1).flatten(1, 2)
        own = torch.block_diag(*[own] * piece) if piece > 1 else own
        return torch.cat([context, own.bool().expand(len(context), -1, -1)], dim=-1)[:, None]


def anchored_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    anchored: AnchoredBlocks,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """
    Attention of the blocks after all anchors, registered with transformers' `AttentionInterface`.

    Args:
        module (`nn.Module`): the attention layer.
        query (`torch.Tensor` of shape `[batch, heads, anchors · B, head_dim]`): queries of the blocks.
        key, value (`torch.Tensor` of shape `[batch, kv heads, tokens + anchors · B, head_dim]`): those of the context,
            then those of the blocks.
        attention_mask (`torch.Tensor`): unused; the masks come from `anchored`.
        scaling (`float`): factor of the scores.
        anchored (`AnchoredBlocks`): what the rows see.

    Returns:
        The output, `[batch, anchors · B, heads, head_dim]`, and None for the weights.
    """
    groups, tokens, rows = query.shape[1] // key.shape[1], anchored.num_tokens, anchored.num_rows
    query, key = query.to(value.dtype), key.to(value.dtype)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    pieces = anchored.pieces(window_of(module.config, module.layer_idx), module.is_causal)
    sizes = [(end - first) * rows for first, end, _ in pieces]
    # Split, not sliced: the gradient of a slice is as large as the whole.
    key_parts, value_parts = (part.split([tokens, *sizes], dim=2) for part in (key, value))
    outputs = []
    for place, (queries, (*_ends, mask)) in enumerate(zip(query.split(sizes, dim=2), pieces, strict=True), start=1):
        keys, values = (torch.cat([parts[0], parts[place]], dim=2) for parts in (key_parts, value_parts))
        outputs.append(F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, anchored_attention)


def blocks_after(
    head: BlockHead,
    features: torch.Tensor,
    input_ids: torch.Tensor,
    anchors: torch.Tensor,
    embed: Callable[[torch.Tensor], torch.Tensor],
    *,
    position_ids: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    The states of the blocks after anchors, `[batch, anchors, B, H]`, after the head's last norm. P-EAGLE: `[batch,
    anchors, drafts, H]` before it, of the last row with a feature of the target and of the masks.

    Args:
        head (`BlockHead`): the head; its attention implementation is replaced meanwhile.
        features (`torch.Tensor` of shape `[batch, tokens, feature_size]`): the target's features.
        input_ids (`torch.Tensor` of shape `[batch, tokens]`, int64): the tokens.
        anchors (`torch.Tensor` of shape `[batch, anchors]`, int64): places of the anchors.
        embed (callable): the target's token embeddings, for heads without their own.
        position_ids (`torch.Tensor` of shape `[batch, tokens]`, int64, *optional*): defaults to 0, 1, …
        segment_ids (`torch.Tensor` of shape `[batch, tokens]`, int64, *optional*): ascending number of each token's
            text in a packed row; texts do not see each other. Not for P-EAGLE.
        mask (`torch.Tensor` of shape `[H]`, *optional*): an embedding in place of the masks'.

    Raises:
        ValueError: for rotary embeddings that depend on the length of the text.
    """
    check_rope(head)
    (batch, tokens), rows, is_peagle = input_ids.shape, head.config.num_rows, head.config.is_peagle
    embed = embed if head.embed_tokens is None else head.embed_tokens
    if position_ids is None:
        position_ids = torch.arange(tokens, device=input_ids.device).expand(batch, -1)
    starts = torch.zeros_like(anchors)
    if segment_ids is not None:
        starts = torch.searchsorted(segment_ids.contiguous(), segment_ids.gather(1, anchors))
    cache: Any = DynamicCache()
    context: dict[str, Any] = {"features": features.to(head.dtype), "position_ids": position_ids}
    if is_peagle:  # whose rows pair features with the tokens after them; no block sees the last
        context["inputs_embeds"] = embed(input_ids.roll(-1, dims=1)).to(head.dtype)
    true_rows = head(**context, past_key_values=cache, logits_to_keep=None).hidden_states
    blocks = head.block_tokens(input_ids.gather(1, anchors).flatten()).view(batch, -1)
    embeddings = head.block_embeddings(blocks, embed)
    if mask is not None:
        is_mask = torch.arange(blocks.shape[1], device=blocks.device) % rows >= (0 if is_peagle else 1)
        embeddings = torch.where(is_mask[:, None], mask, embeddings)
    positions = position_ids.gather(1, anchors)[..., None] + torch.arange(rows, device=anchors.device)
    with attention_lent(head, NAME):
        states = head(
            inputs_embeds=embeddings.to(head.dtype),
            attention_mask=torch.empty(1, 1, 1, 1, device=anchors.device),  # four dimensions: the head makes none
            position_ids=positions.flatten(1),
            logits_to_keep=None,
            anchored=AnchoredBlocks(anchors, starts, rows, tokens, head.config.window_from_anchor),
            past_key_values=cache,
        ).hidden_states
    states = states.unflatten(1, (-1, rows))
    if not is_peagle:
        return states
    last = (anchors - 1)[..., None].expand(-1, -1, states.shape[-1])
    return torch.cat([true_rows.gather(1, last)[:, :, None], states], dim=2)
