"""Small draft language models, distilled from the target."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..eagle.unroll import upcast
from .losses import masked_mean, soft_cross_entropy
from .metrics import counts_by_depth
from .reading import TargetOutputs


logger = logging.get_logger(__name__)


class DistillObjective(nn.Module):
    """
    Distillation loss: (1 − hard) · soft cross-entropy against the target's logits + hard · cross-entropy against the
    text's tokens.

    Args:
        model (`PreTrainedModel`): the draft model; it has the target's vocabulary.
        num_steps (`int`, *optional*, defaults to 5): depths that the acceptance length counts. A language model reads
            its own draft tokens exactly, so top-1 is taken as equal at every depth.
        hard (`float`, *optional*, defaults to 0.1): weight of the cross-entropy against the text's tokens.
        packed (`bool`, *optional*, defaults to `False`): whether rows hold several texts.
    """

    def __init__(self, model: PreTrainedModel, num_steps: int = 5, hard: float = 0.1, packed: bool = False):
        super().__init__()
        self.model = model
        self.num_steps, self.hard, self.packed = num_steps, hard, packed

    def forward(
        self,
        outputs: TargetOutputs,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        position_ids: torch.Tensor,
        segment_ids: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """See `TttObjective.forward`; `counts` are the same at each of the `num_steps` depths."""
        positions = {"position_ids": position_ids} if self.packed else {}
        logits = self.model(input_ids=input_ids, use_cache=False, **positions).logits[:, :-1]
        mask = loss_mask[:, 1:]
        if segment_ids is not None:
            mask = mask & (segment_ids[:, 1:] == segment_ids[:, :-1])
        soft, predicted = soft_cross_entropy(logits, _as_they_are, outputs.logits[:, :-1])
        loss = masked_mean(soft, mask)
        if self.hard:
            tokens = torch.where(mask, input_ids[:, 1:], -100)
            summed = F.cross_entropy(upcast(logits).flatten(0, 1), tokens.flatten(), reduction="sum")
            loss = (1 - self.hard) * loss + self.hard * summed / mask.sum().clamp(min=1)
        right = (predicted == outputs.best[:, :-1]) & mask
        counts = counts_by_depth([(right, mask, soft * mask, mask)])
        return {"loss": loss, "counts": counts.repeat(1, 1, self.num_steps)}


def _as_they_are(logits: torch.Tensor) -> torch.Tensor:
    return logits


def new_draft_model(
    target: PreTrainedModel,
    *,
    num_layers: int = 2,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
) -> PreTrainedModel:
    """
    An untrained small model of the target's architecture and vocabulary, in float32.

    A model of the target's width starts from the target's embeddings, lm_head, final norm, and layers chosen evenly
    from first to last. A narrower model starts from the target's embeddings projected on their principal components,
    in the target's scale; the rest is random.

    Args:
        target (`PreTrainedModel`): the target.
        num_layers (`int`, *optional*, defaults to 2): decoder layers.
        hidden_size (`int`, *optional*): defaults to the target's. Must hold whole attention heads.
        intermediate_size (`int`, *optional*): width of the MLP; defaults to the target's, scaled with `hidden_size`.

    Raises:
        ValueError: for sizes that the architecture cannot have.
    """
    config = draft_config(target.config.get_text_config(decoder=True), num_layers, hidden_size, intermediate_size)
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        if config.hidden_size == target.get_input_embeddings().weight.shape[1]:
            _copy_layers(target, model)
        else:
            _project_embeddings(target, model)
    model.generation_config = copy.deepcopy(target.generation_config)
    return model


def draft_config(
    config: PreTrainedConfig, num_layers: int, hidden_size: int | None, intermediate_size: int | None
) -> PreTrainedConfig:
    """The target's `config` with other sizes. Raises `ValueError` for sizes that the architecture cannot have."""
    whole = config.num_hidden_layers
    if not 1 <= num_layers <= whole:
        raise ValueError(f"`num_layers`={num_layers}: choose 1 … {whole}, the layers of the target.")
    small = copy.deepcopy(config)
    vars(small).pop("_model_name_or_path", None)  # the draft is not the model that this names
    small.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        small.layer_types = [config.layer_types[layer] for layer in _spread(num_layers, whole)]
    if config.is_heterogeneous:
        _choose_layers(small, config, num_layers)
    if hidden_size is not None and hidden_size != config.hidden_size:
        if config.is_heterogeneous:
            raise ValueError(
                f"`hidden_size`={hidden_size}: the attention heads of the target differ from layer to layer, and a "
                "narrower draft has none like them. Leave it out."
            )
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if hidden_size % head_dim or hidden_size < head_dim or hidden_size > config.hidden_size:
            raise ValueError(
                f"`hidden_size`={hidden_size}: choose a multiple of {head_dim}, the size of the target's attention "
                f"heads, up to the target's {config.hidden_size}."
            )
        heads = hidden_size // head_dim
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        heads_per_kv_head = config.num_attention_heads // kv_heads
        small.hidden_size, small.num_attention_heads = hidden_size, heads
        if hasattr(config, "num_key_value_heads"):
            small.num_key_value_heads = heads // heads_per_kv_head if heads % heads_per_kv_head == 0 else 1
        if hasattr(config, "head_dim"):
            small.head_dim = head_dim
        scaled = config.intermediate_size * hidden_size // config.hidden_size
        intermediate_size = intermediate_size or max(8, scaled // 8 * 8)
    if intermediate_size is not None:
        small.intermediate_size = intermediate_size
    return small


def _choose_layers(small: PreTrainedConfig, config: PreTrainedConfig, num_layers: int) -> None:
    """Gives the layers of a small config what is particular to the layers that they are copied from."""
    particular = config._heterogeneity_spec.per_layer_overrides
    chosen = enumerate(_spread(num_layers, config.num_hidden_layers))
    small.per_layer_config = {layer: particular[source] for layer, source in chosen if source in particular} or None


def _spread(number: int, whole: int) -> list[int]:
    """Indices of `number` of `whole` layers, evenly spaced, with the first and (from two on) the last."""
    if number == 1:
        return [0]
    return [round(index * (whole - 1) / (number - 1)) for index in range(number)]


def _copy_layers(target: PreTrainedModel, model: PreTrainedModel) -> None:
    """Copies every weight of equal shape; layer i of the draft comes from layer `_spread(…)[i]` of the target."""
    whole = target.config.get_text_config(decoder=True).num_hidden_layers
    chosen = _spread(model.config.num_hidden_layers, whole)
    weights = target.state_dict()
    for name, parameter in model.state_dict().items():
        parts = name.split(".")
        numbers = [index for index, part in enumerate(parts) if part.isdigit()]
        if numbers:
            parts[numbers[0]] = str(chosen[int(parts[numbers[0]])])
        source = weights.get(".".join(parts))
        if source is not None and source.shape == parameter.shape:
            parameter.copy_(source)
        else:
            logger.warning(f"{name} of the draft model begins at random: the target has no such weight.")


def _project_embeddings(target: PreTrainedModel, model: PreTrainedModel) -> None:
    """Projects the input embeddings, and an untied lm_head, each on its own leading principal components."""
    pairs = [(target.get_input_embeddings(), model.get_input_embeddings())]
    if not model.config.tie_word_embeddings:
        pairs.append((target.get_output_embeddings(), model.get_output_embeddings()))
    for source, destination in pairs:
        wide = source.weight.float()
        components = torch.linalg.eigh(wide.T @ wide).eigenvectors
        narrow = wide @ components[:, -destination.weight.shape[1] :]
        destination.weight.copy_((narrow * (wide.std() / narrow.std())).to(destination.weight))
