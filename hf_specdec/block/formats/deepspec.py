"""
The format of deepseek-ai/DeepSpec: DSpark heads on Qwen3 or Gemma 4 layers, and its DFlash heads, which are DSpark
heads without a Markov head. Row 0, the anchor's, predicts the next token in all of them.

All options stand beside the fields of the layers; layer ids count outputs of layers, and -1 is the embedding. The
heads have embeddings and an lm_head of their own; Gemma 4 scales its embeddings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...checkpoints.keys import Keys
from ...checkpoints.layer_fields import windows_of
from ...checkpoints.published import PublishedHead
from ...checkpoints.reading import Checkpoint
from ...checkpoints.target_files import TargetFiles
from ...checkpoints.writing import Writing, check_expressible, published_layers
from .backbone import KIND, Backbone, causality, read_backbone
from .gemma import gemma_layer_config
from .writing import boundaries, check_family, dspark_options, outputs, weights_of, with_copies


if TYPE_CHECKING:
    from ..modeling_block import BlockHead

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


def write(head: BlockHead, target: TargetFiles | None = None) -> Writing:
    """
    The head as DeepSpec publishes heads, with embeddings and an lm_head. DeepSpec's blocks are never causal, and its
    heads have no sliding windows.

    Raises:
        ValueError: if the format cannot express the head, or needs the target.
    """
    config, layers = head.config, head.config.text_config
    is_gemma = layers.model_type == "gemma4_text"
    known: dict[str, Any] = {name: getattr(config, name) for name in ("markov_rank", "has_confidence_head")}
    known |= {"anchor_first": True, "causal": False, "draft_vocab_size": None}
    if is_gemma:
        known["embedding_scale"] = float(config.hidden_size) ** 0.5
        known["final_logit_softcapping"] = config.final_logit_softcapping
    check_family(config, NAME, **known)
    check_expressible(layers, {"model_type": ("qwen3", "gemma4_text")}, NAME)
    if any(windows_of(layers)):
        check_expressible(layers, {"sliding_window": None}, NAME)
    read = boundaries(config, target, NAME)
    if target is not None and target.num_layers in read:
        raise ValueError(
            f"`aux_layer_ids`={read}: the format {NAME} cannot say so; its heads do not read the output of the last "
            "layer. Write it as speculators or hf_specdec."
        )
    dtype = str(head.dtype).removeprefix("torch.")
    fields = layers.to_dict() | {"dtype": dtype} if is_gemma else published_layers(layers, head.dtype)
    fields |= {
        "architectures": [_GEMMA if is_gemma else _QWEN],
        "block_size": config.block_size,
        "target_layer_ids": outputs(read, NAME, knows_embeddings=True),
        "mask_token_id": config.mask_token_id,
        **dspark_options(config),
    }
    if (depth := config.num_target_layers if target is None else target.num_layers) is not None:
        fields["num_target_layers"] = depth
    if config.final_logit_softcapping is not None:
        fields["final_logit_softcapping"] = config.final_logit_softcapping
    if config.target_hidden_size != config.hidden_size:
        fields["target_hidden_size"] = config.target_hidden_size
    return Writing(fields, with_copies(weights_of(head), head, target, NAME, "has_embeddings", "has_lm_head"))
