"""Where the tensors of MTP modules stand in the checkpoints of their targets, family by family."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Layout:
    """
    The names of one family. In all names but `anchor`, `{base}` and `{index}` are what the groups of `anchor` matched.

    Args:
        families (`str`): who publishes so.
        anchor (`str`): a pattern for the weight of the projection, with a group `base`, and `index` where every module
            has one.
        fc, enorm, hnorm (`tuple[str]`): the projection of both inputs, and the norms of embedding and hidden state.
        norm (`tuple[str]`): the norm of the output; empty if there is none.
        layer (`str`): what the names of the decoder layer begin with.
        hidden_first (`bool`): whether the projection reads the hidden state first.
        example (`str`): the weight of the first projection, for messages; `{layers}` is the target's number of layers.
    """

    families: str
    anchor: str
    fc: tuple[str, ...]
    enorm: tuple[str, ...]
    hnorm: tuple[str, ...]
    norm: tuple[str, ...]
    layer: str
    hidden_first: bool = False
    example: str


LAYOUTS = (
    Layout(
        families="Qwen3-Next, Qwen3.5, EXAONE MoE, Mellum",
        anchor=r"(?P<base>(?:.+\.)?mtp\.)fc\.weight",
        fc=("{base}fc",),
        enorm=("{base}pre_fc_norm_embedding",),
        hnorm=("{base}pre_fc_norm_hidden",),
        norm=("{base}norm",),
        layer="{base}layers.{index}.",
        example="mtp.fc.weight",
    ),
    Layout(
        families="MiMo-V2, LongCat-Flash",
        anchor=r"(?P<base>(?:.+\.)?mtp\.)layers\.(?P<index>\d+)\.eh_proj\.weight",
        fc=("{base}layers.{index}.eh_proj",),
        enorm=("{base}layers.{index}.enorm", "{base}layers.{index}.enorm.m"),
        hnorm=("{base}layers.{index}.hnorm", "{base}layers.{index}.hnorm.m"),
        norm=("{base}layers.{index}.final_layernorm", "{base}norm"),
        layer="{base}layers.{index}.",
        example="model.mtp.layers.0.eh_proj.weight",
    ),
    Layout(
        families="DeepSeek-V3, GLM-4.5 to 5, HY-V3, Bailing, Step 3",
        anchor=r"(?P<base>(?!.*\bmtp\.)(?:.+\.)?layers\.)(?P<index>\d+)\.eh_proj\.weight",
        fc=("{base}{index}.eh_proj",),
        enorm=("{base}{index}.enorm",),
        hnorm=("{base}{index}.hnorm",),
        norm=(
            "{base}{index}.shared_head.norm",
            "{base}{index}.transformer.shared_head.norm",
            "{base}{index}.final_layernorm",
        ),
        layer="{base}{index}.",
        example="model.layers.{layers}.eh_proj.weight",
    ),
    Layout(
        families="Ernie 4.5",
        anchor=r"(?P<base>(?:.+\.)?mtp_)linear_proj\.(?P<index>\d+)\.weight",
        fc=("{base}linear_proj.{index}",),
        enorm=("{base}emb_norm.{index}",),
        hnorm=("{base}hidden_norm.{index}",),
        norm=(),
        layer="{base}block.{index}.",
        example="model.mtp_linear_proj.0.weight",
    ),
    Layout(
        families="MiMo",
        anchor=r"(?P<base>(?:.+\.)?mtp_layers\.)(?P<index>\d+)\.input_proj\.weight",
        fc=("{base}{index}.input_proj",),
        enorm=("{base}{index}.token_layernorm",),
        hnorm=("{base}{index}.hidden_layernorm",),
        norm=("{base}{index}.final_layernorm",),
        layer="{base}{index}.",
        hidden_first=True,
        example="model.mtp_layers.0.input_proj.weight",
    ),
)

_RENAMED = {
    "pre_mlp_layernorm.": "post_attention_layernorm.",
    "transformer_layer.": "",
    "transformer.": "",
    "moe.gate.": "mlp.gate.",
    "moe.router_bias": "mlp.gate.e_score_correction_bias",
    "moe.down_proj.weight": "mlp.experts.down_proj",
    "share_expert.": "mlp.shared_experts.",
}
"""What the names of a layer's tensors begin with in some families, and what the target's class has for it."""
_NOT_NEEDED = re.compile(r"(shared_head\.(head|output)|embed_tokens|self_attn\.rotary_emb)\.")
"""Copies of the target's own tensors, and frequencies that are computed."""


@dataclass(frozen=True)
class ModuleNames:
    """
    The tensors of one module by their names in the checkpoint.

    Args:
        place (`dict[str, str]`): `base` and `index` of the module; see `Layout`.
        own (`dict[str, str]`): by checkpoint name, the name in our module: `fc.…`, `enorm.…`, `hnorm.…`, `norm.…`.
        layer (`dict[str, str]`): by checkpoint name, the name in the target's decoder layer.
    """

    place: dict[str, str]
    own: dict[str, str] = field(default_factory=dict)
    layer: dict[str, str] = field(default_factory=dict)


def find_modules(names: Iterable[str], num_layers: int) -> tuple[Layout, list[ModuleNames]] | None:
    """
    The layout of a checkpoint, and the tensors of its modules in their order; None if it holds none.

    Args:
        names (`Iterable[str]`): names of the checkpoint's tensors.
        num_layers (`int`): the target's decoder layers, after which those of modules are numbered in some families.
    """
    names = sorted(names)
    for layout in LAYOUTS:
        found = [match for name in names if (match := re.fullmatch(layout.anchor, name))]
        places = _places(layout, found, names, num_layers)
        if places:
            return layout, [_names_at(layout, place, names) for place in places]
    return None


def _places(layout: Layout, found: list[re.Match[str]], names: list[str], num_layers: int) -> list[dict[str, str]]:
    """`base` and `index` of every module."""
    places = [match.groupdict() for match in found]
    if places and "index" not in places[0]:  # one projection for all
        base = places[0]["base"]
        layers = (re.match(re.escape(base) + r"layers\.(\d+)\.", name) for name in names)
        indices = {int(match.group(1)) for match in layers if match is not None}
        return [{"base": base, "index": str(index)} for index in sorted(indices)]
    if "{layers}" in layout.example:
        places = [place for place in places if int(place["index"]) >= num_layers]
    return sorted(places, key=lambda place: int(place["index"]))


def _names_at(layout: Layout, place: dict[str, str], names: list[str]) -> ModuleNames:
    found, layer, held_names = ModuleNames(place), layout.layer.format(**place), set(names)
    for part in ("fc", "enorm", "hnorm", "norm"):
        prefixes = [f"{name.format(**place)}." for name in getattr(layout, part)]
        held = next((prefix for prefix in prefixes if f"{prefix}weight" in held_names), None)
        if held is not None:
            found.own.update({name: f"{part}.{name[len(held) :]}" for name in names if name.startswith(held)})
    for name in names:
        if name.startswith(layer) and name not in found.own:
            rest = name.removeprefix(layer)
            for before, after in _RENAMED.items():
                rest = after + rest.removeprefix(before) if rest.startswith(before) else rest
            if not _NOT_NEEDED.match(rest):
                found.layer[name] = rest
    return found
