"""Decoders of the BART kind: they take no positions, but read those of their slots from a table."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..compat import LENGTH_NAMES


def position_table_of(model: PreTrainedModel) -> nn.Embedding | None:
    """
    The table of positions of a decoder that asks it for as many rows as there are tokens, from the number of those
    before them on; None for a decoder without one.
    """
    if model.config.model_type == "led":  # behind padding its logits are not those of plain `generate`
        return None
    decoder: Any = getattr(model, "get_decoder", lambda: None)()
    table = getattr(decoder, "embed_positions", None)
    if not isinstance(table, nn.Embedding):
        return None
    return None if LENGTH_NAMES.isdisjoint(inspect.signature(table.forward).parameters) else table


@contextmanager
def _weights_in_place(module: Any) -> Iterator[None]:
    """A context in which a module that accelerate offloads has its weights, as during its forward."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        yield
        return
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)


@contextmanager
def rows_at(table: nn.Embedding, positions: torch.Tensor) -> Iterator[None]:
    """
    A context in which a table gives this thread the rows of `positions`, `[batch, tokens]`, whatever it is asked for.
    """
    thread = threading.get_ident()

    def rows(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if threading.get_ident() != thread:
            return None
        with _weights_in_place(module):
            places = positions.to(module.weight.device) + getattr(module, "offset", 0)
            return nn.functional.embedding(places, module.weight).to(output.device)

    def first_row(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Slots of nodes may lie past the end of the table."""
        if threading.get_ident() != thread:
            return None
        asked = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        asked |= dict.fromkeys(LENGTH_NAMES & asked.keys(), 0)
        if asked.get("position_ids") is not None:
            asked["position_ids"] = torch.zeros_like(asked["position_ids"])
        return (), asked

    handles = [table.register_forward_pre_hook(first_row, with_kwargs=True), table.register_forward_hook(rows)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
