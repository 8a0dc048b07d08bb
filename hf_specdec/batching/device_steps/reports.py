"""Reading what steps on the device report, while later runs of the same step are on their way."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch


class Reports:
    """
    Copies of a tensor that runs of a step overwrite, one after the other, on the host.

    Args:
        report (`torch.Tensor`): the tensor.
    """

    MOST_UNREAD = 2
    """Most copies that may be on their way at a time."""

    def __init__(self, report: torch.Tensor):
        self._report = report
        is_cuda = report.device.type == "cuda"
        self._free: deque[tuple[torch.Tensor, Any]] = deque(
            (
                torch.zeros(report.shape, dtype=report.dtype, pin_memory=is_cuda),
                torch.cuda.Event() if is_cuda else None,
            )
            for _ in range(self.MOST_UNREAD)
        )
        self._unread: deque[tuple[torch.Tensor, Any]] = deque()

    def fetch(self) -> None:
        """Starts a copy of the tensor as the last launched run will leave it. Does not wait."""
        on_host, has_come = self._free.popleft()
        on_host.copy_(self._report, non_blocking=True)
        if has_come is not None:
            has_come.record()
        self._unread.append((on_host, has_come))

    def read(self) -> list[list[int]]:
        """Waits for the first copy that has not been read, and returns it."""
        copy = self._unread.popleft()
        self._free.append(copy)
        on_host, has_come = copy
        if has_come is not None:
            has_come.synchronize()
        return on_host.tolist()

    def forget(self) -> None:
        """Drops the copies that have not been read."""
        self._free += self._unread
        self._unread.clear()
