"""
The format of AngelSlim (Tencent): SafeAILab's EAGLE-3 keys, and a config that may claim tied embeddings, which the
lm_head over the draft vocabulary rules out.
"""

from __future__ import annotations

from ...checkpoints.keys import Keys
from ...checkpoints.published import PublishedHead
from ...checkpoints.reading import Checkpoint
from .safeailab import read_either


NAME = "angelslim"


def matches(checkpoint: Checkpoint) -> bool:
    """Whether the config names AngelSlim's architecture."""
    return "Eagle3LlamaForCausalLM" in (checkpoint.config.get("architectures") or ())


def read(checkpoint: Checkpoint) -> PublishedHead:
    """Reads an EAGLE-3 head, with embeddings of its own if the checkpoint has any."""
    conventions = {}
    if checkpoint.config.get("tie_word_embeddings"):
        conventions["tie_word_embeddings"] = "ignored: the lm_head has the rows of the draft vocabulary"
    keys = Keys(checkpoint, {"midlayer.": "layers.0."})
    return read_either(keys, checkpoint.config, NAME, conventions=conventions)
