"""
The weights of several LoRA adapters, stacked: what each row of a forward adds to the output of a linear layer.

All adapters of a layer are one, with the sum of their ranks: of the small product a row keeps its own columns, the
others are set to zero. So two products serve any mix of adapters, in captured steps, too.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.nn.functional import linear

from .loaded import Choice


PLACE = "stacked_adapters"
"""Attribute of a layer that holds its stack during a forward over the rows of requests."""


class Columns:
    """
    The columns of each adapter in the stacks of layers with equal ranks.

    Args:
        ranks (`dict[str, int]`): rank of each adapter, in the order of the columns; 0 if it does not adapt the layers.
        active (`frozenset[str]`): the active adapters.
        device (`torch.device`): device of the layers.
    """

    def __init__(self, ranks: dict[str, int], active: frozenset[str], device: torch.device):
        self.places: dict[str, slice] = {}
        """The columns of each adapter that has any."""
        total = 0
        for name, rank in ranks.items():
            if rank:
                self.places[name] = slice(total, total + rank)
            total += rank
        choices: list[Choice] = [..., None, *ranks]
        own = [self._of(choice, active) for choice in choices]
        self._spans = [_span(places) for places in own]
        off = torch.ones(len(own), total, dtype=torch.bool, device="cpu")
        for row, places in enumerate(own):
            off[row, places] = False
        self.table = off.to(device)
        """Columns that are off for each choice, `[choices, ranks]` bool."""
        self.off: torch.Tensor | None = None
        """Columns that are off in each row of the present forward, `[rows or 1, 1, ranks]` bool; None: see `span`."""
        self.span: tuple[int, int] | None = None
        """The columns of all rows of the present forward, from the first to before the last; None: see `off`."""

    def _of(self, choice: Choice, active: frozenset[str]) -> list[int]:
        names = active if choice is ... else {choice}
        found = [place for name, place in self.places.items() if name in names]
        return [column for place in found for column in range(place.start, place.stop)]

    def begin(self, rows: torch.Tensor | int) -> None:
        """Begins a forward whose rows have these choices: `[rows]` int64, or one number for all."""
        self.span = self._spans[rows] if isinstance(rows, int) else None
        if isinstance(rows, int):
            self.off = self.table[rows][None, None] if self.span is None else None
        else:
            self.off = self.table.index_select(0, rows.to(self.table.device))[:, None]


def _span(columns: list[int]) -> tuple[int, int] | None:
    """From the first to before the last of successive columns, (0, 0) for none; None if there are gaps."""
    if not columns:
        return 0, 0
    first, last = columns[0], columns[-1] + 1
    return (first, last) if last - first == len(columns) else None


class PresentForward:
    """The thread of the present forward over the rows of requests, and its number of tokens per row."""

    def __init__(self) -> None:
        self.thread, self.tokens = 0, 0


class Stack:
    """
    The stacked adapters of one layer.

    Args:
        layer (`peft.tuners.lora.Linear`): the layer.
        columns (`Columns`): the columns of its adapters.
        present (`PresentForward`): the forward that reads the stack.
    """

    def __init__(self, layer: Any, columns: Columns, present: PresentForward):
        self.layer, self.columns, self._present = layer, columns, present
        self._own: Any = None
        self._forward = _forward.__get__(layer)
        weights = [weight for name in columns.places for weight in self._weights(name)]
        dtype, device = weights[0].dtype, weights[0].device
        for weight in weights:
            dtype = torch.promote_types(dtype, weight.dtype)
        total, inputs, outputs = columns.table.shape[1], weights[0].shape[1], weights[1].shape[0]
        self.down = torch.empty(total, inputs, dtype=dtype, device=device)
        """`lora_A` of all adapters, `[ranks, inputs]`."""
        self.up = torch.empty(outputs, total, dtype=dtype, device=device)
        """`lora_B` of all adapters times their scaling, `[outputs, ranks]`."""

    def _weights(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer.lora_A[name].weight, self.layer.lora_B[name].weight

    @property
    def key(self) -> Any:
        """What a graph that reads the stack depends on."""
        tensors = self.down, self.up, self.columns.table
        return tuple(self.columns.places), tuple(tensor.data_ptr() for tensor in tensors)

    @torch.no_grad()
    def load(self) -> None:
        """Copies the present weights of the layer's adapters."""
        for name, place in self.columns.places.items():
            down, up = self._weights(name)
            self.down[place].copy_(down)
            self.up[:, place].copy_(up).mul_(self.layer.scaling[name])

    def install(self) -> None:
        """Lets the layer read the stack."""
        own = vars(self.layer)
        self._own = own.get("forward")
        own[PLACE], own["forward"] = self, self._forward

    def remove(self) -> None:
        """Leaves the layer as it was."""
        own = vars(self.layer)
        if own.pop(PLACE, None) is None:
            return  # was not installed yet
        if self._own is None:
            own.pop("forward", None)
        else:
            own["forward"] = self._own

    def is_read(self) -> bool:
        """Whether the calling thread is that of the present forward: others may run the model meanwhile."""
        return torch.compiler.is_compiling() or threading.get_ident() == self._present.thread

    def plain(self, *args: Any, **options: Any) -> torch.Tensor:
        """The layer's own forward."""
        layer = self.layer
        return type(layer).forward(layer, *args, **options) if self._own is None else self._own(*args, **options)

    def added(self, output: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """A base layer's output and what the adapters of each row add to it."""
        down, up, columns = self.down, self.up, self.columns
        if columns.span is not None:
            first, last = columns.span
            if first == last:
                return output
            down, up = down[first:last], up[:, first:last]
        small = linear(inputs.to(down.device, down.dtype), down)
        if columns.off is not None:
            small = self._masked(small, columns.off)
        return (output + linear(small, up).to(output.device)).to(output.dtype)

    def _masked(self, small: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
        """`small` with zeros where `off` is set: `[rows, tokens, ranks]`, or one row after the other."""
        rows = off.shape[0]
        if rows == 1:
            return small.masked_fill(off[0, 0], 0)
        if small.dim() == 3 and small.shape[0] == rows:
            return small.masked_fill(off, 0)
        is_flat = small.dim() == 2 and (torch.compiler.is_compiling() or len(small) == rows * self._present.tokens)
        if not is_flat:
            raise ValueError(
                f"`adapter`: a layer with adapters reads a tensor of shape {list(small.shape[:-1])}, in which "
                f"{rows} requests cannot be told apart. Let requests with different adapters run one after the other."
            )
        return small.view(rows, -1, small.shape[1]).masked_fill(off, 0).view(small.shape)


def _forward(self: Any, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Takes the place of a layer's `forward` during a forward over the rows of requests."""
    stack = vars(self).get(PLACE)
    if stack is None:  # the forward has just ended, in another thread
        return type(self).forward(self, x, *args, **options)
    if not stack.is_read():
        return stack.plain(x, *args, **options)
    return stack.added(self.base_layer(x, *args, **options), x)
