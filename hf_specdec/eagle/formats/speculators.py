"""
The formats of the speculators library (vllm-project): "eagle3", and the older "eagle".

The config contains the decoder layers' config (`transformer_layer_config`) and names every option; layer ids are
boundaries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...checkpoints.keys import Keys
from ...checkpoints.published import PublishedHead, section, verifier_name
from ...checkpoints.reading import Checkpoint
from ...checkpoints.target_files import TargetFiles
from ...checkpoints.writing import Writing, chain_proposals, check_expressible, published_layers, verifier_of
from .safeailab import read_eagle1, read_eagle3
from .writing import PLAIN_EAGLE3, boundaries, eagle3_weights


if TYPE_CHECKING:
    from ..modeling_eagle import EagleHead

NAME = "speculators"
DEFAULT_HEADS = 32


def matches(checkpoint: Checkpoint) -> bool:
    """Whether the config was written by speculators."""
    return "speculators_model_type" in checkpoint.config


def read(checkpoint: Checkpoint) -> PublishedHead:
    """
    Reads a head in one of the formats of speculators.

    Raises:
        ValueError: for the library's other kinds of drafts, and for options that no published head uses.
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
    layers = section(published, "transformer_layer_config", checkpoint.name, required=True)
    ids = published.get("eagle_aux_hidden_state_layer_ids")
    conventions = {
        "aux_layer_ids": (
            "boundaries [2, L//2, L-3]: the config names none"
            if ids is None
            else f"{ids}: boundaries, as always in this format"
        )
    }
    if layers.get("num_attention_heads") is None and layers.get("head_dim") is None:
        layers = layers | {"num_attention_heads": DEFAULT_HEADS}
        conventions["num_attention_heads"] = f"{DEFAULT_HEADS}: absent, and the default of the library's configs"
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
    reading.config.target_name = verifier_name(checkpoint)
    return reading


def _read_eagle1(checkpoint: Checkpoint) -> PublishedHead:
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
    reading.config.target_name = verifier_name(checkpoint)
    return reading


def write(head: EagleHead, target: TargetFiles | None = None) -> Writing:
    """
    The head as speculators saves "eagle3" heads; layer ids are written as boundaries. With a target, a copy of its
    embeddings is written as the library does, though neither the library nor vLLM needs it.

    Raises:
        ValueError: if the format cannot express the head, or needs the target.
    """
    config, layers = head.config, head.config.text_config
    either = (False, True)
    allowed = PLAIN_EAGLE3 | dict.fromkeys(
        ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), either
    )
    check_expressible(config, allowed, NAME)
    if config.norm_before_fc:
        check_expressible(config, {"fc_norm": False}, f"{NAME} with `norm_before_fc`")
    check_expressible(layers, {"model_type": ("llama", "qwen3")}, NAME)
    weights = eagle3_weights(head, target, "layers.0.", NAME)
    if head.embed_tokens is None and target is not None:
        weights["embed_tokens.weight"] = target.embeddings()
    differs = config.target_hidden_size != config.hidden_size
    fields = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": chain_proposals("eagle3", 3, *verifier_of(config, target)),
        "transformer_layer_config": published_layers(config.text_config, head.dtype),
        "draft_vocab_size": config.num_draft_tokens,
        "eagle_aux_hidden_state_layer_ids": boundaries(config, target),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "target_hidden_size": config.target_hidden_size if differs else None,
        "embed_requires_grad": head.embed_tokens is not None,
        "tie_word_embeddings": False,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }
    return Writing(fields, weights)
