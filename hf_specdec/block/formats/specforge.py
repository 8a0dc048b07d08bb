"""
The format of SpecForge (sgl-project) for DSpark heads: z-lab's, with the options of Markov and confidence head in
`dflash_config`. Row 0, the anchor's, predicts the next token: the heads are trained so, whatever SpecForge's own
`spec_generate` does with them.
"""

from __future__ import annotations

from ...checkpoints.keys import Keys
from ...checkpoints.published import PublishedHead, section
from ...checkpoints.reading import Checkpoint
from .backbone import KIND, Backbone, causality, read_backbone
from .zlab import DEFAULT_BLOCK


NAME = "specforge_dspark"
_OLD_PREFIX = "logit_head."


def matches(checkpoint: Checkpoint) -> bool:
    """Whether the config names SpecForge's DSpark, or the weights are those of DSpark in z-lab's format."""
    options = checkpoint.config.get("dflash_config")
    names = (isinstance(options, dict) and options.get("projector_type") == "dspark") or (
        "DSparkDraftModel" in (checkpoint.config.get("architectures") or ())
    )
    plain = (key.removeprefix(_OLD_PREFIX) for key in checkpoint.weights)
    return bool(names) or any(key.startswith(("markov_head.", "confidence_head.")) for key in plain)


def read(checkpoint: Checkpoint) -> PublishedHead:
    """
    Reads a DSpark head of SpecForge.

    Raises:
        ValueError: if a value is missing or impossible.
    """
    published = checkpoint.config
    options = section(published, "dflash_config", checkpoint.name)
    backbone = Backbone(
        keys=Keys(checkpoint, {_OLD_PREFIX: ""}, kind=KIND),
        published=published,
        layers=published,
        options=options,
        layer_ids=options.get("target_layer_ids", published.get("target_layer_ids")),
        ids_are_outputs=True,
        reasons={"anchor_first": "the format's heads are trained so"},
    )
    causal, window_is_causal = causality(backbone)
    return read_backbone(
        backbone,
        NAME,
        block_size=backbone.value("block_size", DEFAULT_BLOCK),
        anchor_first=True,
        causal=causal,
        window_is_causal=window_is_causal,
    )
