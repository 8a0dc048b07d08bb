"""Readings of a head: alternative conventions for its weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig

from ..block import BlockConfig
from ..checkpoints.layer_fields import windows_of
from ..eagle import EagleConfig
from ..gemma import GemmaAssistantConfig
from .along_text import Head


Reading = tuple[str, dict[str, Any]]
"""A name, and arguments of the head's `from_pretrained`."""

_USUAL_THETAS = {"a rope_theta of 10,000": 1e4, "a rope_theta of 1,000,000": 1e6}


def readings(config: EagleConfig | BlockConfig | GemmaAssistantConfig, target: PreTrainedConfig) -> list[Reading]:
    """
    The readings to try: the head as read first, then one change at a time.

    Args:
        config (`EagleConfig`, `BlockConfig` or `GemmaAssistantConfig`): config of the head.
        target (`PreTrainedConfig`): config of its target.
    """
    if isinstance(config, GemmaAssistantConfig):
        return [("as read", {}), _other(config, "position_of_feature")]
    target = target.get_text_config(decoder=True)
    special = _of_block_heads(config) if isinstance(config, BlockConfig) else _of_eagle_heads(config)
    return [("as read", {}), *_layer_ids(config, target), *special, *_of_the_target(config, target)]


def _layer_ids(config: EagleConfig | BlockConfig, target: PreTrainedConfig) -> list[Reading]:
    if not config.num_aux_features:
        return []
    boundaries = config.aux_boundaries(target.num_hidden_layers)
    tried: list[Reading] = []
    for step, name in {1: "layer ids + 1 (outputs)", -1: "layer ids - 1"}.items():
        shifted = [layer + step for layer in boundaries]
        if min(shifted) >= 0 and max(shifted) <= target.num_hidden_layers:
            tried.append((name, {"aux_layer_ids": shifted}))
    return tried


def _of_eagle_heads(config: EagleConfig) -> list[Reading]:
    tried: list[Reading] = []
    if config.eagle_version == 3:
        for flag in ("norm_before_residual", "norm_output", "norm_hidden_twice"):
            if flag == "norm_hidden_twice" and not config.norm_embeddings:
                continue  # the head has no such norm to apply twice
            tried.append(_other(config, flag))
    return tried


def _of_block_heads(config: BlockConfig) -> list[Reading]:
    """The mask token is not among them: `likely_mask_token` finds it."""
    if config.is_peagle:
        return [_other(config, "norm_before_residual")]
    row = "row 1 drafts first" if config.anchor_first else "row 0, the anchor's, drafts first"
    block = "all rows of a block see one another" if config.causal else "a causal block"
    tried: list[Reading] = [(row, _other(config, "anchor_first")[1]), (block, _other(config, "causal")[1])]
    if any(windows_of(config.text_config)) and not config.causal:
        tried.append(_other(config, "window_is_causal"))
    if any(windows_of(config.text_config)):
        where = "each row" if config.window_from_anchor else "the anchor"
        tried.append((f"windows count from {where}", _other(config, "window_from_anchor")[1]))
    if config.has_mask_embedding and config.mask_token_id is not None:
        tried.append(("the mask token's embedding", {"has_mask_embedding": False}))
    return tried


def _of_the_target(config: EagleConfig | BlockConfig, target: PreTrainedConfig) -> list[Reading]:
    """What a head may share with its target, and bases of the rotary embedding that are often meant."""
    tried: list[Reading] = []
    if config.hidden_size == target.hidden_size:  # else the target's do not fit
        for flag, name in (("has_embeddings", "the target's embeddings"), ("has_lm_head", "the target's lm_head")):
            if getattr(config, flag):
                tried.append((name, {flag: False}))
    rope = config.text_config.rope_parameters or {}
    if any(isinstance(part, dict) for part in rope.values()):  # by type of layer, as in Gemma 4
        return tried
    its_rope = getattr(target, "rope_parameters", None) or {}
    thetas = {"the target's rope_theta": its_rope.get("rope_theta")}
    if isinstance(config, BlockConfig):
        thetas |= _USUAL_THETAS
    known = {None, rope.get("rope_theta")}
    for name, theta in thetas.items():
        if theta not in known:
            tried.append((name, {"rope_theta": theta}))
            known.add(theta)
    return tried


def _other(config: PreTrainedConfig, flag: str) -> Reading:
    value = not getattr(config, flag)
    return f"{flag}={value}", {flag: value}


def reread(head: Head, changes: dict[str, Any]) -> Any:
    """
    A head under another reading, which shares the weights of `head`.

    Args:
        head (`EagleHead`, `BlockHead` or `GemmaAssistant`): the head.
        changes (`dict`): arguments of its config's `changed`; `head` itself is returned if empty.
    """
    if not changes:
        return head
    config: Any = head.config.changed(**changes)
    with torch.device("meta"):
        other = type(head)(config)
    used = other.state_dict().keys()  # not the embeddings or the lm_head where the target's are read
    other.load_state_dict({key: tensor for key, tensor in head.state_dict().items() if key in used}, assign=True)
    # The rotary embedding's buffers are not in the state dict, and depend on the config.
    with torch.device(head.device):
        other.rotary_emb = type(head.rotary_emb)(config=other.config.text_config)
    other.follows_target_dtype = head.follows_target_dtype
    return other.train(head.training)
