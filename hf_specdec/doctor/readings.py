"""Readings of a head: alternative conventions for its weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig

from ..eagle import EagleConfig, EagleHead
from ..head_layers import layers_of


def readings(config: EagleConfig, target: PreTrainedConfig) -> list[tuple[str, dict[str, Any]]]:
    """
    The readings to try: the head as read first, then one change at a time.

    Args:
        config (`EagleConfig`): config of the head.
        target (`PreTrainedConfig`): config of its target.

    Returns:
        `list[tuple[str, dict]]`: name of each reading, and its arguments of `EagleHead.from_pretrained`.
    """
    tried: list[tuple[str, dict[str, Any]]] = [("as read", {})]
    target = target.get_text_config(decoder=True)
    if config.num_aux_features:
        boundaries = config.aux_boundaries(target.num_hidden_layers)
        names = {1: "layer ids + 1 (outputs)", -1: "layer ids - 1"}
        for step, name in names.items():
            shifted = [layer + step for layer in boundaries]
            if min(shifted) >= 0 and max(shifted) <= target.num_hidden_layers:
                tried.append((name, {"aux_layer_ids": shifted}))
    if config.eagle_version == 3:
        for flag in ("norm_before_residual", "norm_output", "norm_hidden_twice"):
            if flag == "norm_hidden_twice" and not config.norm_embeddings:
                continue  # the head has no such norm to apply twice
            value = not getattr(config, flag)
            tried.append((f"{flag}={value}", {flag: value}))
    theta = (config.text_config.rope_parameters or {}).get("rope_theta")
    if config.hidden_size == target.hidden_size:  # else the target's do not fit
        for flag, name in (("has_embeddings", "the target's embeddings"), ("has_lm_head", "the target's lm_head")):
            if getattr(config, flag):
                tried.append((name, {flag: False}))
    its_theta = (getattr(target, "rope_parameters", None) or {}).get("rope_theta")
    if its_theta is not None and its_theta != theta:
        tried.append(("the target's rope_theta", {"rope_theta": its_theta}))
    return tried


def reread(head: EagleHead, changes: dict[str, Any]) -> EagleHead:
    """
    A head under another reading, which shares the weights of `head`.

    Args:
        head (`EagleHead`): the head.
        changes (`dict`): arguments of `EagleConfig.changed`; `head` itself is returned if empty.
    """
    if not changes:
        return head
    config = head.config.changed(**changes)
    with torch.device("meta"):
        other = EagleHead(config)
    used = other.state_dict().keys()  # not the embeddings or the lm_head where the target's are read
    other.load_state_dict({key: tensor for key, tensor in head.state_dict().items() if key in used}, assign=True)
    # The rotary embedding's buffers are not in the state dict, and depend on the config.
    with torch.device(head.device):
        other.rotary_emb = layers_of(config.text_config).rotary(config=other.config.text_config)
    other.follows_target_dtype = head.follows_target_dtype
    return other.train(head.training)
