"""Chunked prefill of a call's prompts, in chunks of the widths of `forwards.chunks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import ModelOutput

from ..forwards.chunks import MOST_PADDED, WIDTHS, busy_at, next_chunk
from ..models.modules import num_parameters_of
from ..models.prompt_masks import longest_in_chunks
from ..models.rope import length_dependent_ropes


if TYPE_CHECKING:
    from .target import Target


def can_prefill_in_chunks(target: Target) -> bool:
    """
    Whether the prompts of a call can be prefilled in chunks of `WIDTHS`: they are tokens, without padding or a cache
    before them, too few to keep the device busy, and read by a model whose layers attend with the kernel and for which
    chunks compute the same as one long forward.
    """
    sequences, storage, forward = target.sequences, target.cache.storage, target.forward
    positions = target.model_kwargs.get("position_ids")
    length, most = sequences.prompt_length, longest_in_chunks(target.model)
    return (
        storage is not None
        and storage.works
        and not target.was_given_a_cache
        and not target.cache.state_layers  # they read a prompt as a text
        and forward.can_be_captured
        and forward.has_kernel
        and target.visible is None
        and target.generation_config.prefill_chunk_size is None
        and target.model_kwargs.get("inputs_embeds") is None
        and max(length, WIDTHS[-1]) <= storage.capacity
        and (length >= WIDTHS[0] or sequences.batch_size * WIDTHS[0] <= MOST_PADDED)
        and forward.takes_positions  # else padding would get positions past the end
        and not length_dependent_ropes(target.model.config.get_text_config(decoder=True))
        and sequences.batch_size * length < busy_at(num_parameters_of(target.model))
        and (positions is None or _are_counted(positions, length))
        and (most is None or length <= most)
    )


def _are_counted(positions: torch.Tensor, length: int) -> bool:
    """Whether positions (`[batch, length]`; no other shape) count 0, 1, 2, … in every row."""
    counted = torch.arange(length, device=positions.device)
    return positions.dim() == 2 and positions.shape[-1] == length and bool((positions == counted).all())


def prefill_in_chunks(target: Target) -> ModelOutput:
    """
    Prefills the prompts of a call in chunks of `WIDTHS`, where `can_prefill_in_chunks`. The output has the logits of
    the last position, `[batch, 1, vocab]`; `Features` records every token once, in order.
    """
    tokens, cache = target.sequences.columns(target.sequences.prompt_length), target.cache
    batch_size, length = tokens.shape
    padded = [width for width in WIDTHS if length <= width and batch_size * width <= MOST_PADDED]
    if padded and length < padded[0]:
        cache.set_lengths([0] * batch_size)
        outputs: Any = target.read_padded(tokens, [length] * batch_size, width=padded[0])
        if target.features is not None:
            target.features.keep_of_last(0, length)
        return outputs
    end = 0
    while end < length:
        width, count = next_chunk(length, length - end, WIDTHS)
        assert width is not None  # `can_prefill_in_chunks`
        end += count
        outputs = target.read_chunk(tokens[:, end - width : end], [end] * batch_size)
        if target.features is not None:
            target.features.keep_of_last(width - count, width)
    return outputs
