"""
P-EAGLE heads (amazon): EAGLE-3 heads with `mask_hidden`, the feature of rows whose token and feature are unknown. They
come in the format of speculators and in that of EAGLE-3 heads for vLLM, and are read as EAGLE-3 heads are.
"""

from __future__ import annotations

from typing import Any

from ...checkpoints.keys import Keys
from ...checkpoints.published import PublishedHead, section, verifier_name
from ...checkpoints.reading import Checkpoint
from ...eagle.formats.safeailab import read_eagle3
from ..configuration_block import BlockConfig
from .backbone import KIND, check_number_of_layers


NAME = "peagle"
DEFAULT_DRAFTS = 8
# What `BlockConfig` cannot say of an EAGLE-3 head, and all P-EAGLE heads have.
_ALWAYS = {
    "has_fc": True,
    "fc_bias": False,
    "norm_hidden_twice": False,
    "norm_embeddings": True,
    "final_norm": True,
}
_SHARED = (
    "target_hidden_size",
    "num_aux_features",
    "aux_layer_ids",
    "draft_vocab_size",
    "norm_before_fc",
    "fc_norm",
    "norm_before_residual",
    "has_embeddings",
    "has_lm_head",
)


def matches(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint is a P-EAGLE head, by its config or weights."""
    return "mask_hidden" in checkpoint.weights or checkpoint.config.get("speculators_model_type") == "peagle"


def read(checkpoint: Checkpoint) -> PublishedHead:
    """
    Reads a P-EAGLE head.

    Raises:
        ValueError: if a tensor or value is missing, or impossible.
    """
    published, name = checkpoint.config, checkpoint.name
    keys = Keys(checkpoint, {"midlayer.": "layers.0."}, kind=KIND)
    for key in ("verifier_lm_head.weight", "verifier_norm.weight"):
        keys.drop(key)
    layers = published
    if "speculators_model_type" in published:
        layers = section(published, "transformer_layer_config", name, required=True)
    if "mask_hidden" not in keys:
        keys.shape("mask_hidden")  # which says that it is missing
    mask_hidden = keys.weights.pop("mask_hidden").reshape(1, 1, -1)
    ids = published.get("eagle_aux_hidden_state_layer_ids")
    why = "boundaries in config.json, as always in this format" if ids else "EAGLE-3's default: config.json names none"
    reading = read_eagle3(
        keys,
        published,
        NAME,
        layers=layers,
        conventions={"aux_layer_ids": why},
        aux_layer_convention="boundaries",
        norm_before_residual=bool(published.get("norm_before_residual", False)),
    )
    eagle = reading.config
    for field, value in _ALWAYS.items():
        if getattr(eagle, field) != value:
            raise ValueError(f"{name}: `{field}`={getattr(eagle, field)!r}: P-EAGLE heads have {value!r}.")
    check_number_of_layers(keys, layers, eagle.text_config.num_hidden_layers)
    reasons = dict(eagle.conventions or {})
    fields: dict[str, Any] = {field: getattr(eagle, field) for field in _SHARED}
    if fields["aux_layer_ids"] is not None:
        fields["aux_layer_ids"] = sorted(fields["aux_layer_ids"])
    try:
        config = BlockConfig(
            text_config=eagle.text_config,
            is_peagle=True,
            block_size=_num_drafts(checkpoint, reasons),
            mask_token_id=_mask_token(checkpoint),
            target_name=verifier_name(checkpoint),
            source_format=NAME,
            reasons=reasons,
            **fields,
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from error
    config.name_or_path = name
    return PublishedHead(config, reading.weights | {"mask_hidden": mask_hidden}, reading.ignored)


def _mask_token(checkpoint: Checkpoint) -> Any:
    """The mask token, under one of the names that speculators and vLLM know."""
    names = ("mask_token_id", "pard_token", "ptd_token_id")
    return next((checkpoint.config[name] for name in names if checkpoint.config.get(name) is not None), None)


def _num_drafts(checkpoint: Checkpoint, reasons: dict[str, str]) -> Any:
    """Tokens drafted in one forward: what speculators' proposal method says, or the training's depth."""
    options = section(checkpoint.config, "speculators_config", checkpoint.name)
    methods = options.get("proposal_methods")
    for method in methods if isinstance(methods, list) else ():
        if isinstance(method, dict) and method.get("speculative_tokens") is not None:
            reasons["block_size"] = "`speculative_tokens` in config.json"
            return method["speculative_tokens"]
    for name in ("num_depths", "para_depths", "num_speculative_tokens"):
        if checkpoint.config.get(name) is not None:
            reasons["block_size"] = f"`{name}` in config.json"
            return checkpoint.config[name]
    reasons["block_size"] = "config.json does not say how many tokens the head was trained to draft"
    return DEFAULT_DRAFTS
