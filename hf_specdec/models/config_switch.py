"""Switches of a field of configs that several calls need at once: the first call switches, the last one restores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from transformers import PreTrainedConfig


Value = TypeVar("Value")


@dataclass
class _Switch(Generic[Value]):
    config: PreTrainedConfig
    previous: Value
    calls: int = 0


class ConfigSwitches(Generic[Value]):
    """
    Counted switches of one of transformers' implementations, which a config holds in a field and its `_internal` twin.
    Setting the latter takes microseconds, transformers' own setters some hundred.

    Args:
        field (`str`): name of the field, as `"_attn_implementation"`.
        name (`str`): what a switched field says, so that a field that was set anew meanwhile is left as it is.
    """

    def __init__(self, field: str, name: str):
        self._field, self._name, self._lock = field, name, threading.Lock()
        # By `id(config)`. Each switch holds its config, so that the id stays valid.
        self._switches: dict[int, _Switch[Value]] = {}

    def __len__(self) -> int:
        """Number of configs that are switched now."""
        return len(self._switches)

    def said(self, config: PreTrainedConfig) -> Any:
        """What a config says, or said before it was switched."""
        switch = self._switches.get(id(config))
        return getattr(config, self._field) if switch is None else switch.previous

    @contextmanager
    def switched(
        self,
        configs_of: Callable[[], list[PreTrainedConfig]],
        previous_of: Callable[[PreTrainedConfig], Value],
        value_of: Callable[[Value], str],
    ) -> Iterator[None]:
        """
        Switches configs inside the context. Calls of several threads are counted.

        Args:
            configs_of (`Callable`): gives the configs, each once; called while no other thread switches.
            previous_of (`Callable`): what a config says that is not switched.
            value_of (`Callable`): what it is to say, from what it says.
        """
        with self._lock:
            configs = configs_of()
            for config in configs:
                switch = self._switches.get(id(config))
                if switch is None:
                    switch = self._switches[id(config)] = _Switch(config, previous_of(config))
                    setattr(config, f"{self._field}_internal", value_of(switch.previous))
                switch.calls += 1
        try:
            yield
        finally:
            with self._lock:
                for config in configs:
                    self._release(config)

    def _release(self, config: PreTrainedConfig) -> None:
        switch = self._switches[id(config)]
        switch.calls -= 1
        if switch.calls == 0:
            if getattr(config, self._field) == self._name:  # else it was set anew meanwhile
                setattr(config, f"{self._field}_internal", switch.previous)
            del self._switches[id(config)]
