"""Logits processors of a batch, called row by row."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import LogitsProcessorList

from ..grammar.mask import GrammarMask
from .processor_copies import copy_or_refuse, kept_whole
from .processor_kinds import ASKS_BY_ROW, HOLDS_CONTEXT, HOLDS_ROWS, NOTES_ROWS, READS_OWN_HISTORY, READS_SCORES_ONLY


def copies_per_row(processors: LogitsProcessorList, batch_size: int) -> list[LogitsProcessorList]:
    """
    Lists of processors, one per row of a batch, each called for that row alone. The first row has the user's own
    objects, the others have copies of processors that may hold state. What processors share, their copies share, too.
    Those that may tell rows apart, as a user's own may, see a batch of copies of the row, at its place among them too.

    Raises:
        ValueError: if a processor that may hold state cannot be copied.
    """
    shared = kept_whole(list(processors))
    memos = [dict(shared) for _ in range(batch_size)]
    return [
        LogitsProcessorList(_for_row(processor, row, batch_size, memo) for processor in processors)
        for row, memo in enumerate(memos)
    ]


def _for_row(processor: Any, row: int, batch_size: int, memo: dict[int, Any]) -> Any:
    kind = type(processor)
    if isinstance(processor, GrammarMask):
        return processor if row == 0 else processor.for_row()
    if kind in READS_OWN_HISTORY and isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):
        return _penalty_of_row(processor, row)
    if kind in READS_SCORES_ONLY or kind in READS_OWN_HISTORY:
        return processor
    if kind in HOLDS_ROWS:
        return _AsBatch(processor, row, batch_size)
    if kind in ASKS_BY_ROW:
        return _prefix_function_of_row(processor, row)
    if kind in HOLDS_CONTEXT:
        return _guidance_of_row(processor, row)
    if kind in NOTES_ROWS:
        return _SpeechOfRow(processor, row, batch_size)
    return _AsBatch(processor if row == 0 else _copy(processor, memo), row, batch_size)


def _copy(processor: Any, memo: dict[int, Any]) -> Any:
    remedy = "call `generate` with one sequence at a time"
    return copy_or_refuse(processor, memo, "logits_processor", "the rows of a batch", remedy)


class _AsBatch:
    """Calls a processor that may tell rows apart with a batch of copies of one row, and returns that row's result."""

    def __init__(self, processor: Any, row: int, batch_size: int):
        self.processor, self.row, self.batch_size = processor, row, batch_size

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        repeated = self.processor(input_ids.repeat(self.batch_size, 1), scores.repeat(self.batch_size, 1))
        return repeated[self.row : self.row + 1].clone()  # a view would hold the whole batch, in every row


class _SpeechOfRow:
    """
    Notes for one row how likely it is that nothing is spoken, in the processor that the rows share: Whisper reads the
    numbers of all rows there once the call is over. The scores stay as they are.
    """

    def __init__(self, processor: Any, row: int, batch_size: int):
        self.processor, self.row, self.batch_size = processor, row, batch_size

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        shared = self.processor
        if shared.start_of_trans_offset > 1:  # a forward over the whole batch tells, whatever the scores are
            return shared(input_ids, scores) if self.row == 0 else scores
        if input_ids.shape[1] == shared.begin_index:
            own = copy.copy(shared)
            own(input_ids, scores)
            if len(shared._no_speech_prob) != self.batch_size:
                shared._no_speech_prob = own._no_speech_prob.repeat(self.batch_size)
            shared._no_speech_prob[self.row] = own._no_speech_prob[0]
        return scores


def _prefix_function_of_row(processor: Any, row: int) -> Any:
    """The processor of a user's `prefix_allowed_tokens_fn` for one row, which passes that row's number to it."""
    ask = processor._prefix_allowed_tokens_fn
    return type(processor)(lambda _, input_ids: ask(row, input_ids), processor._num_beams)


def _penalty_of_row(processor: Any, row: int) -> Any:
    """A repetition penalty for one row; since transformers 5.23 it knows where the padding of every row ends."""
    own = copy.copy(processor)
    own.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
    return own


def _guidance_of_row(processor: Any, row: int) -> Any:
    """Classifier-free guidance for one row: the model is shared, the unconditional context is the row's own."""
    own = copy.copy(processor)
    own.unconditional_context = {
        key: value[row : row + 1] if isinstance(value, torch.Tensor) else value
        for key, value in processor.unconditional_context.items()
    }
    return own
