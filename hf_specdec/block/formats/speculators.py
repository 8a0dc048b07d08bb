"""
The formats of the speculators library (vllm-project): "dflash", "dflash2" and "dspark" (for "peagle" see `peagle`).

The config contains the decoder layers' config (`transformer_layer_config`); layer ids are boundaries. The heads may
have a draft vocabulary, and then an lm_head of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...checkpoints.keys import Keys
from ...checkpoints.published import PublishedHead, section, verifier_name
from ...checkpoints.reading import Checkpoint
from ...checkpoints.target_files import TargetFiles
from ...checkpoints.writing import Writing, chain_proposals, check_expressible, published_layers, verifier_of
from .backbone import KIND, Backbone, causality, read_backbone
from .writing import (
    boundaries,
    check_dflash2,
    check_family,
    dflash2_options,
    dspark_options,
    weights_of,
    with_copies,
)


if TYPE_CHECKING:
    from ..modeling_block import BlockHead

NAME = "speculators"
DEFAULT_BLOCK = 8
_ARCHITECTURES = {
    "dflash": "DFlashSpeculator",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkSpeculator",
    "peagle": "PEagleDraftModel",
}


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


def write(head: BlockHead, target: TargetFiles | None = None) -> Writing:
    """
    The head as speculators saves heads of its kind. Full attention is never causal within a block there. A head with a
    draft vocabulary has an lm_head.

    Raises:
        ValueError: if the format cannot express the head, or needs the target.
    """
    config, kind = head.config, head.config.kind
    options = _peagle_options(head, target) if config.is_peagle else _dflash_options(head, target)
    layers = published_layers(config.text_config, head.dtype)
    weights = weights_of(head)
    if config.draft_vocab_size is not None:
        weights = with_copies(weights, head, target, NAME, "has_lm_head")
    differs = config.target_hidden_size != config.hidden_size
    fields = {
        "architectures": [_ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        "speculators_config": chain_proposals(kind, config.num_drafts, *verifier_of(config, target)),
        "transformer_layer_config": layers,
        "draft_vocab_size": config.num_draft_tokens,
        "mask_token_id": config.mask_token_id,
        "target_hidden_size": config.target_hidden_size if differs else None,
        "tie_word_embeddings": False,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
        **options,
    }
    return Writing(fields, weights)


def _dflash_options(head: BlockHead, target: TargetFiles | None) -> dict[str, Any]:
    config, kind = head.config, head.config.kind
    parts = {
        "dflash2": ("conv_kernel_size", "selector_rank"),
        "dspark": ("markov_rank", "has_confidence_head"),
    }.get(kind, ())
    check_family(config, NAME, causal=False, **{name: getattr(config, name) for name in parts})
    check_expressible(config.text_config, {"model_type": "qwen3"}, NAME)
    options: dict[str, Any] = {
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": boundaries(config, target, NAME),
        "sample_from_anchor": config.anchor_first,
        "sliding_window_non_causal": not config.window_is_causal,
    }
    if kind == "dflash2":
        check_dflash2(config, NAME)
        options |= dflash2_options(config)
    elif kind == "dspark":
        options |= dspark_options(config)
    return options


def _peagle_options(head: BlockHead, target: TargetFiles | None) -> dict[str, Any]:
    config = head.config
    check_family(config, NAME, is_peagle=True)
    check_expressible(config.text_config, {"model_type": ("llama", "qwen3")}, NAME)
    known = config.aux_layer_ids is not None or target is not None
    return {
        "eagle_aux_hidden_state_layer_ids": boundaries(config, target, NAME) if known else None,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "embed_requires_grad": config.has_embeddings,
    }
