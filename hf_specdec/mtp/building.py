"""The decoder layer of an MTP module, by the target's own class."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .longcat import build_half, has_half_layer


def layer_types_of(config: PreTrainedConfig, num_modules: int) -> list[str] | None:
    """
    The kind of every module's layer, for targets whose layers are of several kinds; None for others. Where the config
    does not say it: that of MiMo-V2's and Mellum's modules is sliding attention, else full attention, if the target
    has any.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return None
    named = getattr(config, "mtp_layer_types", None) or []
    if config.model_type.startswith(("mimo_v2", "mellum")) and "sliding_attention" in kinds:
        usual = "sliding_attention"
    else:
        usual = "full_attention" if "full_attention" in kinds else kinds[-1]
    return [named[index] if index < len(named) else usual for index in range(num_modules)]


def config_of_layers(config: PreTrainedConfig, kinds: list[str] | None, is_sparse: list[bool]) -> PreTrainedConfig:
    """
    A target's text config with other decoder layers.

    Args:
        config (`PreTrainedConfig`): the config.
        kinds (`list[str]`, *optional*): their kinds; see `layer_types_of`.
        is_sparse (`list[bool]`): whether each is a mixture of experts.
    """
    number, changed = len(is_sparse), copy.deepcopy(config)
    overrides = _overrides(config, kinds)
    changed.num_hidden_layers = number
    if hasattr(changed, "num_layers"):  # of LongCat-Flash, which counts attentions
        changed.num_layers = number
    if kinds is not None:
        changed.layer_types = list(kinds)
    sparse = all(is_sparse)
    fields: dict[str, Any] = {
        "mlp_layer_types": ["sparse" if one else "dense" for one in is_sparse],
        "first_k_dense_replace": 0 if sparse else number,
        "mlp_only_layers": [] if sparse else list(range(number)),
        "decoder_sparse_step": 1,
        "moe_layer_start_index": 0 if sparse else number,
        "moe_layer_end_index": number - 1,
        "moe_layer_interval": 1,
        "num_nextn_predict_layers": 0,
        "swiglu_limits": None,
        "swiglu_limits_shared": None,
    }
    for field, value in fields.items():
        if hasattr(changed, field):
            setattr(changed, field, value)
    if config.is_heterogeneous:
        changed.per_layer_config = overrides
    return changed


def _overrides(config: PreTrainedConfig, kinds: list[str] | None) -> dict[int, dict[str, Any]] | None:
    """What differs in the layers of a config, for layers of these kinds: that of the last layer of the same kind."""
    if not config.is_heterogeneous or kinds is None:
        return None
    held = config.per_layer_attributes if hasattr(config, "per_layer_attributes") else set()
    last = {kind: index for index, kind in enumerate(config.layer_types)}
    return {
        index: {name: getattr(config.per_layer_config[last[kind]], name) for name in held}
        for index, kind in enumerate(kinds)
        if kind in last
    }


def is_sparse(names: list[str]) -> bool:
    """Whether the tensors of a decoder layer, by their names, are those of a mixture of experts."""
    return any(".experts." in f".{name}" or name.startswith(("mlp.gate.", "moe.")) for name in names)


def _with_joined_experts(layer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a layer as Step's class has them, where both inputs of its experts are stacked apart."""
    parts = [layer.get(f"moe.{name}_proj.weight") for name in ("gate", "up")]
    held = [part for part in parts if part is not None]
    if len(held) < len(parts):
        return layer
    kept = {name: tensor for name, tensor in layer.items() if not name.startswith("moe.")}
    return kept | {"mlp.experts.gate_up_proj": torch.cat(held, dim=1)}


def build_block(
    target: PreTrainedModel,
    config: PreTrainedConfig,
    index: int,
    layer: dict[str, torch.Tensor],
    norm: torch.Tensor | None,
    dtype: torch.dtype,
) -> PreTrainedModel:
    """
    The target's decoder with one layer and no embeddings, which maps the outputs of a module's projection to those of
    its last norm.

    Args:
        target (`PreTrainedModel`): the target.
        config (`PreTrainedConfig`): the config of all modules' layers.
        index (`int`): the number of the module, which is that of its layer in the cache.
        layer (`dict[str, torch.Tensor]`): the layer's tensors.
        norm (`torch.Tensor`, *optional*): weight of the norm after the layer; None if there is none.
        dtype (`torch.dtype`): dtype of the weights.

    Raises:
        ValueError: if the tensors are not those of such a layer.
    """
    kind: Any = type(target.get_decoder())
    kinds = getattr(config, "layer_types", None)
    mlps = getattr(config, "mlp_layer_types", None)
    sparse = is_sparse(list(layer))
    own = config_of_layers(config, None if kinds is None else [kinds[index]], [sparse])
    if mlps is not None:
        own.mlp_layer_types = ["sparse" if sparse else "dense"]
    own.vocab_size, own.pad_token_id = 1, 0
    weights = {f"layers.0.{name}": tensor for name, tensor in _with_joined_experts(layer).items()}
    weights["norm.weight"] = torch.ones(own.hidden_size, device="cpu") if norm is None else norm
    weights["embed_tokens.weight"] = torch.zeros(1, own.hidden_size, device="cpu")
    if has_half_layer(kind, set(layer)):
        block, found = build_half(kind, own, weights, dtype)
    else:
        with torch.random.fork_rng(devices=[]):  # what is missing is drawn, before it is refused
            block, found = kind.from_pretrained(
                None,
                config=own,
                state_dict=weights,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    problems = [f"`{key}` is missing" for key in sorted(found["missing_keys"])]
    problems += [f"`{key}` is unknown" for key in sorted(found["unexpected_keys"])]
    problems += [f"`{key}` has shape {tuple(held)}, not {tuple(own)}" for key, held, own in found["mismatched_keys"]]
    if problems:
        raise ValueError(
            f"{target.name_or_path}: MTP module {index} does not hold a layer of {kind.__name__}: "
            f"{'; '.join(problems)}. Use a checkpoint that this release of transformers knows."
        )
    if norm is None:
        block.norm = nn.Identity()
    del block.embed_tokens
    if kinds is not None:  # asked for by the layer's number, and by its place in the block
        block.config.layer_types = [kinds[index]] * (index + 1)
    for module in block.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.layer_idx += index
    return block
