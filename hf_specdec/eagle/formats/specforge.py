"""The format of SpecForge (sgl-project): SafeAILab's keys, layer ids and options in `eagle_config`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...checkpoints.keys import Keys
from ...checkpoints.published import PublishedHead, section
from ...checkpoints.reading import Checkpoint
from ...checkpoints.target_files import TargetFiles
from ...checkpoints.writing import Writing, check_expressible, layer_fields, outer_rope
from .safeailab import read_either
from .writing import PLAIN_EAGLE3, PLAIN_LAYERS, boundaries, eagle3_weights


if TYPE_CHECKING:
    from ..modeling_eagle import EagleHead

NAME = "specforge"
_RENAMED = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
# Our own key, which SGLang and vLLM ignore: the numbering of the layers. Without it, the numbers have to decide.
_CONVENTION = "hf_specdec_aux_layer_convention"


def matches(checkpoint: Checkpoint) -> bool:
    """Whether the config names SpecForge's architecture, as ModelOpt's does, whose options are looked for before."""
    return "LlamaForCausalLMEagle3" in (checkpoint.config.get("architectures") or ())


def read(checkpoint: Checkpoint) -> PublishedHead:
    """
    Reads a head in SpecForge's format, in which `norm_output` means that a norm comes before the lm_head; the state
    that is fed back is never normed. Where `norm_output` is false, the file holds that norm all the same, as it was
    initialized (ones). Other libraries use SpecForge's architecture name with vLLM's meaning of `norm_output`, so a
    norm that was trained is used in any case.
    """
    published, keys = checkpoint.config, Keys(checkpoint, _RENAMED)
    options = section(published, "eagle_config", checkpoint.name)
    conventions, has_norm = {}, True
    if "norm_output" in published:
        conventions["norm_output"] = "the state fed back is not normed: in this format the word means the last norm"
        norm = keys.weights.get("norm.weight")
        has_norm = bool(published["norm_output"]) or (norm is not None and not bool((norm == 1).all()))
    if not has_norm:
        conventions["final_norm"] = "none: `norm_output` is false, and the norm in the file was never trained"
        keys.drop("norm.weight")
    return read_either(
        keys,
        published,
        NAME,
        conventions=conventions,
        final_norm=has_norm,
        aux_layer_ids=options.get("eagle_aux_hidden_state_layer_ids") or None,
        aux_layer_convention=options.get(_CONVENTION, "auto"),
    )


def write(head: EagleHead, target: TargetFiles | None = None) -> Writing:
    """
    The head as SpecForge exports heads for SGLang; layer ids are written as layer outputs.

    Raises:
        ValueError: if the format cannot express the head, or needs the target.
    """
    config, layers = head.config, head.config.text_config
    remedy = "Write it as speculators or hf_specdec."
    check_expressible(config, PLAIN_EAGLE3 | {"fc_norm": (False, True), "num_aux_features": 3}, NAME, remedy)
    check_expressible(layers, PLAIN_LAYERS | {"num_hidden_layers": 1}, NAME, remedy)
    fields = {"architectures": ["LlamaForCausalLMEagle3"]} | layer_fields(layers, head.dtype)
    fields |= outer_rope(layers.rope_parameters) | {"draft_vocab_size": config.num_draft_tokens}
    if config.fc_norm:
        fields["fc_norm"] = True
    if config.target_hidden_size != config.hidden_size:
        fields["target_hidden_size"] = config.target_hidden_size
    read = boundaries(config, target)
    if read is not None:
        if read[0] == 0:
            raise ValueError(
                f"`aux_layer_ids`={config.aux_layer_ids}: the format {NAME} cannot say so; it knows outputs of "
                f"layers, and boundary 0 is the embeddings. {remedy}"
            )
        fields["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in read],
            "use_aux_hidden_state": True,
            _CONVENTION: "outputs",
        }
    return Writing(fields, eagle3_weights(head, target, "midlayer.", NAME))
