"""What steps on the device have in common: rows that the host fills in, and a graph over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from ...graphs import Record
from ..paged_cache import DevicePagedCache
from ..request import Request
from .rows import InFlightRows, Size


if TYPE_CHECKING:
    from ...forward import TreeForward
    from ..target import InFlightTarget


class CapturedStep(ABC):
    """
    A step over requests in flight, captured once for a size and replayed for whichever there are.

    Args:
        target (`InFlightTarget`): the engine's.
        size (`Size`): what the step has room for.
    """

    compiles = False
    """Whether its forwards are compiled first."""
    is_vital = True
    """Whether others need not be tried where it cannot be captured."""

    def __init__(self, target: InFlightTarget, size: Size):
        self._target, self.rows = target, InFlightRows(size, target.device)
        self._first_slots = torch.zeros(size.rows, dtype=torch.long, device=target.device)
        self._cache: Any = None
        self._forward: Any = None

    def capture(self, record: Record, pool: Any) -> None:
        """
        Captures the step. It runs for the rows that are loaded now, which may be done twice.

        Raises:
            RuntimeError: if it cannot be captured.
        """
        device = self.rows.device
        self._cache = DevicePagedCache(self._target.cache, self.rows.tables)
        self._forward = self._target.forward.over(self._cache, self._first_slots, None, self._first_slots)
        self._compile(self._forward)
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        try:
            self._replay, _ = record(self._run, device, pool=pool)
        finally:
            if device.type == "cuda":
                torch.cuda.set_rng_state(state, device)
            else:
                torch.set_rng_state(state)

    def _compile(self, forward: TreeForward) -> None:
        """Lets a forward be compiled, if the step is to be: once, for steps of all sizes."""
        forward.compiles, forward.any_shape = self.compiles, True

    @abstractmethod
    def _run(self) -> list[torch.Tensor]:
        """What is captured; returns what is read when it has run."""

    def load(self, requests: list[Request], *values: Any) -> None:
        """Takes the rows of a step; see `InFlightRows.load`."""
        self.rows.load(requests, *values)
