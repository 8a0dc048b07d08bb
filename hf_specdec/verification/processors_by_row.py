"""Logits processors of a batch, called row by row."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase

from .copying import deep_copy, kept_whole
from .processor_kinds import ASKS_BY_ROW, HOLDS_CONTEXT, HOLDS_ROWS, READS_OWN_HISTORY, READS_SCORES_ONLY


def copies_per_row(processors: LogitsProcessorList, batch_size: int) -> list[LogitsProcessorList]:
    """
    Lists of processors, one per row of a batch, each called with that row alone. The first row has the user's own
    objects, the others have copies of processors that may hold state. What processors share, their copies share, too.

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
    # 5.23's repetition penalty knows where the padding of every row ends.
    knows_padding = isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)
    if kind in READS_SCORES_ONLY or (kind in READS_OWN_HISTORY and not knows_padding):
        return processor
    if kind in HOLDS_ROWS or kind in READS_OWN_HISTORY:
        return _AsBatch(processor, row, batch_size)
    if kind in ASKS_BY_ROW:
        return _prefix_function_of_row(processor, row)
    if kind in HOLDS_CONTEXT:
        return _guidance_of_row(processor, row)
    own = processor if row == 0 else _copy(processor, memo)
    is_function = inspect.isroutine(processor) or isinstance(processor, functools.partial)
    return _AsBatch(own, row, batch_size) if is_function or _holds_rows(processor, batch_size) else own


def _copy(processor: Any, memo: dict[int, Any]) -> Any:
    try:
        return deep_copy(processor, memo)
    except Exception as error:  # whatever a user's class raises while it is copied
        raise ValueError(
            f"`logits_processor`: {type(processor).__name__} cannot be copied for the rows of a batch ({error}). Give "
            "it a `__deepcopy__`, or call `generate` with one sequence at a time."
        ) from error


class _AsBatch:
    """Calls a processor that holds data per row with a batch of copies of one row, and returns that row's result."""

    def __init__(self, processor: Any, row: int, batch_size: int):
        self.processor, self.row, self.batch_size = processor, row, batch_size

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        repeated = self.processor(input_ids.repeat(self.batch_size, 1), scores.repeat(self.batch_size, 1))
        return repeated[self.row : self.row + 1]


def _holds_rows(processor: Any, batch_size: int) -> bool:
    """
    Whether a processor has something that may be looked up by a row's number: a tensor or container that has an entry
    for every row (or more), or a function.
    """
    return any(_may_be_rows(value, batch_size) for value in _attributes(processor))


def _attributes(processor: Any) -> Iterator[Any]:
    """The values of a processor's attributes, in its `__dict__`, in slots and in its own classes, except methods."""
    yield from getattr(processor, "__dict__", {}).values()
    for kind in type(processor).__mro__:
        if kind.__module__.partition(".")[0] in ("abc", "builtins", "torch", "transformers"):
            continue
        for name, value in vars(kind).items():
            if inspect.ismemberdescriptor(value):
                yield getattr(processor, name, None)
            elif not (name.startswith(("__", "_abc_")) or inspect.isroutine(value) or inspect.isdatadescriptor(value)):
                yield value


def _may_be_rows(value: Any, batch_size: int) -> bool:
    if isinstance(
        value, (str, bytes, int, float, torch.nn.Module, PreTrainedTokenizerBase, torch.Generator, type(None))
    ):
        return False
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and value.shape[0] >= batch_size
    if isinstance(value, dict):
        has_numbers = any(isinstance(key, int) for key in value)
        return has_numbers or any(_may_be_rows(item, batch_size) for item in value.values())
    if hasattr(value, "__len__"):
        items = value if isinstance(value, (list, tuple)) else ()
        return len(value) >= batch_size or any(_may_be_rows(item, batch_size) for item in items)
    return True  # a function or an object, which may look up rows by their number


def _prefix_function_of_row(processor: Any, row: int) -> Any:
    """The processor of a user's `prefix_allowed_tokens_fn` for one row, which passes that row's number to it."""
    ask = processor._prefix_allowed_tokens_fn
    return type(processor)(lambda _, input_ids: ask(row, input_ids), processor._num_beams)


def _guidance_of_row(processor: Any, row: int) -> Any:
    """Classifier-free guidance for one row: the model is shared, the unconditional context is the row's own."""
    own = copy.copy(processor)
    own.unconditional_context = {
        key: value[row : row + 1] if isinstance(value, torch.Tensor) else value
        for key, value in processor.unconditional_context.items()
    }
    return own
