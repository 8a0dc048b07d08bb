"""Biases of a step's rows on the device."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ...verification.biases import BIASES, ENDINGS, HIDDEN_TOKENS, MOST_BEFORE, MOST_BIASES, MOST_HIDDEN, Bias
from .row_buffer import RowBuffer


_PLAIN = ("token", "value", "first", "end")


class RowBiases:
    """
    The biases of rows, see `Bias`, with one column for each; unused columns apply to no text.

    Args:
        rows (`int`), most (`int`), most_before (`int`): number of rows, of biases per row, and of tokens before each.
        device (`torch.device`): device of the step.
    """

    def __init__(self, rows: int, most: int, most_before: int, device: torch.device):
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_PLAIN, (rows, most))
        shapes["before"] = rows, most, most_before
        self._buffer = RowBuffer({}, shapes, {"value": torch.float32}, device)
        self._buffer.host["before"][:] = -1
        self._buffer.copy()
        self._loaded: list[tuple[Bias, ...]] = [()] * rows
        on_device = self._buffer.device
        self.token: torch.Tensor = on_device["token"]
        """Their tokens, `[rows, most]` int64."""
        self.value: torch.Tensor = on_device["value"]
        """What they add, `[rows, most]` float32."""
        self.first: torch.Tensor = on_device["first"]
        self.end: torch.Tensor = on_device["end"]
        """Biases apply to texts of `first` tokens or more, and fewer than `end`, `[rows, most]` int64 each."""
        self.before: torch.Tensor = on_device["before"]
        """The tokens that a text must end with, the last one first, -1 for any, `[rows, most, most_before]` int64."""

    @classmethod
    def for_kinds(cls, rows: int, kinds: Collection[str], device: torch.device) -> RowBiases:
        """Room for the rows of steps that do this for them; see `Warpers.kinds`."""
        most = MOST_BIASES if BIASES in kinds else MOST_HIDDEN if HIDDEN_TOKENS in kinds else 0
        return cls(rows, most, MOST_BEFORE if ENDINGS in kinds else 0, device)

    def load(self, biases: list[tuple[Bias, ...]]) -> None:
        """Copies the biases of the first rows to the device, if any have changed; the other rows have none."""
        if self.token.shape[1] == 0:
            return
        wanted = biases + [()] * (len(self._loaded) - len(biases))
        pairs = enumerate(zip(wanted, self._loaded, strict=True))
        changed = [row for row, (new, old) in pairs if new is not old and new != old]  # mostly those of the last step
        if not changed:
            return
        self._buffer.wait()
        for row in changed:
            self._stage(row, wanted[row])
        self._loaded = wanted
        self._buffer.copy()

    def _stage(self, row: int, biases: tuple[Bias, ...]) -> None:
        host, number = self._buffer.host, len(biases)
        for name in _PLAIN:
            host[name][row, :number] = [getattr(one, name) for one in biases]
            host[name][row, number:] = 0
        if self.before.shape[2] > 0:
            host["before"][row] = -1
            for place, one in enumerate(biases):
                host["before"][row, place, : len(one.before)] = one.before
