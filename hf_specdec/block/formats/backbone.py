"""What the formats of DFlash's family share: decoder layers, the context's projection, and the heads around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig

from ...checkpoints.keys import Keys
from ...checkpoints.layer_config import layer_config
from ...checkpoints.published import PublishedHead
from ...checkpoints.vocabulary import draft_vocabulary, target_vocabulary
from ..configuration_block import BlockConfig, spread_layers


KIND = "a block head"
_MARKOV = "markov_head.markov_w1.weight"
_SELECTOR = "candidate_selector.predecessor_codebook"
_CONVOLUTION = "layers.0.attention_conv"


@dataclass(eq=False)
class Backbone:
    """
    A published head, as its format says where to find things.

    Args:
        keys (`Keys`): the weights.
        published (`dict`): the published config.
        layers (`dict`): the part of it that describes the decoder layers.
        options (`dict`): the part of it with the method's options.
        layer_ids (`list[int]`, *optional*): the target's layers.
        ids_are_outputs (`bool`): whether these count outputs of layers; else boundaries.
        reasons (`dict[str, str]`): by field of `BlockConfig`, why it is read as it is.
        layer_config (`Callable`, *optional*): makes the config of the decoder layers; Qwen3's by default.
    """

    keys: Keys
    published: dict[str, Any]
    layers: dict[str, Any]
    options: dict[str, Any]
    layer_ids: Any
    ids_are_outputs: bool
    reasons: dict[str, str] = field(default_factory=dict)
    layer_config: Callable[..., PreTrainedConfig] | None = None

    def value(self, name: str, default: Any = None) -> Any:
        """An option, wherever it stands; the format's default, with the reason, if it stands nowhere."""
        for place in (self.options, self.published):
            if place.get(name) is not None:
                return place[name]
        if default is not None:
            self.reasons[name] = "config.json does not say, and this is the format's default"
        return default


def causality(backbone: Backbone, window_is_causal: bool = True) -> tuple[bool, bool]:
    """
    `causal` and `window_is_causal` of a head: all rows of a block see one another unless `causal_head` (JetSpec),
    `causal` or `is_causal` says otherwise. Layers with a sliding window are causal by default, as in vLLM, SGLang and
    SpecForge; the latter take a `causal` or `is_causal` for all layers.

    Raises:
        ValueError: if one of them is neither true nor false.
    """
    found: dict[str, bool] = {}
    for name in ("causal_head", "causal", "is_causal", "sliding_window_non_causal"):
        value = backbone.value(name)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{backbone.keys.name}: `{name}`={value!r} in config.json must be true or false.")
        if value is not None:
            found[name] = value
    said = next((name for name in ("causal_head", "causal", "is_causal") if name in found), None)
    causal = said is not None and found[said]
    backbone.reasons["causal"] = (
        "config.json does not say: bidirectional, as DFlash" if said is None else f"`{said}` in config.json"
    )
    reason = "the default of servers that run such heads"
    if "sliding_window_non_causal" in found:
        window_is_causal, reason = not found["sliding_window_non_causal"], "`sliding_window_non_causal` in config.json"
    elif said in ("causal", "is_causal"):
        window_is_causal, reason = causal, f"`{said}` in config.json"
    if "sliding_attention" in (backbone.layers.get("layer_types") or ()):
        backbone.reasons["window_is_causal"] = reason
    return causal, window_is_causal or causal


def read_backbone(backbone: Backbone, source_format: str, **fields: Any) -> PublishedHead:
    """
    Reads a head of DFlash's family.

    Args:
        backbone (`Backbone`): the published head.
        source_format (`str`): name of the format in the `BlockConfig`.
        fields: fields of `BlockConfig` that the format sets.

    Raises:
        ValueError: if tensors are missing, or sizes and values do not fit.
    """
    keys, reasons = backbone.keys, backbone.reasons
    vocab_size = target_vocabulary(keys, backbone.layers, reasons)
    if backbone.layer_config is None:
        text_config = layer_config(backbone.layers, keys, vocab_size, reasons, kind="qwen3")
    else:
        text_config = backbone.layer_config(backbone.layers, keys, vocab_size, reasons)
    check_number_of_layers(keys, backbone.layers, text_config.num_hidden_layers)
    fields = _features(backbone, text_config) | _heads(backbone) | fields
    for name, ours in (("input_embedding_scale", "embedding_scale"), ("output_multiplier", "output_multiplier")):
        if (value := backbone.value(name)) is not None:
            fields.setdefault(ours, value)
    if (cap := backbone.value("final_logit_softcapping")) is not None:
        fields["final_logit_softcapping"] = cap
    mask_token = backbone.value("mask_token_id")
    if mask_token is not None:
        reasons.setdefault("mask_token_id", "config.json")
    try:
        config = BlockConfig(
            text_config=text_config,
            mask_token_id=mask_token,
            draft_vocab_size=_draft_vocab_size(backbone, vocab_size),
            has_mask_embedding=_has_mask_embedding(keys, reasons),
            has_embeddings="embed_tokens.weight" in keys,
            has_lm_head="lm_head.weight" in keys,
            source_format=source_format,
            reasons=reasons,
            **fields,
        )
    except (ValueError, TypeError) as error:  # also what transformers' checks of types raise
        raise ValueError(f"{keys.name}: {error}") from error
    config.name_or_path = keys.name
    return PublishedHead(config, keys.weights, keys.ignored)


