"""How many positions a model knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .asked_once import asked_once


TABLES = frozenset(
    {
        "embed_positions",
        "pos_emb",
        "pos_encoding",
        "position_embedding",
        "position_embeddings",
        "position_embeds_layer",
        "positions_embed",
        "wpe",
    }
)
"""Names that models give to their table of positions, be it a module or a tensor."""
GROWS_BY = ("make_weights", "_set_cos_sin_cache")
"""Methods by which a table computes more rows when a text needs them."""


@asked_once
def num_positions(model: PreTrainedModel) -> int | None:
    """
    Number of positions that a model's forward knows: 0 to one fewer. A token at any other is an index error. None for
    a model that computes what it needs of a position, as rotary embeddings do, whatever `max_position_embeddings` of
    its config says.

    Tables are learned (GPT-2, OPT, BioGPT, BERT) or hold sines (CTRL, GPT-J, CodeGen). Their own rows count: a config
    may say something else, and OPT's and BioGPT's tables begin with two rows of no position.
    """
    model = getattr(model, "_orig_mod", model)
    said = said_positions(model)
    rows = [said if found is None else found for found in _rows_of_tables(model.get_decoder(), said)]
    return min((found for found in rows if found is not None), default=None)


def last_position(model: PreTrainedModel) -> int | None:
    """The last position that a model knows, see `num_positions`; None for a model that knows any."""
    known = num_positions(model)
    return None if known is None else known - 1


def may_refuse(model: PreTrainedModel, shortest: int, longest: int, depth: int) -> bool:
    """
    Whether a forward may have failed because some of its nodes are past the positions of the model's config: code of a
    user's own may refuse these, though it holds no table.

    Args:
        model (`PreTrainedModel`): the model.
        shortest, longest (`int`): positions taken by the shortest text, whose last token is not past them, and by the
            longest one.
        depth (`int`): levels of nodes below the last tokens.
    """
    said = said_positions(model)
    return said is not None and shortest <= said < longest + depth


def said_positions(model: PreTrainedModel) -> int | None:
    """Number of positions in the model's config, which may be a mere recommendation; see `num_positions`."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def _rows_of_tables(module: nn.Module, said: int | None) -> Iterator[int | None]:
    """
    Rows of all tables in a module, None where they cannot be counted. Of a list of layers, the first stands for all.
    """
    if not _grows(module):
        tensors = module._parameters | module._buffers | vars(module)
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and (name in TABLES or _has_a_row_per_position(module, name, said)):
                yield _rows(tensor)
    for name, child in module._modules.items():
        if child is None or _sees_or_hears(child):
            continue
        if name in TABLES:
            yield from _rows_of_table(child)
        elif isinstance(child, nn.ModuleList):
            for layer in list(child)[:1]:
                yield from _rows_of_tables(layer, said)
        else:
            yield from _rows_of_tables(child, said)


def _rows_of_table(table: nn.Module) -> Iterator[int | None]:
    """Rows of a table that is a module, which an adapter may have wrapped. Nothing for one that grows."""
    parts: list[Any] = list(table.modules())
    if any(map(_grows, parts)):
        return
    weights = [weight for name, weight in table.named_parameters() if name.endswith("weight") and "lora_" not in name]
    weights = [weight for weight in weights if weight.dim() > 1 and weight.shape[0] > 0]
    if not weights and any(name.endswith("inv_freq") for name, _ in table.named_buffers()):  # it computes them
        return
    if not weights:  # sharded or quantized
        yield None
        return
    offsets = [getattr(part, "offset", None) for part in parts]
    offset = next((one for one in offsets if isinstance(one, int)), 0)
    yield min(weight.shape[0] for weight in weights) - offset


def _rows(tensor: torch.Tensor) -> int | None:
    return tensor.shape[-2] if tensor.dim() > 1 else None


def _has_a_row_per_position(module: nn.Module, name: str, said: int | None) -> bool:
    """Whether a buffer holds a row for every position of the config, as a table of cosines does; no mask does."""
    tensor = module._buffers.get(name)
    if tensor is None or tensor.dim() < 2 or not tensor.is_floating_point():
        return False
    return tensor.shape[-2] == said != tensor.shape[-1]


def _grows(module: nn.Module) -> bool:
    return any(hasattr(module, name) for name in GROWS_BY)


def _sees_or_hears(module: nn.Module) -> bool:
    """Whether a part of a model reads images or sound, whose positions are no text's."""
    return isinstance(module, PreTrainedModel) and module.main_input_name != "input_ids"
