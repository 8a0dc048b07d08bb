"""The temperatures of q that requests share: learnt from all whose warpers are alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from ..verification import DraftTemperature


MOST = 256
"""Temperatures kept; the one unused for longest goes first. Clients may send a new `temperature` with each request."""


class DraftTemperatures:
    """Temperatures by warpers, and what a step's verification shows of them."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, DraftTemperature] = {}
        self._shown: dict[DraftTemperature, list[tuple[torch.Tensor, torch.Tensor]] | None] = {}

    def of(self, warpers_key: Hashable, value: float | None) -> DraftTemperature:
        """
        The temperature for children that are drawn.

        Args:
            warpers_key: see `sharing_key`; only those that are tuples are shared.
            value (`float`, *optional*): the temperature, if it is fixed.
        """
        key = (warpers_key, value)
        temperature = self._kept.pop(key, None) or DraftTemperature(value or 1.0, adapts=value is None)
        if isinstance(warpers_key, tuple):
            self._kept[key] = temperature
            if len(self._kept) > MOST:
                del self._kept[next(iter(self._kept))]
        return temperature

    def observer(self, temperature: DraftTemperature) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
        """What `walk_by_rejection` is to show p and log q to, if this step is worth a look: see `DraftTemperature`."""
        if temperature not in self._shown:
            self._shown[temperature] = [] if temperature.begin_step() else None
        shown = self._shown[temperature]
        return None if shown is None else lambda p, scores: shown.append((p, scores))

    def end_step(self) -> None:
        """Learns from what was shown: all of it at once, since all of it was drawn at the same value."""
        for temperature, shown in self._shown.items():
            if shown:
                temperature.observe(*map(torch.cat, zip(*shown, strict=True)))
        self._shown = {}
