"""
The formats of SafeAILab EAGLE: `pytorch_model.bin` and a config that calls itself a Llama.

EAGLE-1 (and EAGLE-2 and HASS, whose weights have the same form): `fc`, and a decoder layer without a norm before its
attention. EAGLE-3: `midlayer`, `norm`, an lm_head over a draft vocabulary, and `d2t`/`t2d`. The other formats extend
these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...checkpoints.keys import Keys
from ...checkpoints.layer_config import layer_config
from ...checkpoints.published import PublishedHead
from ...checkpoints.reading import Checkpoint
from ...checkpoints.target_files import TargetFiles
from ...checkpoints.vocabulary import draft_vocabulary, target_vocabulary
from ...checkpoints.writing import Writing, check_expressible, layer_fields, outer_rope
from ..configuration_eagle import EagleConfig
from .writing import PLAIN_EAGLE3, PLAIN_LAYERS, boundaries, eagle3_weights


if TYPE_CHECKING:
    from ..modeling_eagle import EagleHead

NAME = "safeailab"


def read(checkpoint: Checkpoint) -> PublishedHead:
    """Reads a head of EAGLE-1 or EAGLE-3; the weights decide which."""
    return read_either(Keys(checkpoint, {"midlayer.": "layers.0."}), checkpoint.config, NAME)


def read_either(keys: Keys, published: dict[str, Any], name: str, **eagle3: Any) -> PublishedHead:
    """
    Reads a head of the version that its weights show; `eagle3` are arguments of `read_eagle3`. Decoder layers of
    another kind are refused with the name of the tensor that they lack.
    """
    if _eagle_version(keys) == 1:
        return read_eagle1(keys, published, f"{name}_eagle1")
    return read_eagle3(keys, published, f"{name}_eagle3", **eagle3)


def _eagle_version(keys: Keys) -> int:
    """
    The head's EAGLE version: 1 if the first layer's attention reads the hidden state alone (q_proj is `[q, H]`), 3
    if it reads the embedding, too (`[q, 2·H]`).

    Raises:
        ValueError: if q_proj reads another width.
    """
    hidden_size, _ = keys.shape("layers.0.self_attn.o_proj.weight")
    _, width = keys.shape("layers.0.self_attn.q_proj.weight")
    if width not in (hidden_size, 2 * hidden_size):
        raise ValueError(
            f"{keys.name}: `layers.0.self_attn.q_proj.weight` reads {width} values, but the hidden size is "
            f"{hidden_size}: an EAGLE-1 head reads {hidden_size}, an EAGLE-3 head {2 * hidden_size}."
        )
    return 1 if width == hidden_size else 3


def read_eagle1(
    keys: Keys, published: dict[str, Any], source_format: str, conventions: dict[str, str] | None = None
) -> PublishedHead:
    """
    Reads an EAGLE-1 head of any format. Embeddings in the checkpoint are a copy of the target's, and left out; the
    lm_head is the target's.

    Args:
        keys (`Keys`): the weights.
        published (`dict`): the published config of the layers.
        source_format (`str`): name of the format in the `EagleConfig`.
        conventions (`dict[str, str]`, *optional*): what has been assumed so far.

    Raises:
        ValueError: if sizes do not fit.
    """
    conventions = dict(conventions or {}) | {
        "features": "the target's last hidden state after its final norm: the format's only one",
        "fc_bias": "as the weights say; the config is silent or wrong about it in some published heads",
    }
    vocab_size = target_vocabulary(keys, published, conventions)
    for key in ("embed_tokens.weight", "lm_head.weight"):
        keys.drop(key)
    text_config = layer_config(published, keys, vocab_size, conventions)
    hidden_size, width = keys.shape("fc.weight")
    if width != 2 * text_config.hidden_size:
        raise ValueError(
            f"{keys.name}: `fc.weight` reads {width} values, but in an EAGLE-1 head of hidden size "
            f"{text_config.hidden_size} it must read an embedding and a hidden state, {2 * text_config.hidden_size}."
        )
    config = EagleConfig(
        text_config=text_config,
        eagle_version=1,
        target_hidden_size=hidden_size,
        fc_bias="fc.bias" in keys,
        source_format=source_format,
        conventions=conventions,
    )
    return PublishedHead(config, keys.weights, keys.ignored)


def read_eagle3(
    keys: Keys,
    published: dict[str, Any],
    source_format: str,
    *,
    layers: dict[str, Any] | None = None,
    conventions: dict[str, str] | None = None,
    **differences: Any,
) -> PublishedHead:
    """
    Reads an EAGLE-3 head of any format.

    Args:
        keys (`Keys`): the weights.
        published (`dict`): the published config.
        source_format (`str`): name of the format in the `EagleConfig`.
        layers (`dict`, *optional*): the part of the config that describes the layers; `published` by default.
        conventions (`dict[str, str]`, *optional*): what has been assumed so far.
        differences: fields of `EagleConfig` that the format sets.

    Raises:
        ValueError: if sizes do not fit.
    """
    conventions = dict(conventions or {})
    layers = published if layers is None else layers
    vocab_size = target_vocabulary(keys, layers, conventions)
    text_config = layer_config(layers, keys, vocab_size, conventions)
    fields: dict[str, Any] = {
        "target_hidden_size": published.get("target_hidden_size") or text_config.hidden_size,
        "has_fc": True,
        "aux_layer_ids": published.get("eagle_aux_hidden_state_layer_ids"),
        "aux_layer_convention": "auto",
        "norm_before_fc": bool(published.get("norm_before_fc")) or "input_norm.weight" in keys,
        "fc_norm": bool(published.get("fc_norm")) or any(key.startswith("fc_norm.") for key in keys.weights),
    } | differences
    target_size = fields["target_hidden_size"]
    _check_target_size(keys, target_size, text_config.hidden_size)
    if "num_aux_features" not in differences:
        fields["num_aux_features"] = _num_features(keys, target_size)
    has_lm_head = _has_lm_head(keys, published, vocab_size, conventions)
    draft_vocab_size = draft_vocabulary(keys, vocab_size) if has_lm_head else None
    if fields["num_aux_features"] and "aux_layer_ids" not in conventions:
        conventions["aux_layer_ids"] = (
            "boundaries [2, L//2, L-3]: the config names none"
            if fields["aux_layer_ids"] is None
            else f"{fields['aux_layer_ids']}: boundaries or layer outputs, told from the numbers where they can tell"
        )
    try:
        config = EagleConfig(
            text_config=text_config,
            eagle_version=3,
            draft_vocab_size=draft_vocab_size,
            fc_bias="fc.bias" in keys,
            has_embeddings="embed_tokens.weight" in keys,
            has_lm_head=has_lm_head,
            source_format=source_format,
            conventions=conventions,
            **fields,
        )
    except ValueError as error:
        raise ValueError(f"{keys.name}: {error}") from error
    return PublishedHead(config, keys.weights, keys.ignored)


def _num_features(keys: Keys, target_size: int) -> int:
    _, width = keys.shape("fc.weight")
    if width % target_size:
        raise ValueError(
            f"{keys.name}: `fc.weight` reads {width} values, which is no multiple of the target's hidden size "
            f"{target_size}. Check `target_hidden_size` in config.json."
        )
    return width // target_size


def _check_target_size(keys: Keys, target_size: Any, hidden_size: int) -> None:
    if isinstance(target_size, bool) or not isinstance(target_size, int) or target_size < 1:
        raise ValueError(
            f"{keys.name}: `target_hidden_size`={target_size!r} in config.json must be a positive whole number."
        )
    if target_size != hidden_size and "embed_tokens.weight" not in keys:
        raise ValueError(
            f"{keys.name}: `embed_tokens.weight` is missing, and the target's embeddings (`target_hidden_size`="
            f"{target_size} in config.json) do not fit the head's hidden size {hidden_size}."
        )


def _has_lm_head(keys: Keys, published: dict[str, Any], vocab_size: int, conventions: dict[str, str]) -> bool:
    """
    Whether the head must have an lm_head of its own. Heads over the whole vocabulary may come without one and use the
    target's: nvidia/gpt-oss-120b-Eagle3, and heads that SpecForge trains with `reuse_target_lm_head`.
    """
    is_whole = published.get("draft_vocab_size") in (None, vocab_size)
    maps_tokens = "d2t" in keys and bool(keys.weights["d2t"].any())
    if "lm_head.weight" in keys or maps_tokens or not is_whole:
        return True  # if it is missing, that is an error
    for key in ("d2t", "t2d"):
        keys.drop(key)
    conventions["lm_head"] = "the target's: the checkpoint has none, and no draft vocabulary"
    return False


def write(head: EagleHead, target: TargetFiles | None = None) -> Writing:
    """
    The head as SafeAILab publishes heads. SafeAILab's code computes plain rotary embeddings only, has no sliding
    window, and always reads the default three hidden states.

    Raises:
        ValueError: if the format cannot express the head, or needs the target.
    """
    layers = head.config.text_config
    remedy = "Write it as speculators or hf_specdec."
    if layers.rope_parameters["rope_type"] != "default":
        raise ValueError(
            f"`rope_type`={layers.rope_parameters['rope_type']!r}: the format {NAME} cannot say so; it knows "
            f"'default'. {remedy}"
        )
    fields = layer_fields(layers, head.dtype) | outer_rope(layers.rope_parameters)
    fields = {"architectures": ["LlamaForCausalLM"]} | fields | {"model_type": "llama"}
    if head.config.eagle_version == 1:
        return _write_eagle1(head, fields, target)
    check_expressible(head.config, PLAIN_EAGLE3 | {"num_aux_features": 3}, NAME, remedy)
    check_expressible(layers, PLAIN_LAYERS | {"num_hidden_layers": 1}, NAME, remedy)
    read = boundaries(head.config, target)
    defaults = None if target is None else [2, target.num_layers // 2, target.num_layers - 3]
    if read is not None and read != defaults:
        expected = "the default [2, L//2, L-3]" if defaults is None else str(defaults)
        raise ValueError(
            f"`aux_layer_ids`={head.config.aux_layer_ids}: the format {NAME} cannot say so; it knows {expected} "
            f"(`--target` tells L). {remedy}"
        )
    fields["draft_vocab_size"] = head.config.num_draft_tokens
    if head.config.target_hidden_size != head.config.hidden_size:
        fields["target_hidden_size"] = head.config.target_hidden_size
    return Writing(fields, eagle3_weights(head, target, "midlayer.", NAME), "pytorch_model.bin")


def _write_eagle1(head: EagleHead, fields: dict[str, Any], target: TargetFiles | None) -> Writing:
    layers = head.config.text_config
    check_expressible(layers, PLAIN_LAYERS | {"model_type": ("llama", "qwen2")}, NAME)
    if target is None:
        raise ValueError(
            f"The format {NAME} stores the target's embeddings in an EAGLE-1 head. Give the target (`--target`)."
        )
    fields["bias"] = head.config.fc_bias
    fields["qkv_bias"] = layers.model_type == "qwen2"
    weights = {key: tensor.detach().cpu() for key, tensor in head.state_dict().items()}
    return Writing(fields, weights | {"embed_tokens.weight": target.embeddings()}, "pytorch_model.bin")
