"""What an assistant of Gemma 4 predicts along a text, from the keys and values that its target has of the text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache, PreTrainedModel

from ..compat import CACHE
from ..drafters.gemma import shared_layers
from ..gemma import GemmaAssistant
from ..gemma.modeling_gemma import SharedKV
from ..models.structure import keeping_one_logit


if TYPE_CHECKING:
    from .along_text import Logits, Rows

MOST_ROOTS = 64
"""Most chains of one forward."""
TextKV = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""By kind of layer, keys and values of a text, `[1, kv_heads, tokens, head_dim]`."""


def read_text(target: PreTrainedModel, ids: torch.Tensor) -> TextKV:
    """Forwards the target over a text, `[tokens]`, and returns what its assistants attend to, on the CPU."""
    cache = DynamicCache()  # without a config: no layer drops anything
    target(ids[None], use_cache=True, **{CACHE: cache}, **keeping_one_logit(target))
    sources = shared_layers(target)
    return {
        kind: (cache.layers[index].keys.cpu(), cache.layers[index].values.cpu()) for kind, index in sources.items()
    }


def assistant_logits(assistant: GemmaAssistant, rows: Rows) -> Iterator[Logits]:
    """
    See `logits_along`: chains from every root, each over the text before it, and at one position.

    Args:
        rows (`Rows`): what is read along the text, with `shared`.
    """
    found = [list(_chains(assistant, rows, roots)) for roots in rows.roots.split(MOST_ROOTS)]
    for step in zip(*found, strict=True):
        logits = torch.cat(step)
        yield logits, logits


def _chains(assistant: GemmaAssistant, rows: Rows, roots: torch.Tensor) -> Iterator[torch.Tensor]:
    """The logits of every step of the chains from some roots, `[roots, vocab]`."""
    slots, shared = torch.arange(len(rows.ids), device=roots.device), {}
    for kind in assistant.layer_kinds:
        keys, values = (states.to(assistant.device, assistant.dtype) for states in rows.shared[kind])
        window, mask = assistant.window(kind), slots < roots[:, None]
        if window is not None:
            mask &= slots >= roots[:, None] - window
        shape = (len(roots), -1, -1, -1)
        shared[kind] = SharedKV(keys.expand(shape), values.expand(shape), mask[:, None, None])
    positions = (roots - int(assistant.config.position_of_feature)).clamp(min=0)[:, None]
    states = rows.features[0, roots - 1][:, None]
    for step in range(rows.depth):
        output = assistant(states, rows.embed(rows.ids[roots + step])[:, None], positions, shared)
        states = output.hidden_states
        yield output.logits[:, 0]