def _has_mask_embedding(keys: Keys, reasons: dict[str, str]) -> bool:
    """Whether the checkpoint has an embedding of the mask beside the vocabulary's, `[H]` or `[1, H]`."""
    if "mask_embedding" not in keys:
        return False
    embedding = keys.weights["mask_embedding"]
    if embedding.dim() == 2 and len(embedding) == 1:
        keys.weights["mask_embedding"] = embedding[0]
    reasons["mask_token_id"] = "`mask_embedding` in the checkpoint"
    return True


def check_number_of_layers(keys: Keys, layers: dict[str, Any], found: int) -> None:
    """
    Checks that no layer is missing at the end, which no other size would show.

    Raises:
        ValueError: if the config says that there are more or fewer.
    """
    said = layers.get("num_hidden_layers")
    if said is not None and said != found:
        raise ValueError(
            f"{keys.name}: `num_hidden_layers`={said!r} in config.json, but the weights hold {found} decoder layers. "
            "The file may be cut short."
        )


# ----------------------------------------------------------------------------------------------------------- features


def _features(backbone: Backbone, text_config: PreTrainedConfig) -> dict[str, Any]:
    """Fields about the target's hidden states; the columns of `fc` are put in their ascending order."""
    keys, ids = backbone.keys, backbone.layer_ids
    _, width = keys.shape("fc.weight")
    target_size = backbone.published.get("target_hidden_size")
    if target_size is not None and (type(target_size) is not int or target_size < 1):
        raise ValueError(
            f"{keys.name}: `target_hidden_size`={target_size!r} in config.json must be a positive whole number."
        )
    boundaries = _boundaries(backbone, width, target_size or text_config.hidden_size)
    if ids is not None and target_size is None and width % len(ids) == 0:
        target_size = width // len(ids)
    target_size = target_size or text_config.hidden_size
    if width % target_size or (boundaries and width != len(boundaries) * target_size):
        named = "" if boundaries is None else f" of {len(boundaries)} layers {backbone.layer_ids or boundaries}"
        raise ValueError(
            f"{keys.name}: `fc.weight` reads {width} values, which are no hidden states of size {target_size}{named}. "
            "Check `target_hidden_size` and the layer ids in config.json."
        )
    if boundaries is not None and boundaries != sorted(boundaries):
        order = sorted(range(len(boundaries)), key=boundaries.__getitem__)
        parts = keys.weights["fc.weight"].chunk(len(boundaries), dim=1)
        keys.weights["fc.weight"] = torch.cat([parts[place] for place in order], dim=1)
        backbone.reasons["aux_layer_ids"] += "; put in ascending order, and the columns of `fc` with them"
        boundaries = sorted(boundaries)
    return {
        "target_hidden_size": target_size,
        "num_target_layers": backbone.published.get("num_target_layers"),
        "num_aux_features": width // target_size,
        "aux_layer_ids": boundaries,
    }


