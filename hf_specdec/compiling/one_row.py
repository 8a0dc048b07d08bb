"""
Compiled layers that see the tokens of all rows as those of one row. To whatever else than attention and the cache a
layer has, it does not matter in which row a token is. With a single size that varies, tracing takes a fraction of the
time, and a step of any rows and nodes runs what another one has compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


MASK = "attention_mask"


class OneRow:
    """
    The rows of a layer's present call, and its inputs without them.

    Args:
        joins (`bool`): whether rows are joined, where the inputs of a layer show that they can be.
        has_mask (`bool`): whether layers read the mask that they are given; else they are given one of a single entry.
    """

    def __init__(self, joins: bool, has_mask: bool):
        self._joins, self._has_mask = joins, has_mask
        self._rows = 1
        self._masks: dict[Any, torch.Tensor] = {}

    def call(self, layer: Callable, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """
        Calls a layer. Rows are joined, and all sizes but the number of tokens are said to stay, where its inputs, all
        but the mask, are `[rows, tokens, …]`, or `[1, tokens, …]` for all rows.
        """
        if not self._has_mask:
            options = {name: self._small(value) if name == MASK else value for name, value in options.items()}
        given = [*args, *(value for name, value in options.items() if name != MASK)]
        if not _are_by_token(given):
            return layer(*args, **options)
        rows = self._rows = next(one.shape[0] for one in _tensors_in(given) if one.dim() > 1) if self._joins else 1
        joined = [_map(lambda one: _joined(one, rows), value) for value in args]
        named = {
            name: value if name == MASK else _map(lambda one: _joined(one, rows), value)
            for name, value in options.items()
        }
        try:
            outputs = layer(*joined, **named)
        finally:
            self._rows = 1
        return outputs if rows == 1 else _map(lambda one: _parted(one, rows), outputs)

    def by_rows(self, states: torch.Tensor) -> torch.Tensor:
        """`[1, heads, rows * tokens, head_dim]` as `[rows, heads, tokens, head_dim]`, without a copy."""
        if self._rows == 1:
            return states
        return states.squeeze(0).unflatten(1, (self._rows, -1)).transpose(0, 1)

    def joined(self, attended: torch.Tensor) -> torch.Tensor:
        """What heads have read, `[rows, tokens, heads, value_dim]`, as `[1, rows * tokens, heads, value_dim]`."""
        return _joined(attended, self._rows)

    def _small(self, mask: Any) -> Any:
        if not isinstance(mask, torch.Tensor):
            return mask
        key = mask.dtype, mask.device, mask.dim()
        if key not in self._masks:
            self._masks[key] = mask.new_zeros((1,) * mask.dim())
        return self._masks[key]


def _are_by_token(values: list[Any]) -> bool:
    """Whether tensors are `[rows, tokens, …]` or `[1, tokens, …]`, and stand where `_map` finds them."""
    tensors = [one for one in _tensors_in(values) if one.dim() > 1]
    if not tensors or any(_tensors_in(one) for one in values if isinstance(one, list) or _is_named(one)):
        return False
    rows, tokens = tensors[0].shape[:2]
    return all(one.dim() <= 3 and tuple(one.shape[:2]) in ((rows, tokens), (1, tokens)) for one in tensors)


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and type(value) is not tuple


def _tensors_in(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [one for value in values for one in _tensors_in(value)] if isinstance(values, list | tuple) else []


def _map(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A value with a changed tensor in the place of each tensor, also of those in a tuple."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return tuple(_map(change, one) for one in value) if type(value) is tuple else value


def _joined(states: torch.Tensor, rows: int) -> torch.Tensor:
    """States of `rows` rows, or the same for all of them, as those of one row, whose number alone may vary."""
    if states.dim() < 2:
        return states
    if rows > 1:
        states = states.expand(rows, *states.shape[1:]).reshape(1, -1, *states.shape[2:])
    if not torch.is_grad_enabled():
        states = states.data  # no view: of a view, torch looks at the sizes of the whole, too
    for place in range(2, states.dim()):
        torch._dynamo.mark_static(states, place)
    return states


def _parted(states: torch.Tensor, rows: int) -> torch.Tensor:
    return states.view(rows, -1, *states.shape[2:]) if states.dim() > 1 and states.shape[0] == 1 else states
