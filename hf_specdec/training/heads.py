"""New EAGLE heads for a target, config and initial weights; and what new heads of all kinds take of the target."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..eagle import EagleConfig, EagleHead
from ..models.structure import config_of_layer, num_logits_of
from ..trees import DynamicTree
from .vocabulary import offsets


logger = logging.get_logger(__name__)

Head = TypeVar("Head", bound=Any)

# Default tree of a new head, as deep as the unrolled steps; few enough nodes that a forward costs hardly more than a
# forward of a single token.
_DEFAULT_TREE = {"top_k": 6, "num_nodes": 24}


def new_head_config(
    target: PreTrainedModel,
    *,
    version: int = 3,
    target_name: str | None = None,
    draft_vocab_size: int | None = None,
    shares_lm_head: bool = False,
    num_layers: int = 1,
    intermediate_size: int | None = None,
    aux_layer_ids: list[int] | None = None,
    depth: int = 7,
) -> EagleConfig:
    """
    The config of a new head: "llama" layers, as wide as the target (whose embeddings the head reads), with the
    target's attention heads, and plain rotary embeddings with theta 10000.

    Args:
        target (`PreTrainedModel`): the target of the head.
        version (`int`, *optional*, defaults to 3): EAGLE version, 1 or 3.
        target_name (`str`, *optional*): name of the target, recorded in the config.
        draft_vocab_size (`int`, *optional*): Vd, for version 3.
        shares_lm_head (`bool`, *optional*, defaults to `False`): version 3: use the target's lm_head instead of a
            trained and stored one.
        num_layers (`int`, *optional*, defaults to 1): decoder layers of the head.
        intermediate_size (`int`, *optional*): width of the head's MLP; defaults to the target's.
        aux_layer_ids (`list[int]`, *optional*): version 3: boundaries to read; defaults to [2, L // 2, L − 3], or for
            targets of less than 7 layers to [1, L // 2, L − 1] without repetition.
        depth (`int`, *optional*, defaults to 7): levels of the default tree.

    Raises:
        ValueError: for hidden states that the target does not have, or a target whose embeddings and hidden states
            differ in width.
    """
    source = target.config.get_text_config(decoder=True)
    text_config = layers_like(target, "llama", num_layers, intermediate_size)
    layers = source.num_hidden_layers
    if version == 3 and aux_layer_ids is None:
        default = [2, layers // 2, layers - 3] if layers >= 7 else [1, layers // 2, layers - 1]
        aux_layer_ids = sorted({max(boundary, 0) for boundary in default})
    tree = (
        DynamicTree(depth=max(depth, 1), **_DEFAULT_TREE) if depth > 1 else DynamicTree(depth=1, top_k=4, num_nodes=4)
    )
    config = EagleConfig(
        text_config=text_config,
        eagle_version=version,
        target_hidden_size=source.hidden_size,
        aux_layer_ids=aux_layer_ids if version == 3 else None,
        draft_vocab_size=draft_vocab_size if version == 3 else None,
        has_lm_head=version == 3 and not shares_lm_head,
        fc_bias=version == 1,
        default_tree=tree.to_dict(),
        target_name=target_name,
    )
    config.aux_boundaries(layers)  # raises for hidden states that the target does not have
    return config


def layers_like(
    target: PreTrainedModel, model_type: str, num_layers: int, intermediate_size: int | None = None
) -> dict[str, Any]:
    """
    A head's `text_config`: layers as wide as the target, with its attention heads.

    Raises:
        ValueError: for a target whose embeddings and hidden states differ in width.
    """
    source = target.config.get_text_config(decoder=True)
    embeddings = target.get_input_embeddings().weight
    hidden_size, of_layer = source.hidden_size, config_of_layer(source)
    heads = of_layer.num_attention_heads
    if embeddings.shape[1] != hidden_size:
        raise ValueError(
            f"`target`: its embeddings are {embeddings.shape[1]} wide, its hidden states {hidden_size}. A new head "
            "reads both as they are; such targets cannot be trained for yet."
        )
    return {
        "model_type": model_type,
        "vocab_size": num_logits_of(target),
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size or getattr(source, "intermediate_size", None) or 4 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(of_layer, "num_key_value_heads", None) or heads,
        "head_dim": getattr(of_layer, "head_dim", None) or hidden_size // heads,
        "max_position_embeddings": getattr(source, "max_position_embeddings", 2048),
        "rms_norm_eps": getattr(source, "rms_norm_eps", 1e-5),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def new_head(target: PreTrainedModel, config: EagleConfig, token_ids: torch.Tensor | None = None) -> EagleHead:
    """
    A new head in float32 on the target's device; its lm_head and final norm start from the target's, the rest is
    random.

    Args:
        target (`PreTrainedModel`): the target of the head.
        config (`EagleConfig`): config of the head, see `new_head_config`.
        token_ids (`torch.Tensor` of shape `[draft vocab]`, int64, *optional*): the draft vocabulary, ascending.
    """
    with torch.device("cpu"):
        head = EagleHead(config).float()
    return begun_from(target, head, token_ids)


@torch.no_grad()
def begun_from(target: PreTrainedModel, head: Head, token_ids: torch.Tensor | None) -> Head:
    """
    A random head on the target's device, with the target's final norm, the draft vocabulary `token_ids` (see
    `new_head`), and the target's lm_head if it has one of its own.
    """
    if token_ids is not None:
        head.d2t.copy_(offsets(token_ids))
    if head.lm_head is not None:
        rows = target.get_output_embeddings().weight
        head.lm_head.weight.copy_(rows if token_ids is None else rows[token_ids.to(rows.device)])
    copy_norm(getattr(target.get_decoder(), "norm", None), head.norm)
    return head.to(target.device)


@torch.no_grad()
def copy_norm(source: Any, destination: Any) -> None:
    """Copies the weights of an RMS norm; keeps the destination's ones if the source computes another kind of norm."""
    if source is None or destination is None or getattr(source, "weight", None) is None:
        return
    if source.weight.shape != destination.weight.shape:
        return
    before = destination.weight.clone()
    destination.weight.copy_(source.weight)
    trial = torch.randn(4, len(before), generator=torch.Generator().manual_seed(0), device="cpu")
    expected = source(trial.to(source.weight)).float().cpu()
    if not torch.allclose(destination(trial).float(), expected, rtol=0.05, atol=0.05 * float(expected.std())):
        destination.weight.copy_(before)
        logger.info("The final norm of the target is no plain RMS norm: that of the head begins with ones.")
