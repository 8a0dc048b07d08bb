"""
The format of NVIDIA ModelOpt: `layers.0.*` (older versions: `midlayer.*`), `d2t` alone, options in `eagle_config`.

Versions from 0.41 on compute `hidden_norm(input_layernorm(h))` in the first layer, older ones (and the servers that
load such files) `hidden_norm(h)`. The files tell their version: up to 0.40 `midlayer.*`; 0.41 and 0.42 `midlayer.*`
and the option `next_layer_regular`; from 0.43 on `layers.0.*`.
"""

from __future__ import annotations

from .checkpoint import Checkpoint
from .reading import Keys, Reading
from .safeailab import read_eagle3


NAME = "modelopt"
_OPTIONS = ("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm", "next_layer_regular")


def matches(checkpoint: Checkpoint) -> bool:
    """Whether the config holds options that only ModelOpt writes."""
    options = checkpoint.config.get("eagle_config") or {}
    return any(name in options for name in _OPTIONS)


def read(checkpoint: Checkpoint) -> Reading:
    """
    Raises:
        ValueError: for heads that draft several tokens at once or have norms of another kind.
    """
    published, options = checkpoint.config, checkpoint.config["eagle_config"]
    if options.get("parallel_draft_step", 1) > 1:
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
    twice = not (is_old and "next_layer_regular" not in options)
    has_norm = any(
        key.endswith("0.input_layernorm.weight") or key == "midlayer.input_layernorm.weight"
        for key in checkpoint.weights
    )
    conventions = {
        "norm_hidden_twice": (
            "true: the head is of version 0.41 or newer, whose own module does so"
            if twice
            else "false: the head is of version 0.40 or older"
        )
    }
    differences = {}
    if not options.get("use_aux_hidden_state", True):
        differences["num_aux_features"] = 0
        conventions["features"] = (
            "the target's last hidden state after its final norm: `use_aux_hidden_state` is false"
        )
    return read_eagle3(
        Keys(checkpoint, {"midlayer.": "layers.0."}),
        published,
        NAME,
        conventions=conventions,
        aux_layer_ids=options.get("eagle_aux_hidden_state_layer_ids") or None,
        norm_hidden_twice=twice and has_norm,
        norm_embeddings=has_norm,
        **differences,
    )
