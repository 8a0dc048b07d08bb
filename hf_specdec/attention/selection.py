"""
Layers that attend to a part of the keys that neither a tree nor a sliding window tells: to a chunk of positions, or to
keys that an indexer has selected for each query.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..compat import INDEXED
from ..models.indexers import makes_masks_over_trees
from ..models.probe import layers_of
from .context import AttentionContext, TreeContext
from .switch import supports_switching


def kind_of(module: Any) -> str | None:
    """The kind of an attention layer, as `config.layer_types` names it; None where neither names one."""
    kinds, index = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
    return None if kinds is None or index is None else kinds[index]


def factors_of_slots(
    module: Any, queries: int, options: dict[str, Any], context: AttentionContext
) -> torch.Tensor | None:
    """
    What the queries of a layer that scales them by their slot are to be multiplied by, `[batch, queries]`; None for
    other layers. Such are those of Llama 4 without rotary embedding (arXiv 2501.19399), and of Inkling without a
    window, which knows no positions (Inkling 2 does). The layer counts slots from the length of the cache on; those of
    nodes depend on row and depth.
    """
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
        floor, alpha, divided = module.floor_scale, module.attn_scale, _llama
    elif hasattr(module, "rel_logits_proj") and not module.is_sliding and "position_ids" not in options:
        floor, alpha, divided = module.config.log_scaling_n_floor, module.config.log_scaling_alpha, _inkling
        if floor is None:
            return None
    else:
        return None
    assert isinstance(context, TreeContext)  # such models are not captured
    counted = torch.arange(queries, device=context.device) + max(context.lengths)
    of_nodes, of_layer = (torch.log(divided(slots.float() + 1.0, floor)) for slots in (context.query_slots, counted))
    return (1.0 + alpha * of_nodes) / (1.0 + alpha * of_layer)


def _llama(slots: torch.Tensor, floor: float) -> torch.Tensor:
    return 1.0 + torch.floor(slots / floor)


def _inkling(slots: torch.Tensor, floor: float) -> torch.Tensor:
    return (slots / floor).clamp(min=1.0)


def selects(options: dict[str, Any]) -> bool:
    """Whether a layer's call of the attention function names the keys, or blocks of them, that it has selected."""
    return options.get("indices") is not None or options.get("block_indices") is not None


def tells_selection(model: PreTrainedModel) -> bool:
    """
    Whether all layers of a model that select keys tell which, as one probe shows: they name them to the attention
    function, or hand it a mask of them, which an indexer has made that runs over trees (`models.indexers`).
    """
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    number = sum(kind in INDEXED for kind in kinds)
    if number == 0 or not supports_switching(model):
        return False
    layers = layers_of(model)
    if layers is None:
        return False
    named = sum(selects(call.options) for call in layers.calls)
    if makes_masks_over_trees(model):
        named += sum(call.makes_mask and kind_of(call.module) in INDEXED for call in layers.calls)
    return named == number


def with_own_mask(mask: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """An additive mask over a tree that also hides what the layer's `own` mask does."""
    is_hidden = ~own if own.dtype == torch.bool else own < 0
    return mask.masked_fill(is_hidden.to(mask.device), torch.finfo(mask.dtype).min)


def with_selection(
    module: torch.nn.Module,
    mask: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    options: dict[str, Any],
    context: AttentionContext | None = None,
) -> torch.Tensor:
    """
    A mask that also hides what a layer's indexer has not selected, as the layer itself makes it for eager attention
    and sdpa.

    Args:
        module (`nn.Module`): the attention layer.
        mask (`torch.Tensor` of shape `[1 or batch, 1, queries, slots]`): an additive mask, or True where a query may
            attend.
        query, key (`torch.Tensor` of shape `[batch, heads, queries or slots, head_dim]`).
        options (`dict`): the keyword arguments of the call, with `indices`, `[batch, queries, selected]` int32: the
            slots that the indexer has selected; or with `block_indices`, `[batch, indexer_heads, queries, selected]`
            int64: the blocks of keys, -1 for none.
        context (`AttentionContext`, *optional*): that of a forward over a tree.

    Returns:
        `torch.Tensor` of shape `[batch, 1 or heads, queries, slots]`: the mask.
    """
    if options.get("block_indices") is not None:
        return _with_blocks(module, mask, query, key, options, context)
    indices = options["indices"].long()
    selected = torch.zeros(*indices.shape[:2], key.shape[2], dtype=torch.bool, device=indices.device)
    selected = selected.scatter(-1, indices, True)[:, None]
    if mask.dtype == torch.bool:
        return mask & selected
    return mask.masked_fill(~selected, torch.finfo(mask.dtype).min)


def _with_blocks(
    module: Any,
    mask: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    options: dict[str, Any],
    context: AttentionContext | None,
) -> torch.Tensor:
    """As `with_selection`, for blocks of MiniMax-M3. A node belongs to the block of the slot that it takes."""
    indices = options["block_indices"]
    if context is None:
        positions = options["position_ids"]
        return module.indexer.build_block_mask(indices, mask, key.shape[2], query.dtype, query.device, positions)
    assert isinstance(context, TreeContext)  # such models are not captured
    blocks = (context.key_slots // module.indexer.block_size).to(query.device)
    num_blocks = 1 + max(int(blocks.max()), int(indices.max()))
    chosen = torch.zeros(*indices.shape[:3], num_blocks + 1, dtype=torch.bool, device=query.device)
    chosen.scatter_(-1, indices.masked_fill(indices < 0, num_blocks), True)
    selected = chosen.gather(-1, blocks[:, None, None].expand(*indices.shape[:3], -1))
    selected = selected.repeat_interleave(query.shape[1] // indices.shape[1], dim=1)
    return mask.masked_fill(~selected, torch.finfo(mask.dtype).min)
