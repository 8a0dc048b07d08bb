"""
Chunked prefill in a few widths, so that its forwards can be replayed from captured CUDA graphs: for a small model, the
host takes longer to launch a forward than the device to run it, even over some hundred tokens.
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
"""Widths of chunks, in tokens per row."""
TOKENS_TIMES_PARAMETERS = 5 * 10**12
"""Tokens times parameters of a forward that takes a current GPU 25 ms, at two operations for each and 400 TFLOP/s."""
MOST_PADDED = 512
"""Most tokens of short prompts, over all rows and with padding, in one padded chunk: it computes the logits of all."""


def busy_at(num_parameters: int) -> int:
    """Tokens from which on a forward of a model of this size takes the device longer than the host to launch it."""
    return TOKENS_TIMES_PARAMETERS // max(num_parameters, 1)


def next_piece(length: int, unread: int, widths: Sequence[int]) -> tuple[int | None, int]:
    """
    The width of a text's next chunk, and how many of its tokens are unread. A last chunk may begin with tokens that
    were forwarded before, if these are less than a quarter of it or there is no smaller width. A text shorter than any
    width gives None and `unread`.

    Args:
        length (`int`): tokens of the text.
        unread (`int`): tokens at the end of the text that have not been forwarded.
        widths (`Sequence[int]`): widths of chunks, ascending.
    """
    for width in widths:
        if unread <= width <= length and (width == widths[0] or 4 * unread > 3 * width):
            return width, unread
    fitting = [width for width in widths if width <= unread]
    return (fitting[-1], fitting[-1]) if fitting else (None, unread)


def padded_piece(unread: int, widths: Sequence[int]) -> tuple[int, int]:
    """
    The width of a text's next chunk where padding may follow, and how many unread tokens it holds: all, in the first
    width that they fill by more than half (or the narrowest, however few); else as many as fill the largest width that
    they can fill.
    """
    for width in widths:
        if unread <= width and (width == widths[0] or 2 * unread > width):
            return width, unread
    largest = max(width for width in widths if width <= unread)
    return largest, largest


def can_read_in_pieces(target: Target) -> bool:
    """
    Whether the prompts of a call can be prefilled in chunks of `WIDTHS`: they are tokens, without padding or a cache
    before them, too few to keep the device busy, and read by a model whose layers attend with the kernel and for which
    chunks compute the same as one long forward.
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
        and forward.takes_positions  # else padding would get positions past the end
        and not length_dependent_ropes(target.model.config.get_text_config(decoder=True))
        and sequences.batch_size * length < busy_at(target.model.num_parameters())
        and (positions is None or _are_counted(positions, length))
    )


def _are_counted(positions: torch.Tensor, length: int) -> bool:
    """Whether positions (`[batch, length]`; no other shape) count 0, 1, 2, … in every row."""
    counted = torch.arange(length, device=positions.device)
    return positions.dim() == 2 and positions.shape[-1] == length and bool((positions == counted).all())


def read_in_pieces(target: Target) -> ModelOutput:
    """
    Prefills the prompts of a call in chunks of `WIDTHS`, where `can_read_in_pieces`. The output has the logits of the
    last position, `[batch, 1, vocab]`; `Features` records every token once, in order.
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
    """Prefills prompts shorter than `width`, right-padded with copies of their last token (unseen by the prompt)."""
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
