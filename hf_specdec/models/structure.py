"""What a model's forward takes, and where it runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .asked_once import asked_once
from .position_tables import position_table_of


@asked_once
def forward_parameters(model: PreTrainedModel) -> set[str]:
    """
    Names of the arguments that the model's forward takes (the forward of a compiled model names none). Where a wrapper
    replaces `forward` on the instance and passes on any keyword arguments, as tracing tools do, these are also the
    arguments that the forward of the model's class takes.
    """
    model = getattr(model, "_orig_mod", model)
    parameters = inspect.signature(model.forward).parameters
    names = set(parameters)
    passes_all = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if passes_all and "forward" in vars(model):
        names |= set(inspect.signature(type(model).forward).parameters)
    return names


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether tokens can be given positions: as an argument of the forward, or in place of those that it counts."""
    return names_positions(model) or position_table_of(model) is not None


def names_positions(model: PreTrainedModel) -> bool:
    """Whether the forward names positions among its arguments."""
    name = "decoder_position_ids" if model.config.is_encoder_decoder else "position_ids"
    return name in forward_parameters(model)


def num_decoder_layers(model: PreTrainedModel) -> int:
    """Number of layers of the decoder; `num_hidden_layers` of a decoder without its encoder may be the encoder's."""
    own = (getattr(model.config, name, None) for name in ("decoder_layers", "num_decoder_layers"))
    return next(filter(None, own), None) or model.config.get_text_config(decoder=True).num_hidden_layers


def config_of_layer(config: PreTrainedConfig, layer: int = 0) -> PreTrainedConfig:
    """The config that holds for one layer; layers of Gemma 4, for one, differ in their heads."""
    return config.per_layer_config[layer] if config.is_heterogeneous else config


def shares_kv(model: PreTrainedModel) -> bool:
    """Whether the model's last layers reuse the K/V of earlier layers, as in Gemma 3n and 4."""
    return bool(getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", None))


def keeps_encoder_apart(model: PreTrainedModel) -> bool:
    """
    Whether cross-attention to `encoder_hidden_states` has K/V of its own, in an `EncoderDecoderCache` beside those of
    the text, and no part in the mask of a tree, as in GPT-2 and in BLIP's decoder of text. Others write both into one
    cache, or fail in plain `generate`.
    """
    return model.config.model_type in ("gpt2", "blip_text_model")


def attends_to_images_apart(model: PreTrainedModel) -> bool:
    """Whether some layers attend to images alone, and are left out without any, as in Mllama."""
    return hasattr(model.config.get_text_config(decoder=True), "cross_attention_layers")


def inputs_of_every_step(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """
    Which of these arguments, given beside the tokens of a prompt, the model reads with every new token: those that its
    text model takes. Others, and the types of tokens, tell of the prompt alone.
    """
    decoder = getattr(model, "get_decoder", lambda: None)()
    of_text = set() if decoder is None else forward_parameters(decoder)
    if "pixel_values" in of_text:  # no text model of its own
        of_text = set()
    return [name for name in names if name in of_text and "token_type_ids" not in name]


def keeping_one_logit(model: PreTrainedModel) -> dict[str, Any]:
    """
    Keyword arguments for a prefill that needs the logits of the last position alone, but the hidden states of all.
    Gemma 4 (transformers 5.23) runs the layers that share K/V only at positions whose logits a number asks for; an
    index does not have that effect. (accelerate would move the index to the first layer's device, not the last's.)
    """
    if "logits_to_keep" not in forward_parameters(model):
        return {}
    if not shares_kv(model):
        return {"logits_to_keep": 1}
    return {"logits_to_keep": 0 if hasattr(model, "_hf_hook") else torch.tensor([-1], device="cpu")}


def num_embeddings_of(model: PreTrainedModel) -> int:
    """
    Number of tokens that have an embedding: rows of the weight, wherever a wrapper (of an adapter, say) has put it; by
    the config, where the weight is quantized or spread over processes.
    """
    return _rows_of(model.get_input_embeddings(), model)


def num_logits_of(model: PreTrainedModel) -> int:
    """Number of tokens that have a logit: rows of the lm_head, see `num_embeddings_of`."""
    head = model.get_output_embeddings()
    return model.config.get_text_config().vocab_size if head is None else _rows_of(head, model)


def _rows_of(module: nn.Module, model: PreTrainedModel) -> int:
    weights = [weight for name, weight in module.named_parameters() if name.rpartition(".")[2] == "weight"]
    rows = [len(weight) for weight in weights if weight.dim() == 2 and weight.is_floating_point()]
    is_whole = getattr(model, "_tp_size", None) in (None, 1)
    return max(rows) if rows and is_whole else model.config.get_text_config().vocab_size


def execution_device(model: PreTrainedModel) -> torch.device:
    """Device of a model's inputs: that of its weights, or the execution device of a model that accelerate offloads."""
    device = model.device
    if device.type == "meta":
        device = torch.device(getattr(getattr(model, "_hf_hook", None), "execution_device", None) or "cpu")
    return device


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """
    The model's decoder layers, from first to last.

    Raises:
        ValueError: if the decoder has no list of its layers.
    """
    number = num_decoder_layers(model)
    for module in model.get_decoder().children():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            return module
    raise ValueError(
        f"`assistant_model`: {type(model).__name__} has no list of its {number} decoder layers, from which a head "
        "reads hidden states. Use a draft model or `NgramDraft()`."
    )
