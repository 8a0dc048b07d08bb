"""Mamba-1's selective scan (Gu and Dao, 2023, arXiv 2312.00752) over trees, by doubling the paths that are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import silu, softplus

from .kernel import LARGEST_SCAN, KernelForward, StateKernel
from .recurrence import Recurrence
from .topology import NodeTopology


if TYPE_CHECKING:
    from hf_specdec_kernels import PendingPath


class Mamba1Kernel(StateKernel):
    """`tree_selective_scan` of `hf_specdec_kernels`; not for Zamba, whose heads are scanned one by one."""

    constants = ("A",)

    def serves(self, state: tuple[int, ...]) -> bool:
        return len(state) == 2 and state[1] <= LARGEST_SCAN

    def pending_bytes(self, channels: int, state: tuple[int, ...], itemsize: int) -> int:
        return (state[0] + 2 * state[1]) * itemsize + 4 * state[0]

    def arguments(
        self,
        channels: int,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        B, C = (one.to(hidden_states.dtype).transpose(1, 2)[:, :, None] for one in (B, C))
        of_nodes = {"x": hidden_states.transpose(1, 2), "dt": dt.transpose(1, 2), "B": B, "C": C}
        of_nodes |= {"z": None if z is None else z.transpose(1, 2)}  # type: ignore[dict-item]
        return of_nodes | {"A": A.float(), "D": D, "dt_bias": delta_bias, "dt_softplus": delta_softplus}

    def pending(self, arguments: dict[str, Any], states: torch.Tensor, nodes: int) -> Any:
        from hf_specdec_kernels import ScanPending

        x, (slots, channels, size) = arguments["x"], states.shape
        return ScanPending(
            x.new_zeros(slots, nodes, channels),
            states.new_zeros(slots, nodes, channels),
            x.new_zeros(2, slots, nodes, 1, size),
        )

    def score(
        self,
        arguments: dict[str, Any],
        states: torch.Tensor,
        pending: Any,
        forward: KernelForward,
    ) -> torch.Tensor:
        from hf_specdec_kernels import tree_selective_scan

        ancestors, rows = forward.ancestors(states.device), forward.rows(states.device)
        return tree_selective_scan(**arguments, states=states, pending=pending, ancestors=ancestors, rows=rows)

    def commit(self, arguments: dict[str, Any], states: torch.Tensor, pending: Any, rows: PendingPath) -> None:
        from hf_specdec_kernels import commit_selective_scan

        commit_selective_scan(states, pending, arguments["A"], rows)


class Mamba1(Recurrence):
    """
    S ← e^(A·dt) S + dt·x B; y = (S C + D x) silu(z), with S `[batch, channels, state_size]` float32; in Zamba, whose
    heads are scanned one by one, `[batch, heads, channels, state_size]`.

    Every entry of the state decays at its own rate, so that no product of matrices reads several nodes. Steps compose:
    (e^a, w) after (e^b, v) is (e^(a + b), e^a v + w). Every round composes each node's steps with those above them, so
    that 1, 2, 4 … nodes of its path are read. The states of all nodes live as long as the scan.
    """

    functions = ("mamba_selective_scan",)
    kernel = Mamba1Kernel()
    state_dims = 3
    constants = ("A", "D")
    continues = False

    def transient_bytes(self, state: tuple[int, ...], queries: int, nodes: int) -> int:
        channels, size = state[-2:]
        return 3 * 4 * (nodes + 1) * channels * size  # `_states`: what nodes write, their decays, and one of a parent

    def inputs(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if delta_bias is not None:
            dt = dt + delta_bias.to(dt.dtype)[..., None]
        if delta_softplus:
            dt = softplus(dt)
        D = A.new_zeros(len(A)) if D is None else D
        by_node = {"x": hidden_states, "dt": dt, "B": B, "C": C} | ({} if z is None else {"z": z})
        return {name: values.transpose(1, 2) for name, values in by_node.items()} | {"A": A, "D": D}

    def first_state(self, inputs: dict[str, Any]) -> torch.Tensor:
        return inputs["A"].new_zeros(len(inputs["x"]), *inputs["A"].shape, dtype=torch.float32)

    def score(
        self,
        state: torch.Tensor,
        inputs: dict[str, Any],
        earlier: dict[str, torch.Tensor] | None,
        topology: NodeTopology,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x, dt, C = (inputs[name].float() for name in ("x", "dt", "C"))
        parents = topology.parents_on(x.device).expand(len(x), -1)
        kept = {"dt": dt, "write": x * dt, "B": inputs["B"].float(), "parent": parents}
        nodes = kept if earlier is None else {name: torch.cat([earlier[name], kept[name]], 1) for name in kept}
        states = _states(state.float(), nodes, inputs["A"].float())[:, -x.shape[1] :]
        outputs = (states @ C[..., None])[..., 0] + x * inputs["D"].float()
        if "z" in inputs:
            outputs = outputs * silu(inputs["z"].float())
        return outputs.to(inputs["x"].dtype), kept

    def advance(self, state: torch.Tensor, kept: dict[str, Any], is_on: torch.Tensor) -> torch.Tensor:
        dt, write, B = (kept[name].masked_fill(~is_on[..., None], 0.0) for name in ("dt", "write", "B"))
        A, sums = kept["A"].float(), dt.cumsum(dim=1)
        last = sums[:, -1:]
        decays = ((last - sums)[..., None] * A).exp_()  # [batch, most, channels, state_size]
        written = decays.mul_(write[..., None]).mul_(B[:, :, None]).sum(dim=1)
        return state * (last[:, 0, :, None] * A).exp() + written

    def returned(self, outputs: torch.Tensor, state: torch.Tensor) -> Any:
        return outputs.transpose(1, 2), state


def _states(state: torch.Tensor, nodes: dict[str, torch.Tensor], A: torch.Tensor) -> torch.Tensor:
    """The state after every node, `[batch, nodes, channels, state_size]`."""
    batch, number = nodes["parent"].shape
    # Place 0 holds the state before the root: it writes that state over whatever was there, and is its own parent.
    writes = torch.cat([state[:, None], nodes["write"][..., None] * nodes["B"][:, :, None]], dim=1)
    decays = torch.nn.functional.pad((nodes["dt"][..., None] * A).exp_(), (0, 0, 0, 0, 1, 0))
    above = torch.nn.functional.pad(nodes["parent"] + 1, (1, 0))
    rows = torch.arange(batch, device=state.device)[:, None]
    for _ in range(number.bit_length()):
        writes += writes[rows, above].mul_(decays)
        decays *= decays[rows, above]
        above = above.gather(1, above)
    return writes[:, 1:]
