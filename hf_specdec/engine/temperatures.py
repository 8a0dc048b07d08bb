"""Draft temperatures that requests with equal warpers share and learn together."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from ..verification import DraftTemperature


MOST = 256
"""Most temperatures kept, the least recently used dropped first: every request may bring a new `temperature`."""


class DraftTemperatures:
    """Draft temperatures by warpers, which learn from the distributions that verification shows in each step."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, DraftTemperature] = {}
        self._shown: dict[DraftTemperature, list[tuple[torch.Tensor, torch.Tensor]] | None] = {}

    def of(self, warpers_key: Hashable, value: float | None) -> DraftTemperature:
        """
        The draft temperature for requests with these warpers.

        Args:
            warpers_key: key of the warpers, see `sharing_key`; temperatures are shared only for keys that are tuples.
            value (`float`, *optional*): a fixed temperature; None for one that adapts.
        """
        key = (warpers_key, value)
        temperature = self._kept.pop(key, None) or DraftTemperature(value or 1.0, adapts=value is None)
        if isinstance(warpers_key, tuple):
            self._kept[key] = temperature
            if len(self._kept) > MOST:
                del self._kept[next(iter(self._kept))]
        return temperature

    def observer(self, temperature: DraftTemperature) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
        """The callback that takes p and log q from `walk_by_rejection`; None if the temperature skips this step."""
        if temperature not in self._shown:
            self._shown[temperature] = [] if temperature.begin_step() else None
        shown = self._shown[temperature]
        return None if shown is None else lambda p, scores: shown.append((p, scores))

    def end_step(self) -> None:
        """Learns from all distributions shown in the step at once, because all were drawn at the same temperature."""
        for temperature, shown in self._shown.items():
            if shown:
                temperature.observe(*map(torch.cat, zip(*shown, strict=True)))
        self._shown = {}
