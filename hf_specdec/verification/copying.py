"""Copies of logits processors and stopping criteria: of their state, but not of models and tokenizers."""

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


def deep_copy(value: Any, memo: dict[Any, Any]) -> Any:
    """
    A deep copy that has own copies of functions, too, with what they close over (`copy.deepcopy` leaves them): of
    `value` itself, or of those that it holds as a partial or in its attributes.

    Args:
        memo (`dict`): what has been copied with it, and what is not to be copied (`kept_whole`).
    """
    if not _is_function(value):
        own = copy.deepcopy(value, memo)
        for name, part in getattr(value, "__dict__", {}).items() if own is not value else ():
            if _is_function(part) and name in vars(own):
                vars(own)[name] = deep_copy(part, memo)
        return own
    key = "function", id(value)  # under its id alone, `copy.deepcopy` puts partials that share their function
    if key not in memo:
        memo[key] = _copy_function(value, memo)
    return memo[key]


def _copy_function(value: Any, memo: dict[Any, Any]) -> Any:
    if isinstance(value, functools.partial):
        function, *args = (deep_copy(part, memo) for part in (value.func, *value.args))
        keywords = {name: deep_copy(part, memo) for name, part in value.keywords.items()}
        return functools.partial(function, *args, **keywords)
    cells = tuple(_copy_cell(cell, memo) for cell in value.__closure__ or ())
    defaults = copy.deepcopy(value.__defaults__, memo)
    own = FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
    own.__kwdefaults__ = copy.deepcopy(value.__kwdefaults__, memo)
    return own


def _copy_cell(cell: CellType, memo: dict[Any, Any]) -> CellType:
    """A copy of a variable that functions close over, which may be the functions themselves."""
    if id(cell) not in memo:
        memo[id(cell)] = CellType()
        memo[id(cell)].cell_contents = deep_copy(cell.cell_contents, memo)
    return memo[id(cell)]


def _holders(processor: Any) -> list[Any]:
    """The objects that hold a processor's state: itself, a method's object, what a function closes over, …"""
    found: list[Any] = []
    left = [processor]
    while left:
        value = left.pop()
        if inspect.ismethod(value):
            left.append(value.__self__)
        elif inspect.isfunction(value):
            found += [cell.cell_contents for cell in value.__closure__ or ()]
        elif isinstance(value, functools.partial):
            left += [value.func, *value.args, *value.keywords.values()]
        elif not any(value is holder for holder in found):
            found.append(value)
            left += [part for part in getattr(value, "__dict__", {}).values() if _is_function(part)]
    return found


def _is_function(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, functools.partial)
