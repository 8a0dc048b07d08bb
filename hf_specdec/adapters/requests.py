"""The adapters of requests in flight: which row of a forward has which."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from .loaded import Choice, LoadedAdapters
from .stacks import Columns, PresentForward, Stack


_locks: weakref.WeakKeyDictionary[nn.Module, threading.Lock] = weakref.WeakKeyDictionary()
"""Locks held while a model's layers read stacks."""


class RequestAdapters:
    """
    Lets every row of the target's forwards have its own adapter. Does nothing until a request chooses one.

    Args:
        model (`nn.Module`): the target.
        device (`torch.device`): device of the rows.
        most_rows (`int`): most rows of a forward, padding included.
        is_captured (`bool`): whether forwards may be captured, so that they read the choices of rows on the device.
    """

    def __init__(self, model: nn.Module, device: torch.device, most_rows: int, is_captured: bool):
        self._model, self._is_captured = model, is_captured
        self._lock = _locks.setdefault(model, threading.Lock())
        self.index: dict[Choice, int] = {}
        """Number of each choice in the present run; empty if rows have the active adapters."""
        self.is_wanted = False
        """Whether any request has chosen an adapter."""
        self.is_stale = False
        """Whether adapters have come or changed since the present run began."""
        self._present = PresentForward()
        self._loaded = LoadedAdapters()
        self._shape: Any = None
        self._columns: dict[Any, Columns] = {}
        self._stacks: list[Stack] = []
        self._versions: dict[Choice, list[Any]] = {}
        self._seated: list[int] = []
        with torch.inference_mode(False):  # the caller's, outside of which runs could not write it
            self._rows = torch.zeros(most_rows, dtype=torch.long, device=device)

    # ------------------------------------------------------------------------------------------------ what is loaded

    def check(self, choice: Choice) -> None:
        """
        Checks that a request can have an adapter. If it is not one of the present run, or has changed since, another
        run is to begin. May be called by any thread.

        Raises:
            TypeError: for a choice that is neither a name nor None.
            ValueError: for an adapter that is not loaded, or cannot be chosen.
        """
        if choice is not ... and choice is not None and not isinstance(choice, str):
            raise TypeError(
                f"`adapter` must be the name of an adapter, or None, but is {type(choice).__name__}: {choice!r}."
            )
        if choice in self.index and self._versions.get(choice) == self._versions_of(choice):
            return
        if choice is ...:
            if self.index:  # and else as it is: a request before this one may wait for another run
                self.is_stale = True
            return
        error = LoadedAdapters.of(self._model).error_of(choice)
        if error is not None:
            raise ValueError(error)
        self.is_wanted = self.is_stale = True

    def error_of(self, choice: Choice) -> str | None:
        """Why a request cannot run with its adapter in the present run; None if it can."""
        return None if choice is ... or choice in self.index else self._loaded.error_of(choice)

    def _versions_of(self, choice: Choice) -> list[Any]:
        """What changes with the weights of an adapter, or its place in the model. Cheap: for every request."""
        found: list[Any] = []
        for layer in (stack.layer for stack in self._stacks):
            found.append(tuple(layer.merged_adapters))
            names: list[Any] = [choice]
            if choice is ...:
                names = [] if layer.disable_adapters else list(layer.active_adapters)
            for name in names:
                found.append((name, layer.scaling.get(name)))
                for place in (layer.lora_A, layer.lora_B):
                    one = place._modules.get(name)
                    found.append(None if one is None else _version_of(one._parameters["weight"]))
        return found

    # --------------------------------------------------------------------------------------------------------- a run

    def renew(self) -> None:
        """
        Begins a run of steps, in which nobody changes the model: takes the present weights of all adapters, into the
        same memory if their names and ranks are the same.
        """
        self.is_stale = False
        self._loaded = LoadedAdapters.of(self._model) if self.is_wanted else LoadedAdapters()
        is_on = self.is_wanted and self._loaded.obstacle is None
        names = self._loaded.served if is_on else []
        layers = [layer for layer in self._loaded.layers if any(name in layer.lora_A for name in names)]
        shape = [(layer, *_shape_of(layer, names)) for layer in layers]
        if shape != self._shape:
            self._shape, self._columns = shape, {}
            self._stacks = [Stack(layer, self._columns_of(*key), self._present) for layer, *key in shape]
        self.index.clear()
        if is_on:
            choices: list[Choice] = [..., None, *names]
            self.index.update({choice: number for number, choice in enumerate(choices)})
        # Padding rows keep what was seated in them, which may be a choice that is gone.
        self._rows.zero_()
        self._seated = []
        for stack in self._stacks:
            stack.load()
        self._versions = {choice: self._versions_of(choice) for choice in self.index}

    def _columns_of(self, ranks: tuple[tuple[str, int], ...], active: frozenset[str], device: Any) -> Columns:
        key = ranks, active, device
        if key not in self._columns:
            self._columns[key] = Columns(dict(ranks), active, device)
        return self._columns[key]

    @property
    def key(self) -> Any:
        """What graphs over the rows of requests depend on."""
        return tuple(self.index), tuple(stack.key for stack in self._stacks)

    # ------------------------------------------------------------------------------------------------------ forwards

    def seat(self, choices: Sequence[Choice]) -> None:
        """Makes requests with these adapters the rows of the next forwards."""
        if self.index:
            seated = [self.index.get(choice, 0) for choice in choices]
            if seated != self._seated:
                self._seated = seated
                self._rows[: len(seated)].copy_(torch.tensor(seated, device="cpu"))

    def of_seated(self, rows: int, tokens: int, is_captured: bool | None = None) -> AbstractContextManager[None]:
        """
        A context for a forward over the seated rows and padding rows, of so many tokens each. `is_captured`: whether
        it may be captured; by default, as any forward.
        """
        if not self.index:
            return nullcontext()
        is_captured = self._is_captured if is_captured is None else is_captured
        if not is_captured and len(set(self._seated)) == 1:
            return self._reading(self._seated[0], tokens)
        return self._reading(self._rows[:rows], tokens)

    def of_rows(self, choices: torch.Tensor, tokens: int) -> AbstractContextManager[None]:
        """A context for a forward over rows with these choices, `[rows]` int64 on the device."""
        return self._reading(choices, tokens) if self.index else nullcontext()

    @contextmanager
    def _reading(self, choices: torch.Tensor | int, tokens: int) -> Iterator[None]:
        """
        A context in which layers read the stacks, for rows with these choices, or one for all. Other managers of the
        same model wait.
        """
        with self._lock:
            self._present.thread, self._present.tokens = threading.get_ident(), tokens
            try:
                for columns in self._columns.values():
                    columns.begin(choices)
                for stack in self._stacks:
                    stack.install()
                yield
            finally:
                for stack in self._stacks:
                    stack.remove()


def _version_of(weight: torch.Tensor) -> Any:
    """What changes as a weight is replaced or written to. (torch counts no writes in inference mode.)"""
    return weight.data_ptr(), None if weight.is_inference() else weight._version


def _shape_of(layer: Any, names: list[str]) -> tuple[Any, ...]:
    """Ranks of adapters in a layer, the active ones among them, and the layer's device."""
    weights = {name: layer.lora_A[name].weight for name in names if name in layer.lora_A}
    ranks = tuple((name, len(weights[name]) if name in weights else 0) for name in names)
    active = frozenset() if layer.disable_adapters else frozenset(layer.active_adapters) & weights.keys()
    return ranks, frozenset(active), next(iter(weights.values())).device
