"""
The format of z-lab/dflash: DFlash, DFlash 2, and JetSpec, whose heads are DFlash heads with a causal block.

The config is that of a Qwen3 model with `block_size` and an object `dflash_config`; layer ids count outputs of layers.
SpecForge writes the same.
"""

from __future__ import annotations

from ...checkpoints.keys import Keys
from ...checkpoints.published import PublishedHead, section
from ...checkpoints.reading import Checkpoint
from .backbone import KIND, Backbone, causality, read_backbone


NAME = "zlab"
DEFAULT_BLOCK = 16


def read(checkpoint: Checkpoint) -> PublishedHead:
    """
    Reads a DFlash, DFlash 2 or JetSpec head.

    Raises:
        ValueError: if the head is of another kind, or a value is missing or impossible.
    """
    published = checkpoint.config
    options = section(published, "dflash_config", checkpoint.name)
    kind = options.get("projector_type")
    if kind not in (None, "dflash", "dflash2"):
        raise ValueError(
            f"{checkpoint.name}: `projector_type`={kind!r} in `dflash_config` of config.json is unknown; known are "
            "'dflash', 'dflash2' and 'dspark'."
        )
    keys = Keys(checkpoint, kind=KIND)
    reasons: dict[str, str] = {"anchor_first": "always so in this format"}
    is_dflash2 = any(key.startswith(("candidate_selector.", "layers.0.attention_conv.")) for key in keys.weights)
    backbone = Backbone(
        keys=keys,
        published=published,
        layers=published,
        options=options,
        layer_ids=options.get("target_layer_ids", published.get("target_layer_ids")),
        ids_are_outputs=True,
        reasons=reasons,
    )
    causal, window_is_causal = causality(backbone, window_is_causal=not is_dflash2)
    return read_backbone(
        backbone,
        f"{NAME}_{'dflash2' if is_dflash2 else 'jetspec' if causal else 'dflash'}",
        block_size=backbone.value("block_size", DEFAULT_BLOCK),
        anchor_first=False,
        causal=causal,
        window_is_causal=window_is_causal,
    )
