"""
The formats of SafeAILab EAGLE: `pytorch_model.bin` and a config that calls itself a Llama.

EAGLE-1 (and EAGLE-2 and HASS, whose weights have the same form): `fc`, and a decoder layer without a norm before its
attention. EAGLE-3: `midlayer`, `norm`, an lm_head over a draft vocabulary, and `d2t`/`t2d`. The other EAGLE-3 formats
extend this one.
"""

from __future__ import annotations

from typing import Any

from ..configuration_eagle import EagleConfig
from .checkpoint import Checkpoint
from .reading import Keys, Reading, layer_config, read_draft_vocabulary


NAME = "safeailab"


def read(checkpoint: Checkpoint) -> Reading:
    """A head of either version; which of them is told by the weights."""
    keys = Keys(checkpoint, {"midlayer.": "layers.0."})
    if is_eagle1(keys):
        return read_eagle1(keys, checkpoint.config, f"{NAME}_eagle1")
    return read_eagle3(keys, checkpoint.config, f"{NAME}_eagle3")


def is_eagle1(keys: Keys) -> bool:
    """Whether the attention reads the hidden state alone, `[q, H]`; that of EAGLE-3 reads the embedding too."""
    hidden_size, _ = keys.shape("layers.0.self_attn.o_proj.weight")
    _, width = keys.shape("layers.0.self_attn.q_proj.weight")
    return width == hidden_size


def read_eagle1(keys: Keys, published: dict[str, Any], source_format: str) -> Reading:
    """Embeddings in the checkpoint are a copy of the target's, and left out; the lm_head is the target's."""
    conventions = {
        "features": "the target's last hidden state after its final norm: the format's only one",
        "fc_bias": "as the weights say; the config is silent or wrong about it in some published heads",
    }
    embeddings = keys.drop("embed_tokens.weight")
    vocab_size = published["vocab_size"] if embeddings is None else len(embeddings)
    text_config = layer_config(published, keys, vocab_size, conventions)
    hidden_size, width = keys.shape("fc.weight")
    config = EagleConfig(
        text_config=text_config,
        eagle_version=1,
        target_hidden_size=width - hidden_size,
        fc_bias="fc.bias" in keys,
        target_name=None,
        source_format=source_format,
        conventions=conventions,
    )
    return Reading(config, keys.weights, keys.ignored)


def read_eagle3(
    keys: Keys,
    published: dict[str, Any],
    source_format: str,
    *,
    layers: dict[str, Any] | None = None,
    conventions: dict[str, str] | None = None,
    **differences: Any,
) -> Reading:
    """
    An EAGLE-3 head of any format.

    Args:
        published (`dict`): the published config.
        layers (`dict`, *optional*): the part of it that describes the decoder layers, where that is another.
        conventions (`dict[str, str]`, *optional*): what has been assumed so far.
        differences: fields of `EagleConfig` that this format sets.
    """
    conventions = dict(conventions or {})
    layers = published if layers is None else layers
    vocab_size = layers.get("vocab_size") or keys.shape("lm_head.weight")[0]
    draft_vocab_size = read_draft_vocabulary(keys, vocab_size)
    text_config = layer_config(layers, keys, vocab_size, conventions)
    hidden_size = text_config.hidden_size
    target_hidden_size = published.get("target_hidden_size") or hidden_size
    has_embeddings = "embed_tokens.weight" in keys
    fields: dict[str, Any] = {"num_aux_features": 0, "has_fc": "fc.weight" in keys}
    if fields["has_fc"]:
        fields["num_aux_features"], rest = divmod(keys.shape("fc.weight")[1], target_hidden_size)
        if rest:
            raise ValueError(
                f"{keys.name}: `fc.weight` reads {keys.shape('fc.weight')[1]} values, which is no multiple of the "
                f"target's hidden size {target_hidden_size}. Check `target_hidden_size` in config.json."
            )
    fields["aux_layer_ids"] = published.get("eagle_aux_hidden_state_layer_ids")
    fields["aux_layer_convention"] = "auto"
    fields |= differences
    if fields["num_aux_features"] and "aux_layer_ids" not in conventions:
        conventions["aux_layer_ids"] = (
            "boundaries [2, L//2, L-3]: the config names none"
            if fields["aux_layer_ids"] is None
            else f"{fields['aux_layer_ids']}: boundaries or layer outputs, told from the numbers"
        )
    config = EagleConfig(
        text_config=text_config,
        eagle_version=3,
        target_hidden_size=target_hidden_size,
        draft_vocab_size=draft_vocab_size,
        fc_bias="fc.bias" in keys,
        norm_before_fc=fields.pop("norm_before_fc", "input_norm.weight" in keys),
        fc_norm="fc_norm.0.weight" in keys,
        norm_embeddings=fields.pop("norm_embeddings", True),
        final_norm="norm.weight" in keys,
        has_embeddings=has_embeddings,
        source_format=source_format,
        conventions=conventions,
        **fields,
    )
    return Reading(config, keys.weights, keys.ignored)
