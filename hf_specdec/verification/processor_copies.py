"""Copies of logits processors and stopping criteria: of their state, but not of models and tokenizers."""

from __future__ import annotations

import copy
import functools
import inspect
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase


_LEAVES = (str, bytes, int, float, complex, type(None), type, torch.Tensor, torch.Generator)
"""Types of which nothing is reached."""
_WHOLE = (torch.nn.Module, PreTrainedTokenizerBase, ModuleType)
"""Types that are not copied."""


def kept_whole(value: Any) -> dict[int, Any]:
    """The models, tokenizers and Python modules that can be reached from `value`, by `id`."""
    return {id(part): part for part in _reached(value) if isinstance(part, _WHOLE)}


def deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    """
    A deep copy that has own copies of functions, too, with what they close over (`copy.deepcopy` leaves them).

    Args:
        memo (`dict`): what has been copied with it, and what is not to be copied (`kept_whole`).
    """
    functions = [
        part for part in _reached(value) if inspect.isfunction(part) and _has_state(part) and id(part) not in memo
    ]
    # First all functions, with empty cells: they may refer to each other, and to `value`.
    for function in functions:
        cells = tuple(memo.setdefault(id(cell), CellType()) for cell in function.__closure__ or ())
        memo[id(function)] = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
    for function in functions:
        own = memo[id(function)]
        for cell, own_cell in zip(function.__closure__ or (), own.__closure__ or (), strict=True):
            if _is_filled(cell) and not _is_filled(own_cell):
                own_cell.cell_contents = copy.deepcopy(cell.cell_contents, memo)
        own.__defaults__ = copy.deepcopy(function.__defaults__, memo)
        own.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
        own.__dict__.update({name: _copy_or_itself(value, memo) for name, value in vars(function).items()})
    return memo[id(value)] if inspect.isfunction(value) and id(value) in memo else copy.deepcopy(value, memo)


def copy_or_refuse(value: Any, memo: dict[int, Any], name: str, purpose: str, remedy: str) -> Any:
    """
    A deep copy (see `deep_copy`) of a logits processor or stopping criterion.

    Raises:
        ValueError: if it cannot be copied; the message names the argument, what the copy is for, and the remedy.
    """
    try:
        return deep_copy(value, memo)
    except Exception as error:  # whatever a user's class raises while it is copied
        raise ValueError(
            f"`{name}`: {type(value).__name__} cannot be copied for {purpose} ({error}). Give it a `__deepcopy__`, or "
            f"{remedy}."
        ) from error


def _copy_or_itself(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of a function's attribute; the attribute itself if it cannot be copied, as locks cannot."""
    before = set(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever a user's class raises while it is copied
        for half_made in memo.keys() - before:
            del memo[half_made]
        return value


def _has_state(function: FunctionType) -> bool:
    """Whether a function holds anything that its calls may change."""
    return bool(function.__closure__ or function.__defaults__ or function.__kwdefaults__ or vars(function))


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return False
    return True


def _reached(value: Any) -> Iterator[Any]:
    """`value` and what it holds, each once; not what `_WHOLE` types and classes with a `__deepcopy__` hold."""
    seen: set[int] = set()
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, _LEAVES) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if not isinstance(part, _WHOLE) and not hasattr(type(part), "__deepcopy__"):
            left += _held_by(part)


def _held_by(value: Any) -> list[Any]:
    if inspect.isfunction(value):
        held = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return held + [*vars(value).values()]
    if inspect.ismethod(value):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    held = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        for slot in filter(inspect.ismemberdescriptor, vars(kind).values()):
            with suppress(AttributeError):  # of a slot without a value
                held.append(slot.__get__(value))
    if isinstance(value, dict):
        held += value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        held += value
    return held
