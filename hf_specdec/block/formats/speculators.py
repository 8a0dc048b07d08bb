"""
The formats of the speculators library (vllm-project): "dflash", "dflash2" and "dspark" (for "peagle" see `peagle`).

The config contains the decoder layers' config (`transformer_layer_config`); layer ids are boundaries. The heads may
have a draft vocabulary, and then an lm_head of their own.
"""

from __future__ import annotations

from ...checkpoints.keys import Keys
from ...checkpoints.published import PublishedHead, section, verifier_name
from ...checkpoints.reading import Checkpoint
from .backbone import KIND, Backbone, causality, read_backbone


NAME = "speculators"
DEFAULT_BLOCK = 8


def matches(checkpoint: Checkpoint) -> bool:
    """Whether the config was written by speculators."""
    return "speculators_model_type" in checkpoint.config


def read(checkpoint: Checkpoint) -> PublishedHead:
    """
    Reads a head in one of the formats of speculators.

    Raises:
        ValueError: for the library's other kinds of drafts, and if a value is missing or impossible.
    """
    published, name = checkpoint.config, checkpoint.name
    kind = published["speculators_model_type"]
    if kind not in ("dflash", "dflash2", "dspark"):
        raise ValueError(
            f"{name}: `speculators_model_type`={kind!r} is no block head that this version reads. Those are 'dflash', "
            "'dflash2', 'dspark' and 'peagle'."
        )
    keys = Keys(checkpoint, kind=KIND)
    for key in ("verifier_lm_head.weight", "verifier_norm.weight"):
        keys.drop(key)
    backbone = Backbone(
        keys=keys,
        published=published,
        layers=section(published, "transformer_layer_config", name, required=True),
        options=published,
        layer_ids=published.get("aux_hidden_state_layer_ids"),
        ids_are_outputs=False,
    )
    anchor_first = published.get("sample_from_anchor")
    backbone.reasons["anchor_first"] = "`sample_from_anchor` in config.json"
    if anchor_first is None:
        anchor_first = kind == "dspark"
        backbone.reasons["anchor_first"] = (
            "config.json has no `sample_from_anchor`; the library itself takes true (vLLM and llama.cpp: false)"
            if kind == "dspark"
            else "config.json has no `sample_from_anchor`, and this is the kind's default"
        )
    causal, window_is_causal = causality(backbone, window_is_causal=kind != "dflash2")
    reading = read_backbone(
        backbone,
        f"{NAME}_{kind}",
        block_size=backbone.value("block_size", DEFAULT_BLOCK),
        anchor_first=anchor_first,
        causal=causal,
        window_is_causal=window_is_causal,
    )
    reading.config.target_name = verifier_name(checkpoint)
    return reading
