"""The format of SpecForge (sgl-project): SafeAILab's keys, layer ids and options in `eagle_config`."""

from __future__ import annotations

from .checkpoint import Checkpoint
from .keys import Keys
from .reading import Reading, section
from .safeailab import read_either


NAME = "specforge"
_RENAMED = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


def matches(checkpoint: Checkpoint) -> bool:
    """Whether the architecture is named as SpecForge does; ModelOpt's, of the same name, are told by their options."""
    return "LlamaForCausalLMEagle3" in (checkpoint.config.get("architectures") or ())


def read(checkpoint: Checkpoint) -> Reading:
    """`norm_output` means here that a norm comes before the lm_head, which is always so: what is fed back is not."""
    published = checkpoint.config
    ids = section(published, "eagle_config", checkpoint.name).get("eagle_aux_hidden_state_layer_ids")
    conventions = {}
    if "norm_output" in published:
        conventions["norm_output"] = "the state fed back is not normed: in this format the word means the last norm"
    return read_either(Keys(checkpoint, _RENAMED), published, NAME, conventions=conventions, aux_layer_ids=ids or None)
