"""
The formats of the speculators library (vllm-project): "eagle3", and the older "eagle".

The config nests the decoder layers' (`transformer_layer_config`) and names every option; layer ids are boundaries.
"""

from __future__ import annotations

from .checkpoint import Checkpoint
from .keys import Keys
from .reading import Reading, section
from .safeailab import read_eagle1, read_eagle3


NAME = "speculators"


def matches(checkpoint: Checkpoint) -> bool:
    """Whether the config is one of theirs."""
    return "speculators_model_type" in checkpoint.config


def read(checkpoint: Checkpoint) -> Reading:
    """
    Raises:
        ValueError: for their other kinds of drafts, and for options that no published head uses.
    """
    kind = checkpoint.config["speculators_model_type"]
    if kind == "eagle":
        return _read_eagle1(checkpoint)
    if kind != "eagle3":
        raise ValueError(
            f"{checkpoint.name}: `speculators_model_type`={kind!r} is not an autoregressive EAGLE head. Those that "
            "load are 'eagle3' and 'eagle'."
        )
    published = checkpoint.config
    keys = Keys(checkpoint)
    for key in ("verifier_lm_head.weight", "verifier_norm.weight"):
        keys.drop(key)
    conventions = {"aux_layer_ids": "boundaries, as always in this format (none named: [2, L//2, L-3])"}
    layers = section(published, "transformer_layer_config", checkpoint.name, required=True)
    shares_embeddings = not published.get("embed_requires_grad", False)
    if shares_embeddings and published.get("target_hidden_size") in (None, layers.get("hidden_size")):
        if keys.drop("embed_tokens.weight") is not None:
            conventions["embed_tokens"] = "the target's: they were frozen in training, so the copy is left out"
    if "norm_before_residual" not in published:
        conventions["norm_before_residual"] = "false: the config does not say, and this is the library's default"
    reading = read_eagle3(
        keys,
        published,
        f"{NAME}_eagle3",
        layers=layers,
        conventions=conventions,
        aux_layer_convention="boundaries",
        norm_before_residual=bool(published.get("norm_before_residual", False)),
        norm_output=bool(published.get("norm_output", False)),
    )
    reading.config.target_name = _verifier(checkpoint)
    return reading


def _read_eagle1(checkpoint: Checkpoint) -> Reading:
    published = checkpoint.config
    if published.get("layernorms"):
        raise ValueError(
            f"{checkpoint.name}: `layernorms`=True in config.json: an EAGLE-1 head with extra norms, which this "
            "version does not read. Use a head without them, or an eagle3 one."
        )
    keys = Keys(checkpoint, {"fusion_fc.": "fc.", "transformer.": "layers.0."})
    keys.drop("lm_head.weight")
    layers = section(published, "transformer_layer_config", checkpoint.name, required=True)
    reading = read_eagle1(keys, layers, f"{NAME}_eagle")
    reading.config.target_name = _verifier(checkpoint)
    return reading


def _verifier(checkpoint: Checkpoint) -> str | None:
    """The name of the model that the head was trained for."""
    options = section(checkpoint.config, "speculators_config", checkpoint.name)
    return section(options, "verifier", checkpoint.name).get("name_or_path")