def _boundaries(backbone: Backbone, width: int, target_size: int) -> list[int] | None:
    """The published layers as boundaries, in their published order; None if only the target's depth tells."""
    keys, ids = backbone.keys, backbone.layer_ids
    if ids is None:
        depth = backbone.published.get("num_target_layers")
        default = "z-lab's layers, spread over the target: config.json names none"
        if type(depth) is int and depth > 0 and width % target_size == 0:
            backbone.reasons["aux_layer_ids"] = f"{default}, but {depth} layers of the target"
            return spread_layers(depth, width // target_size)
        backbone.reasons["aux_layer_ids"] = default
        return None
    lowest = -1 if backbone.ids_are_outputs else 0
    if not isinstance(ids, list) or not ids or not all(type(layer) is int and layer >= lowest for layer in ids):
        raise ValueError(f"{keys.name}: the layer ids {ids!r} in config.json must be a list of layer numbers.")
    if backbone.ids_are_outputs:
        backbone.reasons["aux_layer_ids"] = f"{ids} in config.json, which are outputs of layers in this format"
        return [layer + 1 for layer in ids]
    backbone.reasons["aux_layer_ids"] = "boundaries in config.json, as always in this format"
    return list(ids)


# -------------------------------------------------------------------------------------------------------------- heads


def _heads(backbone: Backbone) -> dict[str, Any]:
    """
    Fields about what stands around the layers. Tensors that the config announces and the checkpoint lacks are left to
    `check_weights`, which names them.
    """
    keys = backbone.keys
    fields: dict[str, Any] = {}
    if _MARKOV in keys or backbone.value("markov_rank"):
        fields["markov_rank"] = keys.shape(_MARKOV)[1] if _MARKOV in keys else backbone.value("markov_rank")
        of_weights = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}
        said = str(backbone.value("markov_head_type") or "vanilla").lower()
        fields["markov_type"] = next((kind for key, kind in of_weights.items() if key in keys), said)
    if "confidence_head.proj.weight" in keys or backbone.value("enable_confidence_head"):
        fields |= {"has_confidence_head": True, "confidence_with_markov": _confidence_reads_markov(backbone)}
    if any(key.startswith(_CONVOLUTION) for key in keys.weights) or backbone.value("conv_kernel_size"):
        fields |= _convolution(keys)
    if _SELECTOR in keys or backbone.value("selector_rank"):
        fields["selector_rank"] = keys.shape(_SELECTOR)[1] if _SELECTOR in keys else backbone.value("selector_rank")
        fields["selector_top_k"] = backbone.value("selector_top_k", 16)
    return fields


def _confidence_reads_markov(backbone: Backbone) -> bool:
    keys = backbone.keys
    _, width = keys.shape("confidence_head.proj.weight")
    hidden_size, _ = keys.shape("fc.weight")
    rank = keys.shape(_MARKOV)[1] if _MARKOV in keys else backbone.value("markov_rank") or 0
    if width not in (hidden_size, hidden_size + rank):
        raise ValueError(
            f"{keys.name}: `confidence_head.proj.weight` reads {width} values; it must read a state of {hidden_size}"
            + (f", or that and a Markov embedding of {rank}." if rank else ".")
        )
    return width != hidden_size


def _convolution(keys: Keys) -> dict[str, int]:
    """Taps and group size, which the shapes tell."""
    sides, taps, size = keys.shape(f"{_CONVOLUTION}.base_kernel", 3)
    rows, _ = keys.shape(f"{_CONVOLUTION}.kernel_projection.weight")
    groups = rows // (2 * taps)
    if sides != 2 or groups == 0 or rows != 2 * taps * groups or size % groups:
        raise ValueError(
            f"{keys.name}: `{_CONVOLUTION}.base_kernel` must be 2×taps×H, but is {sides}×{taps}×{size}, and "
            f"`{_CONVOLUTION}.kernel_projection.weight` must have 2·taps·groups rows, but has {rows}."
        )
    return {"conv_kernel_size": taps, "conv_group_size": size // groups}


# --------------------------------------------------------------------------------------------------------- vocabulary


def read_draft_vocabulary(keys: Keys, vocab_size: int) -> int | None:
    """
    The size of the draft vocabulary, None if it is the target's, from the rows of the lm_head, of the Markov head or
    of `d2t`; see `draft_vocabulary`.

    Raises:
        ValueError: if the map of its tokens is damaged, or missing.
    """
    if "lm_head.weight" in keys:
        return draft_vocabulary(keys, vocab_size)
    if "markov_head.markov_w2.weight" in keys:
        return draft_vocabulary(keys, vocab_size, "markov_head.markov_w2.weight")
    if "d2t" not in keys:
        keys.drop("t2d")
        return None
    return draft_vocabulary(keys, vocab_size, "d2t")


def _draft_vocab_size(backbone: Backbone, vocab_size: int) -> int | None:
    keys, said = backbone.keys, backbone.published.get("draft_vocab_size")
    found = read_draft_vocabulary(keys, vocab_size)
    if said not in (None, found or vocab_size):
        raise ValueError(
            f"{keys.name}: `draft_vocab_size`={said!r} in config.json, but the weights are those of "
            f"{found or vocab_size} draft tokens"
            + (", and there is no `d2t` that names fewer." if found is None else ".")
        )
    return found
