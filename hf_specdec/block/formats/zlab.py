"""
The format of z-lab/dflash: DFlash, DFlash 2, and JetSpec, whose heads are DFlash heads with a causal block.

The config is that of a Qwen3 model with `block_size` and an object `dflash_config`; layer ids count outputs of layers.
SpecForge writes the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...checkpoints.keys import Keys
from ...checkpoints.layer_fields import windows_of
from ...checkpoints.published import PublishedHead, section
from ...checkpoints.reading import Checkpoint
from ...checkpoints.target_files import TargetFiles
from ...checkpoints.writing import Writing, check_expressible, published_layers
from .backbone import KIND, Backbone, causality, read_backbone
from .writing import boundaries, check_dflash2, check_family, dflash2_options, outputs, weights_of


if TYPE_CHECKING:
    from ..modeling_block import BlockHead

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


def write(head: BlockHead, target: TargetFiles | None = None) -> Writing:
    """
    The head as z-lab publishes heads, which share embeddings and lm_head with the target; JetSpec's are written so
    too.

    Raises:
        ValueError: if the format cannot express the head.
    """
    config, layers = head.config, head.config.text_config
    is_dflash2 = config.kind == "dflash2"
    known: dict[str, Any] = {"anchor_first": False, "has_embeddings": False, "has_lm_head": False}
    known |= {"draft_vocab_size": None}
    scales = ("embedding_scale", "output_multiplier", "final_logit_softcapping")
    if is_dflash2:
        parts = ("conv_kernel_size", "selector_rank")
        known |= {name: getattr(config, name) for name in (*parts, *scales)}
    check_family(config, NAME, **known)
    check_expressible(layers, {"model_type": "qwen3"}, NAME)
    options: dict[str, Any] = {"mask_token_id": config.mask_token_id}
    if config.aux_layer_ids is not None or target is not None:
        read = boundaries(config, target, NAME)
        options["target_layer_ids"] = outputs(read, NAME, knows_embeddings=False)
    if config.causal:
        options["causal_head"] = True
    elif any(windows_of(layers)) and not config.window_is_causal:
        options["is_causal"] = False
    if is_dflash2:
        check_dflash2(config, NAME)
        options |= dflash2_options(config) | {
            "input_embedding_scale": config.embedding_scale,
            "output_multiplier": config.output_multiplier,
            "final_logit_softcapping": config.final_logit_softcapping,
        }
    fields: dict[str, Any] = {"architectures": ["DFlash2DraftModel" if is_dflash2 else "DFlashDraftModel"]}
    fields |= published_layers(layers, head.dtype)
    fields |= {"block_size": config.block_size, "dflash_config": options}
    if (depth := config.num_target_layers if target is None else target.num_layers) is not None:
        fields["num_target_layers"] = depth
    if config.target_hidden_size != config.hidden_size:
        fields["target_hidden_size"] = config.target_hidden_size
    return Writing(fields, weights_of(head))
