"""
Prompts in pieces of a few widths, so that their forwards can be graphs: the host takes longer to launch the forward of
a small model than the device to run it, also over some hundred tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import ModelOutput

from .forward import causal_chain
from .rope import length_dependent_ropes


if TYPE_CHECKING:
    from .target import Target

WIDTHS = (64, 256, 512)
"""Tokens of a piece."""
TOKENS_TIMES_PARAMETERS = 5 * 10**12
"""Of forwards that take a GPU of today 25 ms, at two operations for each and 400 TFLOP/s."""
MOST_PADDED = 512
"""Tokens of short prompts, padding included, that are forwarded as one piece: the logits of all are computed."""


def busy_at(num_parameters: int) -> int:
    """Tokens that a model of so many parameters busies the device with for as long as the host takes to launch it."""
    return TOKENS_TIMES_PARAMETERS // max(num_parameters, 1)


def next_piece(length: int, unread: int, widths: Sequence[int]) -> tuple[int | None, int]:
    """
    How many tokens of a text to forward next, and how many of them are unread: those before are forwarded once more,
    if that is a quarter at most, or there is no smaller width. None, and all, of a text shorter than any width.

    Args:
        length (`int`): of the text.
        unread (`int`): how many tokens at its end have not been forwarded.
        widths (`Sequence[int]`): rising.
    """
    for width in widths:
        if unread <= width <= length and (width == widths[0] or 4 * unread > 3 * width):
            return width, unread
    fitting = [width for width in widths if width <= unread]
    return (fitting[-1], fitting[-1]) if fitting else (None, unread)


def padded_piece(unread: int, widths: Sequence[int]) -> tuple[int, int]:
    """
    The same where padding may follow: a width, and how many of the unread tokens of a text to forward next. All, in
    the first width that they fill by more than half (or the narrowest, however few); else as many as fill the largest.
    """
    for width in widths:
        if unread <= width and (width == widths[0] or 2 * unread > width):
            return width, unread
    largest = max(width for width in widths if width <= unread)
    return largest, largest


def can_read_in_pieces(target: Target) -> bool:
    """
    Whether the prompts of a call can be read so: tokens alone, behind no cache, without padding, by a model whose
    layers attend by the kernel, and for which a piece is the same as a part of a longer forward.
    """
    sequences, storage, forward = target.sequences, target.cache.storage, target.forward
    positions = target.model_kwargs.get("position_ids")
    length = sequences.prompt_length
    return (
        storage is not None
        and storage.works
        and not target.was_given_a_cache
        and forward.can_be_captured
        and forward.has_kernel
        and target.visible is None
        and target.generation_config.prefill_chunk_size is None
        and target.model_kwargs.get("inputs_embeds") is None
        and max(length, WIDTHS[-1]) <= storage.capacity
        and (length >= WIDTHS[0] or sequences.batch_size * WIDTHS[0] <= MOST_PADDED)
        and forward.takes_positions  # else padding would be numbered past the end
        and not length_dependent_ropes(target.model.config.get_text_config(decoder=True))
        and sequences.batch_size * length < busy_at(target.model.num_parameters())
        and (positions is None or _are_counted(positions, length))
    )


def _are_counted(positions: torch.Tensor, length: int) -> bool:
    """Whether positions `[…, batch, length]` are those of tokens one after the other."""
    counted = torch.arange(length, device=positions.device)
    return positions.dim() == 2 and positions.shape[-1] == length and bool((positions == counted).all())


def read_in_pieces(target: Target) -> ModelOutput:
    """
    Forwards the prompts of a call for which `can_read_in_pieces`. The output has the logits of the last position,
    `[batch, 1, vocab]`; who watches hidden states finds them in order.
    """
    tokens, cache = target.sequences.columns(target.sequences.prompt_length), target.cache
    batch_size, length = tokens.shape
    padded = [width for width in WIDTHS if length <= width and batch_size * width <= MOST_PADDED]
    if padded and length < padded[0]:
        return _read_padded(target, tokens, padded[0])
    outputs: Any = None
    end = 0
    while end < length:
        width, count = next_piece(length, length - end, WIDTHS)
        assert width is not None  # `can_read_in_pieces`
        end += count
        cache.set_lengths([end - width] * batch_size)
        chain = causal_chain(width, tokens.device)
        outputs = target.forward(tokens[:, end - width : end], *chain, logits_to_keep=1)
        outputs.logits = outputs.logits[:, -1:]
        if target.features is not None:
            target.features.keep_of_last(width - count, width)
    cache.set_lengths([length] * batch_size)
    return outputs


def _read_padded(target: Target, tokens: torch.Tensor, width: int) -> ModelOutput:
    """Prompts shorter than a width: behind them, their last token again, which nobody attends to."""
    length = tokens.shape[1]
    target.cache.set_lengths([0] * len(tokens))
    depths = torch.arange(width, device=tokens.device).clamp(max=length - 1)
    outputs = target.forward(
        tokens[:, depths], *causal_chain(width, tokens.device), position_depths=depths[None], logits_to_keep=0
    )
    outputs.logits = outputs.logits[:, length - 1 : length]
    target.cache.set_lengths([length] * len(tokens))
    if target.features is not None:
        target.features.keep_of_last(0, length)
    return outputs
