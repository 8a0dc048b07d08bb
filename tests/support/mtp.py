"""Tiny checkpoints with MTP modules, named as every family publishes them, and what the modules compute."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from .hybrids import DELTA, is_known
from .models import MLA


Rename = Callable[[str, int, int], str | None]
"""
From the name of a tensor in a layer of the target, the number of the module and the target's layers, its name; None if
a module has none such.
"""


def _whole(layer: nn.Module) -> nn.Module:
    return layer


@dataclass(frozen=True, kw_only=True)
class Family:
    """
    How a family publishes its modules.

    Args:
        config (`dict`): values of the target's config that differ from the small default; lists that have a value for
            each layer go on with one for each module.
        lists (`tuple[str]`): the names of such lists.
        count (`int`): the number of modules.
        names (`dict[str, str]`): for `fc`, `enorm`, `hnorm` and `norm` their names, with `{module}` and `{layer}`.
        rename (`Callable`): gives the name of a layer's tensor.
        hidden_first (`bool`): whether `fc` reads the hidden state first.
        copies (`tuple[str]`): names of copies of the target's own tensors.
        declared (`str`, *optional*): the field that says how many values of `lists` are those of modules.
        layer (`Callable`): makes a module's layer from one of the target.
    """

    config: dict[str, Any]
    lists: tuple[str, ...] = ()
    count: int = 1
    names: dict[str, str]
    rename: Rename
    hidden_first: bool = False
    copies: tuple[str, ...] = ()
    declared: str | None = None
    layer: Callable[[Any], nn.Module] = _whole


def _under(prefix: str, name: str, module: int, layers: int, **replaced: str) -> str:
    for before, after in replaced.items():
        name = name.replace(before, after)
    return prefix.format(module=module, layer=layers + module) + name


class Half(nn.Module):
    """One attention and one dense MLP of a layer that has two of each."""

    def __init__(self, layer: Any):
        super().__init__()
        self.whole = layer

    def forward(self, states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        whole = self.whole
        states = states + whole.self_attn[0](whole.input_layernorm[0](states), **kwargs)[0]
        return states + whole.mlps[0](whole.post_attention_layernorm[0](states))


def _half(name: str, module: int, layers: int) -> str | None:
    kind, _, rest = name.partition(".0.")
    if not rest or kind not in ("self_attn", "mlps", "input_layernorm", "post_attention_layernorm"):
        return None
    return f"model.mtp.layers.0.{'transformer_layer.mlp' if kind == 'mlps' else kind}.{rest}"


NEXTN = {
    "names": {
        "fc": "model.layers.{layer}.eh_proj",
        "enorm": "model.layers.{layer}.enorm",
        "hnorm": "model.layers.{layer}.hnorm",
        "norm": "model.layers.{layer}.shared_head.norm",
    },
    "rename": partial(_under, "model.layers.{layer}."),
    "copies": ("model.layers.{layer}.embed_tokens.weight", "model.layers.{layer}.shared_head.head.weight"),
}
QWEN = {
    "names": {
        "fc": "mtp.fc",
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "norm": "mtp.norm",
    },
    "rename": partial(_under, "mtp.layers.{module}."),
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
_DELTA = DELTA | {
    "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
}
_MLPS = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
FAMILIES: dict[str, Family] = {
    "qwen3_next": Family(config=_DELTA | _EXPERTS, lists=("layer_types",), **QWEN),
    "qwen3_5_moe_text": Family(config=_DELTA | _EXPERTS, lists=("layer_types",), **QWEN),
    "exaone_moe": Family(
        config=_EXPERTS
        | _MLPS
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 12},
        lists=("layer_types", "mlp_layer_types"),
        **QWEN,
    ),
    "mellum": Family(
        config=_EXPERTS
        | _MLPS
        | {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 12,
            "num_mtp_layers": 1,
        },
        lists=("layer_types", "mlp_layer_types"),
        **QWEN,
    ),
    "deepseek_v3": Family(config=MLA | _EXPERTS | {"first_k_dense_replace": 1}, **NEXTN),
    "deepseek_v32": Family(
        config=MLA
        | _EXPERTS
        | {"first_k_dense_replace": 1, "index_topk": 6, "index_n_heads": 16, "index_head_dim": 8},
        **NEXTN,
    ),
    "glm4_moe": Family(config=_EXPERTS | {"first_k_dense_replace": 1}, count=2, **NEXTN),
    "glm4_moe_lite": Family(config=MLA | _EXPERTS | _MLPS, lists=("mlp_layer_types",), **NEXTN),
    "glm_moe_dsa": Family(
        config=MLA | _EXPERTS | _MLPS | {"index_topk": 6, "index_n_heads": 16, "index_head_dim": 8},
        lists=("mlp_layer_types",),
        **NEXTN,
    ),
    "hy_v3": Family(config=_EXPERTS | _MLPS, lists=("mlp_layer_types",), **NEXTN),
    "bailing_hybrid": Family(
        config=MLA
        | _EXPERTS
        | {"first_k_dense_replace": 1, "layer_types": ["linear_attention", "full_attention", "full_attention"]},
        lists=("layer_types",),
        **NEXTN,
    ),
    "mimo_v2_flash": Family(
        config=_EXPERTS
        | {
            "head_dim": 12,
            "v_head_dim": 8,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", *["sliding_attention"] * 4],
            "mlp_layer_types": ["dense", "sparse", *["dense"] * 3],
            "partial_rotary_factor": 0.34,
            "sliding_window": 12,
        },
        lists=("layer_types", "mlp_layer_types"),
        count=3,
        names={
            "fc": "model.mtp.layers.{module}.eh_proj",
            "enorm": "model.mtp.layers.{module}.enorm",
            "hnorm": "model.mtp.layers.{module}.hnorm",
            "norm": "model.mtp.layers.{module}.final_layernorm",
        },
        rename=partial(_under, "model.mtp.layers.{module}.", post_attention_layernorm="pre_mlp_layernorm"),
    ),
    # As text of an image-text model; more heads in layers with a window; its config splits padded lists.
    "step3p7": Family(
        config={
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "share_expert_dim": 16,
            "sliding_window": 12,
            "num_sliding_attention_heads": 6,
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        },
        lists=("layer_types", "mlp_layer_types"),
        count=2,
        declared="num_nextn_predict_layers",
        **NEXTN,
    ),
    "longcat_flash": Family(
        config=MLA
        | {
            "ffn_hidden_size": 48,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 16,
        },
        names={
            "fc": "model.mtp.layers.0.eh_proj",
            "enorm": "model.mtp.layers.0.enorm.m",
            "hnorm": "model.mtp.layers.0.hnorm.m",
            "norm": "model.mtp.norm",
        },
        rename=_half,
        layer=Half,
    ),
    "ernie4_5_moe": Family(
        config={
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": 16,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
            "use_bias": False,
        },
        names={"fc": "model.mtp_linear_proj.0", "enorm": "model.mtp_emb_norm.0", "hnorm": "model.mtp_hidden_norm.0"},
        rename=partial(_under, "model.mtp_block.0."),
    ),
}
"""The families whose module has a layer of the target's class."""
KNOWN = [family for family in FAMILIES if is_known(family)]
LAYERS = 2
_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Reference:
    """
    What a module computes, from the parts that its checkpoint was made of.

    Args:
        fc, enorm, hnorm (`nn.Module`): the module's own parts.
        base (`PreTrainedModel`): a decoder of the target's class with the module's layer and last norm.
        hidden_first (`bool`): whether `fc` reads the hidden state first.
    """

    fc: nn.Module
    enorm: nn.Module
    hnorm: nn.Module
    base: PreTrainedModel
    hidden_first: bool

    def __call__(self, states: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Outputs `[1, rows, H]` of rows at positions 0, 1, …."""
        parts = [self.enorm(embeddings), self.hnorm(states)]
        inputs = self.fc(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))
        return self.base(inputs_embeds=inputs, use_cache=False).last_hidden_state


def write_checkpoint(family: str, folder: Path, seed: int = 0, **changes: Any) -> list[Reference]:
    """
    Writes a checkpoint with modules: a target with further layers is saved, and its last ones get the modules' names.
    `changes`: values of its config.
    """
    known = FAMILIES[family]
    values = _SMALL | known.config | changes | _layers(family, LAYERS + known.count)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        big = _kind(family).from_config(_config(family, values), dtype=torch.float32).eval()
        references = [_reference(big, known, module) for module in range(known.count)]
    big.save_pretrained(folder)
    short: dict[str, Any] = {name: known.config[name][:LAYERS] for name in known.lists}
    if known.declared is not None:
        short = {known.declared: known.count}
    small = _config(family, values | short | _layers(family, LAYERS))
    small.architectures = [type(big).__name__]
    small.save_pretrained(folder)
    save_file(_published(load_file(folder / "model.safetensors"), known, references), folder / "model.safetensors")
    return references


def _layers(family: str, number: int) -> dict[str, int]:
    """The number of layers; of LongCat-Flash, each counts twice."""
    return {"num_layers": number} if family == "longcat_flash" else {"num_hidden_layers": number}


def _kind(family: str) -> Any:
    return AutoModelForImageTextToText if family == "step3p7" else AutoModelForCausalLM


def _config(family: str, values: dict[str, Any]) -> Any:
    if _kind(family) is AutoModelForCausalLM:
        return AutoConfig.for_model(family, **values)
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    return AutoConfig.for_model(family, text_config=values, vision_config=vision)


def _reference(big: PreTrainedModel, known: Family, module: int) -> Reference:
    """Also scales the weights of the model, which would hardly react to its input."""
    base: Any = big.get_decoder()
    size = base.config.hidden_size
    if module == 0:
        with torch.no_grad():
            for parameter in big.parameters():
                parameter.mul_(3.0) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    fc, enorm, hnorm, norm = nn.Linear(2 * size, size, bias=False), *(copy.deepcopy(base.norm) for _ in range(3))
    with torch.no_grad():
        for one in (enorm, hnorm, norm):
            one.weight.add_(torch.randn(size) * 0.2)
    own = copy.copy(base)
    own._modules = dict(base._modules)
    own.layers = nn.ModuleList([known.layer(base.layers[LAYERS + module])])
    own.norm = norm if "norm" in known.names else nn.Identity()
    own.config = copy.deepcopy(base.config)
    if hasattr(own.config, "num_layers"):
        own.config.num_layers = 1
    else:
        own.config.num_hidden_layers = 1
    for name in known.lists:
        setattr(own.config, name, [known.config[name][LAYERS + module]])
    if getattr(base.config, "layer_types", None) and "layer_types" not in known.lists:
        own.config.layer_types = [base.config.layer_types[LAYERS + module]]
    return Reference(fc, enorm, hnorm, own, known.hidden_first)


def _published(
    tensors: dict[str, torch.Tensor], known: Family, references: list[Reference]
) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        before, _, rest = name.partition("layers.")
        number, _, rest = rest.partition(".")
        if number.isdigit() and int(number) >= LAYERS:
            renamed = known.rename(rest, int(number) - LAYERS, LAYERS)
            if renamed is None:
                continue
            name = renamed
        found[name] = tensor
    for module, reference in enumerate(references):
        norms = {"fc": reference.fc, "enorm": reference.enorm, "hnorm": reference.hnorm, "norm": reference.base.norm}
        for part, name in known.names.items():
            found[name.format(module=module, layer=LAYERS + module) + ".weight"] = norms[part].weight.detach().clone()
        for name in known.copies:
            found[name.format(layer=LAYERS + module)] = torch.randn(4, 4)
    return {name: tensor.contiguous().clone() for name, tensor in found.items()}


def load_target(folder: Path) -> PreTrainedModel:
    """The target of a checkpoint, which leaves the modules out."""
    family = json.loads((folder / "config.json").read_text())["model_type"]
    return _kind(family).from_pretrained(folder, dtype=torch.float32).eval()
