"""Copies of logits processors for the rows of a batch: of their state, but not of models and tokenizers."""

from __future__ import annotations

import copy
import functools
import inspect
from types import CellType, FunctionType
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase


def kept_whole(processor: Any) -> dict[int, Any]:
    """The models and tokenizers that a processor refers to, by `id`."""
    return {
        id(value): value
        for holder in _holders(processor)
        for value in (holder, *getattr(holder, "__dict__", {}).values())
        if isinstance(value, (torch.nn.Module, PreTrainedTokenizerBase))
    }


def copy_for_row(processor: Any, memo: dict[int, Any]) -> Any:
    """A deep copy; `memo` holds what a row's other copies are made of, and what is not copied."""
    try:
        return _deepcopy(processor, memo)
    except Exception as error:  # whatever a user's class raises while it is copied
        raise ValueError(
            f"`logits_processor`: {type(processor).__name__} cannot be copied for the rows of a batch ({error}). Give "
            "it a `__deepcopy__`, or call `generate` with one sequence at a time."
        ) from error


def _deepcopy(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy, of functions, too: with own copies of what they close over (`copy.deepcopy` leaves them)."""
    if not inspect.isfunction(value):
        return copy.deepcopy(value, memo)
    if id(value) not in memo:
        cells = tuple(_copy_cell(cell, memo) for cell in value.__closure__ or ())
        defaults = copy.deepcopy(value.__defaults__, memo)
        own = FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
        own.__kwdefaults__ = copy.deepcopy(value.__kwdefaults__, memo)
        memo[id(value)] = own
    return memo[id(value)]


def _copy_cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    """A copy of a variable that functions close over, which may be the functions themselves."""
    if id(cell) not in memo:
        memo[id(cell)] = CellType()
        memo[id(cell)].cell_contents = _deepcopy(cell.cell_contents, memo)
    return memo[id(cell)]


def _holders(processor: Any) -> list[Any]:
    """The objects that hold a processor's state: itself, a method's object, what a function closes over, …"""
    if inspect.ismethod(processor):
        return [processor.__self__]
    if inspect.isfunction(processor):
        return [cell.cell_contents for cell in processor.__closure__ or ()]
    if isinstance(processor, functools.partial):
        items = (processor.func, *processor.args, *processor.keywords.values())
        return [held for item in items for held in _holders(item)]
    return [processor]
