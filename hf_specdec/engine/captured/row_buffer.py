"""The values of a step's rows in one buffer, which is copied to the device at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch


class RowBuffer:
    """
    Values by name, staged on the host and on the device.

    Args:
        moving, fixed (`dict[str, tuple[int, …]]`): shapes of values that runs of a step change, and of the others.
        dtypes (`dict[str, torch.dtype]`): dtypes of values that are not int64.
        device (`torch.device`): device of the step.
    """

    def __init__(
        self,
        moving: Mapping[str, tuple[int, ...]],
        fixed: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
    ):
        shapes = {**moving, **fixed}
        sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        is_cuda = device.type == "cuda"
        # Kernels are compiled apart for addresses that are no multiples of 16 bytes: two places.
        room = {name: size + size % 2 for name, size in sizes.items()}
        self._staged = torch.zeros(sum(room.values()), dtype=torch.long, device="cpu", pin_memory=is_cuda)
        self._on_device = torch.zeros_like(self._staged, device=device)
        self._was_copied = torch.cuda.Event() if is_cuda else None
        self._first_fixed = sum(room[name] for name in moving)
        self.host: dict[str, np.ndarray] = {}
        """The staged values, which may be written after `wait`."""
        self.device: dict[str, torch.Tensor] = {}
        """The values on the device, at fixed addresses."""
        start = 0
        for name, shape in shapes.items():
            part, dtype = slice(start, start + room[name]), dtypes.get(name, torch.long)
            # Half of a float32's place is not used: all values lie in one buffer of int64.
            self.host[name] = self._staged[part].view(dtype)[: sizes[name]].view(shape).numpy()
            self.device[name] = self._on_device[part].view(dtype)[: sizes[name]].view(shape)
            start = part.stop

    def wait(self) -> None:
        """Waits until the last copy has left the staged values."""
        if self._was_copied is not None:
            self._was_copied.synchronize()

    def copy(self, moving: bool = True) -> None:
        """Copies the staged values to the device, by default the moving ones, too. Does not wait."""
        first = 0 if moving else self._first_fixed
        self._on_device[first:].copy_(self._staged[first:], non_blocking=True)
        if self._was_copied is not None:
            self._was_copied.record()
