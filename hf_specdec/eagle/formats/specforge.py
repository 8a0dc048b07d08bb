"""The format of SpecForge (sgl-project): SafeAILab's keys, layer ids and options in `eagle_config`."""

from __future__ import annotations

from .checkpoint import Checkpoint
from .reading import Keys, Reading
from .safeailab import read_eagle3


NAME = "specforge"


def matches(checkpoint: Checkpoint) -> bool:
    """Whether the architecture is named as SpecForge does; ModelOpt's, of the same name, are told by their options."""
    return "LlamaForCausalLMEagle3" in (checkpoint.config.get("architectures") or ())


def read(checkpoint: Checkpoint) -> Reading:
    """`norm_output` means here that a norm comes before the lm_head, which is always so: what is fed back is not."""
    keys = Keys(
        checkpoint,
        {
            "midlayer.": "layers.0.",
            "aux_norm_low.": "fc_norm.0.",
            "aux_norm_mid.": "fc_norm.1.",
            "aux_norm_high.": "fc_norm.2.",
        },
    )
    published = checkpoint.config
    ids = (published.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    conventions = {}
    if "norm_output" in published:
        conventions["norm_output"] = "the state fed back is not normed: in this format the word means the last norm"
    return read_eagle3(keys, published, NAME, conventions=conventions, aux_layer_ids=ids)
