"""How large keys and values are, as a model's layers were seen to write them."""

from __future__ import annotations

from collections import Counter

import torch
from transformers import PreTrainedModel

from ..models.probe import layers_of
from ..models.probed_layers import CachedLayer
from ..models.structure import config_of_layer, execution_device
from ..states import layer_kinds_of, most_bytes, most_bytes_of_reading, recurrences_of
from ..states.served import bytes_of_pending, obstacle_to_kernels


def layer_sizes(model: PreTrainedModel, dtype: torch.dtype | None = None) -> dict[int, CachedLayer]:
    """
    Keys and values of one token, for each layer of a cache that the model writes to. Layers may differ, in heads and
    their sizes, keys from values, and what is cached may be a latent of both; layers that reuse the K/V of others have
    none. Measured once per model, by a forward without data; see `probe`.

    Args:
        model (`PreTrainedModel`): the model, on this process: with `tp_plan` the heads that it has here.
        dtype (`torch.dtype`, *optional*): the dtype in which it is going to run, if it is not its own.
    """
    layers = layers_of(model, dtype)
    return _by_config(model, dtype or model.dtype) if layers is None else layers.cached


def num_cached_layers(model: PreTrainedModel) -> int:
    """Number of layers of a cache that the model writes to; the last ones of a model may reuse the K/V of others."""
    kinds = layer_kinds_of(model)
    return len(kinds) if kinds is not None else 1 + max(layer_sizes(model))


def bytes_per_token(model: PreTrainedModel, dtype: torch.dtype | None = None) -> Counter[torch.device]:
    """Bytes of the keys and values of one token in all layers, on each device where layers run."""
    total: Counter[torch.device] = Counter()
    for layer in layer_sizes(model, dtype).values():
        total[layer.device] += layer.num_bytes
    return total


def bytes_of_states(model: PreTrainedModel, dtype: torch.dtype | None = None) -> Counter[torch.device]:
    """Bytes of the recurrent and convolutional states of one text, on each device where such layers run."""
    total: Counter[torch.device] = Counter()
    layers = layers_of(model, dtype)
    for layer in () if layers is None else layers.states.values():
        total[layer.device] += layer.num_bytes
    return total


def bytes_of_scans(
    model: PreTrainedModel, dtype: torch.dtype | None, rows: int, tokens: int, nodes: int
) -> Counter[torch.device]:
    """
    Most bytes that the recurrence of a layer takes meanwhile, on each device where such layers run.

    Args:
        model (`PreTrainedModel`): the model.
        dtype (`torch.dtype`, *optional*): the dtype in which it is going to run, if it is not its own.
        rows (`int`): most rows of a forward.
        tokens (`int`): most prompt tokens of a forward, all rows together.
        nodes (`int`): nodes of each row in a step, root included.
    """
    most: Counter[torch.device] = Counter()
    layers = layers_of(model, dtype)
    if layers is None:
        return most
    for index, recurrence in recurrences_of(model).items():
        layer = layers.states.get(index)
        if layer is None:
            continue
        state = layer.tensors[-1][0]
        widths = {min(recurrence.block, width) for width in (max(tokens // rows, 1), tokens)}
        of_prompts = [most_bytes(recurrence, state, min(rows, -(-tokens // width)), width) for width in widths]
        if layer.device.type != "cpu":
            of_prompts.append(most_bytes_of_reading(recurrence, state, rows, tokens))
        most[layer.device] = max(most[layer.device], most_bytes(recurrence, state, rows, nodes), *of_prompts)
    return most


def bytes_of_steps(model: PreTrainedModel, dtype: torch.dtype | None = None) -> Counter[torch.device]:
    """Bytes of what the nodes of a forward leave pending of one text's states, where kernels compute these."""
    if layer_kinds_of(model) is None or obstacle_to_kernels(model, dtype) is not None:
        return Counter()
    return bytes_of_pending(model, dtype)


def _by_config(model: PreTrainedModel, dtype: torch.dtype) -> dict[int, CachedLayer]:
    """The usual sizes, of a model that cannot be measured."""
    config = model.config.get_text_config(decoder=True)
    found = {}
    for index in range(config.num_hidden_layers):
        one = config_of_layer(config, index)
        heads = getattr(one, "num_key_value_heads", None) or one.num_attention_heads
        size = getattr(one, "head_dim", None) or one.hidden_size // one.num_attention_heads
        found[index] = CachedLayer((heads, size), (heads, size), dtype, dtype, execution_device(model))
    return found
