"""
States over trees by the kernels of `hf_specdec_kernels`. A forward first commits what was kept of the nodes of the
forward before, so that a state is read and written once a step; until then these nodes are pending, on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .topology import NodeTopology


if TYPE_CHECKING:
    from hf_specdec_kernels import PendingPath

MOST_NODES = 64
"""Most nodes of a forward, root included, that the kernels compute."""
MOST_TAPS = 16
"""Most taps of a convolution."""
LARGEST_KEY = 256
"""Largest dimension of keys that a program of a matrix state holds."""
LARGEST_SCAN = 64
"""Largest state of a channel that Mamba-1's scan takes."""


class StateKernel(ABC):
    """The kernels of one kind of recurrence."""

    constants: ClassVar[tuple[str, ...]] = ()
    """Names of the `arguments` that `commit` reads."""

    @abstractmethod
    def serves(self, state: tuple[int, ...]) -> bool:
        """Whether they compute states of this shape, of one text."""

    @abstractmethod
    def pending_bytes(self, channels: int, state: tuple[int, ...], itemsize: int) -> int:
        """Bytes that one pending node takes, where an activation takes `itemsize`."""

    @abstractmethod
    def arguments(self, channels: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """
        The kernel's arguments from those of transformers' function, behind a convolution of so many channels; what
        nodes have is `[batch, nodes, …]`.
        """

    @abstractmethod
    def pending(self, arguments: dict[str, Any], states: torch.Tensor, nodes: int) -> Any:
        """Memory for what so many nodes of each of the `states` leave pending."""

    @abstractmethod
    def score(
        self,
        arguments: dict[str, Any],
        states: torch.Tensor,
        pending: Any,
        forward: KernelForward,
    ) -> torch.Tensor:
        """Commits what is pending to the `states` of the rows, and returns the outputs at the nodes of `forward`."""

    @abstractmethod
    def commit(self, arguments: dict[str, Any], states: torch.Tensor, pending: Any, rows: PendingPath) -> None:
        """Commits what is pending of the rows; `arguments` has the `constants`."""


class PendingPaths:
    """
    Which pending nodes of every slot of a cache's states were kept, for all layers. Rows without a slot, whose number
    is below 0, write to a place after the last slot.

    Args:
        num_slots (`int`): slots.
        device (`torch.device`): where the numbers of rows' slots are.
    """

    def __init__(self, num_slots: int, device: torch.device):
        self._turns, self._counts = (torch.zeros(num_slots + 1, dtype=torch.long, device=device) for _ in range(2))
        self._path = torch.zeros(num_slots + 1, MOST_NODES, dtype=torch.long, device=device)

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return len(self._counts) - 1

    def of(self, slots: torch.Tensor) -> PendingPath:
        """What was kept of the slots of some rows, `[rows]` int64."""
        from hf_specdec_kernels import PendingPath

        places = self._places(slots)
        return PendingPath(slots, self._turns[:-1], self._path[places], self._counts[places])

    def keep(self, slots: torch.Tensor, path: torch.Tensor, counts: torch.Tensor) -> None:
        """Keeps the first `counts` nodes (`[rows]`, int64) of a path (`[rows, nodes]`, int64) of the last forward."""
        places = self._places(slots)
        self._path[:, : path.shape[1]].index_copy_(0, places, path)
        self._counts.index_copy_(0, places, counts)

    def limit(self, slots: torch.Tensor, count: int) -> None:
        """Keeps no more than `count` nodes of the paths of some slots."""
        places = self._places(slots)
        self._counts.index_copy_(0, places, self._counts[places].clamp(max=count))

    def forget(self, slots: torch.Tensor) -> None:
        """Keeps none of the pending nodes of some slots."""
        self._counts.index_fill_(0, self._places(slots), 0)

    def reset(self) -> None:
        """Keeps nothing of any slot."""
        self._counts.zero_()

    def end_forward(self, slots: torch.Tensor) -> None:
        """Takes note that a forward has committed what was kept, and left its own nodes pending."""
        places = self._places(slots)
        self._turns.index_add_(0, places, torch.ones_like(places))
        self._counts.index_fill_(0, places, 0)

    def _places(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.where(slots < 0, self.num_slots, slots)


class KernelForward:
    """
    What the kernels of all layers read in one forward over a tree, computed at its first layer.

    Args:
        topology (`NodeTopology`): the nodes of the forward, all of which are queries.
        slots (`torch.Tensor` of shape `[rows]`, int64): slot of every row; below 0 for none.
        paths (`PendingPaths`): what was kept of the forward before.
        of_nodes (`dict`, *optional*): where to look for what is computed of the nodes, and keep it.
    """

    def __init__(
        self,
        topology: NodeTopology,
        slots: torch.Tensor,
        paths: PendingPaths,
        of_nodes: dict[Any, torch.Tensor] | None = None,
    ):
        self.topology, self.slots, self._paths = topology, slots, paths
        self._rows: dict[torch.device, PendingPath] = {}
        self._of_nodes: dict[Any, torch.Tensor] = {} if of_nodes is None else of_nodes

    def rows(self, device: torch.device) -> PendingPath:
        """The rows, on a layer's device."""
        if device not in self._rows:
            rows = self._paths.of(self.slots)
            self._rows[device] = type(rows)(*(values.to(device) for values in rows))
        return self._rows[device]

    def ancestors(self, device: torch.device) -> torch.Tensor:
        """The ancestors of every node, packed, `[1 or rows, nodes, 1]` int64."""
        if device not in self._of_nodes:
            from hf_specdec_kernels import pack_ancestors

            self._of_nodes[device] = pack_ancestors(self.topology.ancestors_on(device))
        return self._of_nodes[device]

    def table(self, taps: int, device: torch.device) -> torch.Tensor:
        """The inputs of a convolution of `taps` at every node, see `hf_specdec_kernels.conv_table`."""
        key = taps, device
        if key not in self._of_nodes:
            from hf_specdec_kernels import conv_table

            parents, depths = self.topology.parents_on(device), self.topology.ancestors_on(device).sum(dim=2) - 1
            self._of_nodes[key] = conv_table(parents.clamp(min=0), depths, taps)
        return self._of_nodes[key]

    def end(self) -> None:
        """Takes note that all layers have run."""
        self._paths.end_forward(self.slots)

    def keep(self, path: torch.Tensor, counts: torch.Tensor) -> None:
        """Keeps the first `counts` nodes (`[rows]`, int64) of a path (`[rows, nodes]`, int64) of this forward."""
        self._paths.keep(self.slots, path, counts)


class StaticKernelForward:
    """
    The forward of a captured one, whose inputs lie at fixed addresses. Until they are loaded, no row has a slot, so
    that a capture leaves the states as they are.

    Args:
        forward (`KernelForward`): a forward of the same shape, or one that is padded to this.
        rows (`int`), nodes (`int`): size of the captured forward.
    """

    def __init__(self, forward: KernelForward, rows: int, nodes: int):
        device = forward.slots.device
        self._slots = torch.full((rows,), -1, dtype=torch.long, device=device)
        # A padding node follows itself alone.
        self._ancestors = torch.eye(nodes, dtype=torch.bool, device=device).repeat(rows, 1, 1)
        self._paths = forward._paths

    def load(self, forward: KernelForward) -> None:
        """Copies the inputs of another step."""
        rows, nodes = len(forward.slots), forward.topology.num_queries
        self._slots[rows:].fill_(-1)
        self._slots[:rows].copy_(forward.slots)
        if nodes < self._ancestors.shape[1]:
            self._ancestors.copy_(torch.eye(self._ancestors.shape[1], dtype=torch.bool, device=self._slots.device))
        self._ancestors[:rows, :nodes, :nodes].copy_(forward.topology.ancestors)

    def forward(self) -> KernelForward:
        """The forward, anew for every run of the captured function."""
        return KernelForward(NodeTopology(self._ancestors), self._slots, self._paths)
