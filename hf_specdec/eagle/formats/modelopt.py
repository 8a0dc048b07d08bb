"""
The format of NVIDIA ModelOpt: `layers.0.*` (older: `midlayer.*`), `d2t` without `t2d`, options in `eagle_config`.

Versions from 0.41 on compute `hidden_norm(input_layernorm(h))` in the first layer, older ones (and the servers that
load such files) `hidden_norm(h)`. The version shows in the files: up to 0.40 `midlayer.*`; 0.41 and 0.42 `midlayer.*`
and the option `next_layer_regular`; from 0.43 on `layers.0.*`.
"""

from __future__ import annotations

from typing import Any

from ...checkpoints.keys import Keys
from ...checkpoints.published import PublishedHead, section
from ...checkpoints.reading import Checkpoint
from .safeailab import read_either


NAME = "modelopt"
_OPTIONS = ("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm", "next_layer_regular")


def matches(checkpoint: Checkpoint) -> bool:
    """Whether the config holds options that only ModelOpt writes."""
    options = section(checkpoint.config, "eagle_config", checkpoint.name)
    return any(name in options for name in _OPTIONS)


def read(checkpoint: Checkpoint) -> PublishedHead:
    """
    Reads a head in ModelOpt's format.

    Raises:
        ValueError: for heads that draft several tokens at once, or have multi-token-prediction norms.
    """
    published, options = checkpoint.config, checkpoint.config["eagle_config"]
    if (options.get("parallel_draft_step") or 1) != 1:
        raise ValueError(
            f"{checkpoint.name}: `parallel_draft_step`={options['parallel_draft_step']} in config.json: a head that "
            "drafts several tokens at once, which this version does not read. Export it with 1."
        )
    if options.get("use_mtp_layernorm"):
        raise ValueError(
            f"{checkpoint.name}: `use_mtp_layernorm`=True in config.json: a head with multi-token-prediction norms, "
            "which this version does not read."
        )
    is_old = any(key.startswith("midlayer.") for key in checkpoint.weights)
    keys = Keys(checkpoint, {"midlayer.": "layers.0."})
    # A norm in the file is used, and a norm that the options ask for must be in the file.
    has_norm = bool(options.get("use_input_layernorm_in_first_layer")) or ("layers.0.input_layernorm.weight" in keys)
    twice = has_norm and not (is_old and "next_layer_regular" not in options)
    conventions = {
        "norm_hidden_twice": (
            "true: the head is of version 0.41 or newer, whose own module does so"
            if twice
            else "false: the head is of version 0.40 or older, or has no such norm"
        )
    }
    differences: dict[str, Any] = {}
    if not options.get("use_aux_hidden_state", True):
        differences |= {"num_aux_features": 0, "has_fc": "fc.weight" in keys}
        conventions["features"] = (
            "the target's last hidden state after its final norm: `use_aux_hidden_state` is false"
        )
    else:
        differences["aux_layer_ids"] = options.get("eagle_aux_hidden_state_layer_ids") or None
    return read_either(
        keys,
        published,
        NAME,
        conventions=conventions,
        norm_hidden_twice=twice,
        norm_embeddings=has_norm,
        final_norm=bool(options.get("use_last_layernorm", True)) or "norm.weight" in keys,
        **differences,
    )
