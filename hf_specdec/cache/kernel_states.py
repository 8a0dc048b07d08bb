"""`RunsByKernel`: the part of a state layer that runs by kernels, which commit a step in the forward of the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..states import KernelForward, Recurrence, StateKernel, convolution
from ..states.kernel import MOST_NODES


if TYPE_CHECKING:
    from .tree_cache import TreeCache


@dataclass
class KernelPending:
    """
    What the nodes of a step of all slots leave pending of one state of a layer, where the kernels run.

    Args:
        conv_inputs (`torch.Tensor` of shape `[slots, nodes, channels]`): the inputs of the convolution.
        kernel (`StateKernel`, *optional*): the kernels of the recurrence behind it.
        kept (`NamedTuple`, *optional*): what they leave pending.
        constants (`dict`): the `StateKernel.constants`.
    """

    conv_inputs: torch.Tensor
    kernel: StateKernel | None = None
    kept: Any = None
    constants: dict[str, Any] = field(default_factory=dict)


class RunsByKernel:
    """A layer whose states lie in slots, of all rows of its cache."""

    cache: TreeCache
    conv_states: dict[int, Any]
    recurrent_states: dict[int, Any]
    kernel_pending: dict[int, KernelPending]
    """What is pending of each state."""

    def convolve_by_kernel(
        self,
        state_idx: int,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        forward: KernelForward,
    ) -> torch.Tensor:
        """The convolution at the queries; see `convolution.convolve_by_kernel`."""
        held, pending = self.conv_states[state_idx], self.kernel_pending.get(state_idx)
        if pending is None:
            memory = held.new_zeros(len(held), MOST_NODES, held.shape[1])
            pending = self.kernel_pending[state_idx] = KernelPending(memory)
        return convolution.convolve_by_kernel(held, pending.conv_inputs, inputs, weight, bias, activation, forward)

    def scan_by_kernel(
        self, state_idx: int, recurrence: Recurrence, forward: KernelForward, *args: Any, **kwargs: Any
    ) -> Any:
        """The recurrence at the queries, from the arguments of transformers' function."""
        kernel, held, pending = recurrence.kernel, self.recurrent_states[state_idx], self.kernel_pending[state_idx]
        assert kernel is not None
        arguments = kernel.arguments(pending.conv_inputs.shape[2], *args, **kwargs)
        if held is None:
            first = recurrence.first_state(recurrence.inputs(*args, **kwargs))
            self._hold_state(first.new_zeros(self.cache.num_states or len(first), *first.shape[1:]), state_idx)
            held = self.recurrent_states[state_idx]
        if pending.kept is None:
            pending.kernel, pending.kept = kernel, kernel.pending(arguments, held, MOST_NODES)
        pending.constants = {name: arguments[name] for name in kernel.constants}
        return recurrence.returned(kernel.score(arguments, held, pending.kept, forward), held)

    def commit_pending(self, rows: Any) -> None:
        """Commits what the kernels have left pending of the slots of `rows`, a `PendingPath`."""
        from hf_specdec_kernels import commit_conv

        for number, pending in self.kernel_pending.items():
            held = self.conv_states[number]
            own = type(rows)(*(values.to(held.device) for values in rows))
            commit_conv(held, pending.conv_inputs, own)
            if pending.kernel is not None:
                pending.kernel.commit(pending.constants, self.recurrent_states[number], pending.kept, own)

    def _hold_state(self, state: torch.Tensor, number: int) -> None:
        raise NotImplementedError(f"{type(self).__name__} must implement `_hold_state`.")
