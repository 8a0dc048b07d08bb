"""What the formats of EAGLE heads share when they are written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...checkpoints.target_files import TargetFiles
from ...checkpoints.writing import t2d_of
from ..configuration_eagle import EagleConfig


if TYPE_CHECKING:
    from ..modeling_eagle import EagleHead


# Fields in which EAGLE-3 heads differ, with the values that every EAGLE-3 format can express.
PLAIN_EAGLE3 = {
    "eagle_version": 3,
    "has_fc": True,
    "fc_bias": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_before_residual": False,
    "norm_hidden_twice": False,
    "norm_embeddings": True,
    "norm_output": False,
    "final_norm": True,
}
PLAIN_LAYERS = {"model_type": ("llama",), "attention_bias": (False,), "mlp_bias": (False,), "sliding_window": (None,)}


def boundaries(config: EagleConfig, target: TargetFiles | None) -> list[int] | None:
    """
    The hidden states that an EAGLE-3 head reads, as boundaries; None: the default ones of an unknown target.

    Raises:
        ValueError: if the number of the target's layers has to be known.
    """
    if config.aux_layer_ids is None:
        return None
    if target is not None:
        return config.aux_boundaries(target.num_layers)
    if config.aux_layer_convention == "auto":
        raise ValueError(
            f"`aux_layer_ids`={config.aux_layer_ids}: whether these are boundaries or layer outputs depends on the "
            "target. Give it (`--target`), or load the head with `aux_layer_convention=`."
        )
    shift = 1 if config.aux_layer_convention == "outputs" else 0
    return sorted(layer + shift for layer in config.aux_layer_ids)


def eagle3_weights(
    head: EagleHead, target: TargetFiles | None, first_layer: str, format: str
) -> dict[str, torch.Tensor]:
    """
    The weights of an EAGLE-3 head, with `t2d` beside `d2t`, and an lm_head in any case.

    Args:
        first_layer (`str`): the prefix of the first decoder layer's names.

    Raises:
        ValueError: if the head uses the target's lm_head, and there is no target.
    """
    weights = {
        first_layer + key.removeprefix("layers.0.") if key.startswith("layers.0.") else key: tensor.detach().cpu()
        for key, tensor in head.state_dict().items()
    }
    if head.lm_head is None:
        if target is None:
            raise ValueError(
                f"The head uses the target's lm_head, which the format {format} stores. Give the target (`--target`)."
            )
        rows = target.lm_head().to(head.dtype)
        weights["lm_head.weight"] = rows if head.target_ids is None else rows[head.target_ids.cpu()]
    if head.target_ids is not None:
        weights["t2d"] = t2d_of(head.target_ids, head.config.vocab_size)
    return weights
