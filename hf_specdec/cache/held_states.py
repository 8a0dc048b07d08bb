"""`HoldsStates`: the recurrent and convolutional states of a cache's rows, and what steps commit to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..states import KernelForward, NodeTopology, Path, PendingPaths


if TYPE_CHECKING:
    from .state_layers import StateLayer


class HoldsStates:
    """
    The part of a cache that has to do with states. A row's states lie in a slot of every layer.

    A state cannot be cropped, so forwards over trees leave it at the committed tokens, and a path of their nodes is
    applied when it is known where the text ends: at once if they ran by torch; by the kernels not before the next
    forward of the slot, or where something else reads the state (`flush`).
    """

    lengths: list[int]
    device: torch.device
    state_layers: Sequence[StateLayer] = ()
    """The layers with recurrent or convolutional states."""
    topology: NodeTopology | None = None
    """The nodes of the present forward over a tree, for state layers; None before the first one."""
    kernel_forward: KernelForward | None = None
    """What the kernels read in the present forward; None if it runs by torch."""
    state_rows: torch.Tensor | None = None
    """Slots of the states that belong to the rows of a forward, `[batch]` int64; None if they are the same."""
    num_states: int | None = None
    """Slots of the states, where they are not the rows of a forward."""
    _unsettled: list[list[int]] | None = None
    _paths: PendingPaths | None = None
    _pending_slots: frozenset[int] = frozenset()
    """Slots with kept nodes that the kernels have yet to commit, or may have."""

    @property
    def nodes(self) -> NodeTopology:
        """The `topology` of the present forward over a tree, for what runs in none other."""
        if self.topology is None:
            raise RuntimeError("`follow` must say which nodes follow which, before layers with states run over them.")
        return self.topology

    def follow(
        self,
        ancestors: torch.Tensor,
        counts: list[int] | None = None,
        prompt_counts: list[int] | None = None,
        by_kernel: bool = False,
    ) -> None:
        """
        Lets state layers run over nodes in the next forward, after `write_nodes`; see `NodeTopology`. Without
        `counts`, `keep` commits a path of them; with `counts`, `keep_text` commits these.

        Args:
            by_kernel (`bool`, *optional*, defaults to `False`): whether all layers run by the kernels, which commit
                what is pending in the same forward.
        """
        self.settle()
        self.topology = NodeTopology(ancestors, counts, prompt_counts)
        if by_kernel:
            self._pending_slots -= frozenset(self.slots_of_rows())
            self.kernel_forward = KernelForward(self.topology, self.slots_tensor(), self.pending_paths())
        else:
            self.flush()
            self.kernel_forward = None
            if self.topology.offset == 0:
                for layer in self.state_layers:
                    layer.begin_step()

    def settle(self, most: list[int] | None = None) -> None:
        """
        Applies the paths that `keep` has committed to the states, or leaves that to the kernels' next forward.

        Args:
            most (`list[int]`, *optional*): tokens of each row after which nothing counts.
        """
        paths, self._unsettled = self._unsettled, None
        if paths is None:
            return
        if most is not None:
            surplus = [max(length - end, 0) for length, end in zip(self.lengths, most, strict=True)]
            paths = [path[: max(len(path) - over, 0)] for path, over in zip(paths, surplus, strict=True)]
        if not any(paths):
            return
        if self.kernel_forward is None:
            path = Path.of(paths, self.device)
            for layer in self.state_layers:
                layer.settle(path)
        else:
            width = max(map(len, paths))
            kept = [[len(path), *path, *[0] * (width - len(path))] for path in paths]
            on_device = torch.tensor(kept, device=self.device)
            self.pending_paths().keep(self.slots_tensor(), on_device[:, 1:], on_device[:, 0])
            self._pending_slots |= {slot for slot, path in zip(self.slots_of_rows(), paths, strict=True) if path}

    def flush(self, slots: Sequence[int] | None = None) -> None:
        """Commits what is pending of some slots, or of those of the present rows, for who reads their states."""
        slots = self.slots_of_rows() if slots is None else slots
        left = sorted(self._pending_slots.intersection(slots))
        if not left:
            return
        self._pending_slots -= frozenset(left)
        paths, on_device = self.pending_paths(), torch.tensor(left, device=self.device)
        rows = paths.of(on_device)
        for layer in self.state_layers:
            layer.commit_pending(rows)
        paths.forget(on_device)

    def keep_chain(self, counts: list[int]) -> None:
        """
        Keeps the first `counts` nodes of every row, which a forward has run as a chain: they are read, whatever the
        forwards after it draft. Lengths stay as they are.
        """
        self._unsettled = [list(range(count)) for count in counts]
        self.settle()

    def keep_text(self, counts: list[int]) -> None:
        """Commits the first `counts` nodes of every row, which a forward has read as a text."""
        if self.state_layers:
            self.settle_text()
        self.set_lengths([length + count for length, count in zip(self.lengths, counts, strict=True)])

    def settle_text(self) -> None:
        """Applies the text that the last forward has read, its `counts`, to the states; see `follow`."""
        path = Path.of([[0]] * len(self.lengths), self.device)
        for layer in self.state_layers:
            layer.settle(path)

    def set_lengths(self, lengths: list[int]) -> None:
        """Sets the number of committed slots of every row."""
        raise NotImplementedError(f"{type(self).__name__} must implement `set_lengths`.")

    # -------------------------------------------------------------------------------------------------------- memory

    def slots_of_rows(self) -> Sequence[int]:
        """The slot of every row of a forward."""
        return range(len(self.lengths))

    def slots_tensor(self) -> torch.Tensor:
        """The slot of every row of a forward, `[batch]` int64 on the device."""
        return torch.arange(len(self.lengths), device=self.device) if self.state_rows is None else self.state_rows

    def pending_paths(self) -> PendingPaths:
        """What was kept of the pending nodes of every slot."""
        if self._paths is None:
            self._paths = PendingPaths(self.num_states or len(self.lengths), self.device)
        return self._paths

    def place_states(self, key: Any, states: torch.Tensor) -> torch.Tensor:
        """The states of a layer, where they lie from now on."""
        return states
