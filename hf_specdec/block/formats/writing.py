"""What the formats of block heads share when they are written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...checkpoints.carried import compared_fields
from ...checkpoints.layer_fields import windows_of
from ...checkpoints.target_files import TargetFiles
from ...checkpoints.writing import check_expressible, t2d_of
from ..configuration_block import BlockConfig


if TYPE_CHECKING:
    from ..modeling_block import BlockHead

PLAIN = {
    "is_peagle": False,
    "has_mask_embedding": False,
    "markov_rank": 0,
    "has_confidence_head": False,
    "conv_kernel_size": 0,
    "selector_rank": 0,
    "embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}
"""Fields in which block heads differ, with the values of a DFlash head."""

_COMPARED_ELSEWHERE = ("text_config", "aux_layer_ids", "has_embeddings", "has_lm_head")
_ABOUT_READING = ("source_format", "reasons")


def compared_with(config: BlockConfig, target: TargetFiles | None) -> dict[str, Any]:
    """What must be equal before and after, by name and in one spelling; fields that decide nothing are left out."""
    given = () if target is None else ("target_name", "num_target_layers")  # which are the given target's afterwards
    fields = compared_fields(config, (*_COMPARED_ELSEWHERE, *_ABOUT_READING, *given))
    fields["aux_layer_ids"] = config.aux_layer_ids if target is None else config.aux_boundaries(target.num_layers)
    idle = {
        "markov_type": not config.markov_rank,
        "conv_group_size": not config.conv_kernel_size,
        "selector_top_k": not config.selector_rank,
        "window_from_anchor": not any(windows_of(config.text_config)),
        "mask_token_id": config.has_mask_embedding,
        "window_is_causal": config.is_peagle or config.causal or not any(windows_of(config.text_config)),
        "causal": config.is_peagle,
        "anchor_first": config.is_peagle,
    }
    return {name: None if idle.get(name) else value for name, value in fields.items()}


def boundaries(config: BlockConfig, target: TargetFiles | None, format: str) -> list[int]:
    """
    The hidden states that the head reads, as boundaries, for formats that name them in any case.

    Raises:
        ValueError: if the number of the target's layers has to be known.
    """
    if target is not None:
        return config.aux_boundaries(target.num_layers)
    if config.aux_layer_ids is None:
        raise ValueError(
            f"`aux_layer_ids`=None: the layers are spread over the target's, and the format {format} names them. Give "
            "the target (`--target`)."
        )
    return sorted(config.aux_layer_ids)


def outputs(layers: list[int], format: str, knows_embeddings: bool) -> list[int]:
    """
    Boundaries as numbers of layers whose outputs they are; -1 stands for the embeddings.

    Raises:
        ValueError: if the format does not know these.
    """
    if 0 in layers and not knows_embeddings:
        raise ValueError(
            f"`aux_layer_ids`={layers}: the format {format} cannot say so; it knows outputs of layers, and boundary 0 "
            "is the embeddings. Write it as speculators or hf_specdec."
        )
    return [layer - 1 for layer in layers]


def check_family(config: BlockConfig, format: str, **allowed: Any) -> None:
    """
    Checks that a format knows all that a head has.

    Args:
        allowed: the values of fields that the format can express; those of `PLAIN` where it says nothing.

    Raises:
        ValueError: naming the first field with another value.
    """
    check_expressible(config, PLAIN | allowed, format)


def check_dflash2(config: BlockConfig, format: str) -> None:
    """
    Checks that a head has both parts of DFlash 2, which no format describes apart.

    Raises:
        ValueError: if one of them is missing.
    """
    for name in ("conv_kernel_size", "selector_rank"):
        if not getattr(config, name):
            raise ValueError(
                f"`{name}`=0: the format {format} cannot say so; heads of DFlash 2 have convolutions and a selector. "
                "Write it as hf_specdec."
            )


def dflash2_options(config: BlockConfig) -> dict[str, int]:
    """Sizes of the convolutions and the selector, under the names of the formats."""
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    return {name: getattr(config, name) for name in names}


def dspark_options(config: BlockConfig) -> dict[str, Any]:
    """What Markov and confidence head are, under the names of the formats."""
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_type,
        "enable_confidence_head": config.has_confidence_head,
        "confidence_head_with_markov": config.confidence_with_markov,
    }


def weights_of(head: BlockHead) -> dict[str, torch.Tensor]:
    """The head's tensors on the CPU, with `t2d` beside `d2t`."""
    weights = {key: tensor.detach().cpu() for key, tensor in head.state_dict().items()}
    if head.target_ids is not None:
        weights["t2d"] = t2d_of(head.target_ids, head.config.vocab_size)
    return weights


def with_copies(
    weights: dict[str, torch.Tensor], head: BlockHead, target: TargetFiles | None, format: str, *fields: str
) -> dict[str, torch.Tensor]:
    """
    The weights with copies of the target's embeddings or lm_head, where `fields` (`has_embeddings`, `has_lm_head`)
    name what the format stores and the head shares.

    Raises:
        ValueError: if there is no target to copy them from.
    """
    for field in fields:
        if getattr(head.config, field):
            continue
        name = field.removeprefix("has_")
        if target is None:
            raise ValueError(
                f"The head uses the target's {name}, which the format {format} stores. Give the target (`--target`)."
            )
        if field == "has_embeddings":
            weights["embed_tokens.weight"] = target.embeddings().to(head.dtype)
        else:
            rows = target.lm_head().to(head.dtype)
            weights["lm_head.weight"] = rows if head.target_ids is None else rows[head.target_ids.cpu()]
    return weights
