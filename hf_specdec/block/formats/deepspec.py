"""
The format of deepseek-ai/DeepSpec: DSpark heads on Qwen3 or Gemma 4 layers, and its DFlash heads, which are DSpark
heads without a Markov head. Row 0, the anchor's, predicts the next token in all of them.

All options stand beside the fields of the layers; layer ids count outputs of layers, and -1 is the embedding. The
heads have embeddings and an lm_head of their own; Gemma 4 scales its embeddings.
"""

from __future__ import annotations

from ...checkpoints.keys import Keys
from ...checkpoints.published import PublishedHead
from ...checkpoints.reading import Checkpoint
from .backbone import KIND, Backbone, causality, read_backbone
from .gemma import gemma_layer_config


NAME = "deepspec"
DEFAULT_BLOCK = 7
_GEMMA, _QWEN = "Gemma4DSparkModel", "Qwen3DSparkModel"


def matches(checkpoint: Checkpoint) -> bool:
    """Whether the config names one of DeepSpec's architectures."""
    return any(name in (checkpoint.config.get("architectures") or ()) for name in (_GEMMA, _QWEN))


def read(checkpoint: Checkpoint) -> PublishedHead:
    """
    Reads a DSpark or DFlash head of DeepSpec.

    Raises:
        ValueError: if a value is missing or impossible.
    """
    published = checkpoint.config
    is_gemma = _GEMMA in published["architectures"]
    backbone = Backbone(
        keys=Keys(checkpoint, kind=KIND),
        published=published,
        layers=published,
        options=published,
        layer_ids=published.get("target_layer_ids"),
        ids_are_outputs=True,
        reasons={"anchor_first": "always so in this format"},
        layer_config=gemma_layer_config if is_gemma else None,
    )
    causal, window_is_causal = causality(backbone)
    fields = {}
    if is_gemma:
        fields["embedding_scale"] = float(backbone.keys.shape("fc.weight")[0]) ** 0.5
    return read_backbone(
        backbone,
        NAME,
        block_size=backbone.value("block_size", DEFAULT_BLOCK),
        anchor_first=True,
        causal=causal,
        window_is_causal=window_is_causal,
        **fields,
    )
