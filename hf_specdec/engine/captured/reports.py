"""Reading what steps on the device report, while later runs of the same step are on their way."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch


class HostCopy:
    """
    Pinned memory on the host for copies of a tensor on the device. The host waits for an event, and not inside of a
    copy: while a thread waited in `tensor.tolist()`, adding a request took another thread 9 to 14 ms in place of 2
    (SmolLM2, H200).

    Args:
        source (`torch.Tensor`): the tensor.
    """

    def __init__(self, source: torch.Tensor):
        is_cuda = source.device.type == "cuda"
        self._source = source
        self._copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=is_cuda)
        self._has_come: Any = torch.cuda.Event() if is_cuda else None

    def start(self) -> None:
        """Starts a copy of the tensor as the work launched so far will leave it. Does not wait."""
        self._copy.copy_(self._source, non_blocking=True)
        if self._has_come is not None:
            self._has_come.record(torch.cuda.current_stream(self._source.device))  # the stream of the copy

    def read(self) -> list[list[int]]:
        """Waits for the copy and returns it."""
        return self.read_tensor().tolist()

    def read_tensor(self) -> torch.Tensor:
        """Waits for the copy and returns it as it is: the next copy overwrites it."""
        if self._has_come is not None:
            self._has_come.synchronize()
        return self._copy


class Reports:
    """
    Copies of a tensor that runs of a step overwrite, one after the other, on the host.

    Args:
        report (`torch.Tensor`): the tensor.
    """

    MOST_UNREAD = 2
    """Most copies that may be on their way at a time."""

    def __init__(self, report: torch.Tensor):
        self._free = deque(HostCopy(report) for _ in range(self.MOST_UNREAD))
        self._unread: deque[HostCopy] = deque()

    def __len__(self) -> int:
        """Number of copies that have not been read."""
        return len(self._unread)

    def fetch(self) -> None:
        """Starts a copy of the tensor as the last launched run will leave it. Does not wait."""
        copy = self._free.popleft()
        copy.start()
        self._unread.append(copy)

    def next(self) -> HostCopy:
        """The first copy that has not been read, which is to be read before the next but one is fetched."""
        copy = self._unread.popleft()
        self._free.append(copy)
        return copy

    def forget(self) -> None:
        """Drops the copies that have not been read."""
        self._free += self._unread
        self._unread.clear()
