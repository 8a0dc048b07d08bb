"""Mamba-2's state space, SSD (Dao and Gu, 2024, arXiv 2405.21060), over trees: the chunk form with ancestors' mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad, softplus

from .kernel import LARGEST_KEY, KernelForward, StateKernel
from .recurrence import Recurrence
from .topology import NodeTopology


if TYPE_CHECKING:
    from hf_specdec_kernels import PendingPath


class Mamba2Kernel(StateKernel):
    """`tree_ssd` of `hf_specdec_kernels`."""

    def serves(self, state: tuple[int, ...]) -> bool:
        return len(state) == 3 and state[2] <= LARGEST_KEY

    def pending_bytes(self, channels: int, state: tuple[int, ...], itemsize: int) -> int:
        heads, head_dim, _ = state
        return (channels - heads * head_dim) * itemsize + 4 * (heads * head_dim + 2 * heads)

    def arguments(
        self,
        channels: int,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int | None = None,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        of_nodes = {"x": hidden_states, "dt": dt, "B": B.to(hidden_states.dtype), "C": C.to(hidden_states.dtype)}
        return of_nodes | {"A": A.float(), "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus}

    def pending(self, arguments: dict[str, Any], states: torch.Tensor, nodes: int) -> Any:
        from hf_specdec_kernels import DeltaPending

        B, (slots, heads, head_dim, _) = arguments["B"], states.shape
        return DeltaPending(
            B.new_zeros(2, slots, nodes, *B.shape[2:]),
            states.new_zeros(slots, nodes, heads, head_dim),
            states.new_zeros(2, slots, nodes, heads),
        )

    def score(
        self,
        arguments: dict[str, Any],
        states: torch.Tensor,
        pending: Any,
        forward: KernelForward,
    ) -> torch.Tensor:
        from hf_specdec_kernels import tree_ssd

        ancestors, rows = forward.ancestors(states.device), forward.rows(states.device)
        return tree_ssd(**arguments, states=states, pending=pending, ancestors=ancestors, rows=rows)

    def commit(self, arguments: dict[str, Any], states: torch.Tensor, pending: Any, rows: PendingPath) -> None:
        from hf_specdec_kernels import commit_ssd

        commit_ssd(states, pending, rows)


class Mamba2(Recurrence):
    """
    S ← e^(A·dt) S + dt·x Bᵀ; y = S C + D x, with S `[batch, heads, head_dim, state_size]` float32.

    With G_i the sum of A·dt over node i and its ancestors, and S the state before the root, y_i = e^(G_i) S C_i +
    Σ_j (C_i · B_j) e^(G_i − G_j) dt_j x_j over the ancestors j of i, itself included. All exponents are at most 0.

    transformers bounds dt in its code for many tokens (`dt_limit`), which reads prompts, and does not in that for one
    token, which writes the text.
    """

    functions = ("mamba2_chunk_scan",)
    kernel = Mamba2Kernel()
    constants = ("A", "D", "limits")
    reads_at_once = True

    def inputs(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int | None = None,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: Any,
    ) -> dict[str, Any]:
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = softplus(dt)
        D = A.new_zeros(A.shape) if D is None else D
        return {"x": hidden_states, "dt": dt, "B": B, "C": C, "A": A, "D": D, "limits": dt_limit}

    def of_prompt(self, inputs: dict[str, Any], is_prompt: torch.Tensor) -> dict[str, Any]:
        bounded = inputs["dt"].clamp(*inputs["limits"])
        return inputs | {"dt": torch.where(is_prompt[..., None], bounded, inputs["dt"])}

    def first_state(self, inputs: dict[str, Any]) -> torch.Tensor:
        x, B = inputs["x"], inputs["B"]
        return x.new_zeros(len(x), *x.shape[2:], B.shape[3], dtype=torch.float32)

    def score(
        self,
        state: torch.Tensor,
        inputs: dict[str, Any],
        earlier: dict[str, torch.Tensor] | None,
        topology: NodeTopology,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x, dt, B, C = (inputs[name].float() for name in ("x", "dt", "B", "C"))
        kept = {"decay": dt * inputs["A"].float(), "write": x * dt[..., None], "B": B}
        nodes = kept if earlier is None else {name: torch.cat([earlier[name], kept[name]], 1) for name in kept}
        ancestors = topology.ancestors_on(x.device)  # [1 or batch, queries, nodes]
        sums = ancestors.float() @ nodes["decay"]  # G of the queries, [batch, queries, heads]
        all_sums = sums if earlier is None else torch.cat([earlier["sum"], sums], 1)
        exponents = sums[:, :, None] - all_sums[:, None]
        decays = exponents.masked_fill(~ancestors[..., None], -torch.inf).exp()
        heads = x.shape[2]
        products = _of_heads(torch.einsum("bign,bjgn->bijg", C, nodes["B"]), heads)
        within = torch.einsum("bijh,bjhp->bihp", products * decays, nodes["write"])
        before = torch.einsum("bhin,bhpn->bihp", _of_heads(C.movedim(2, -1), heads).movedim(-1, 1), state.float())
        outputs = before * sums.exp()[..., None] + within + inputs["D"].float()[..., None] * x
        # Falcon-H1 takes a view of them.
        return outputs.contiguous().to(inputs["x"].dtype), kept | {"sum": sums}

    def bytes_of_reading(self, state: tuple[int, ...]) -> int:
        heads, head_dim, size = state
        # x, what it writes, as it is and decayed, outputs; B and C of heads, decayed; three products of a block.
        return 4 * heads * (5 * head_dim + 4 * size + 3 * self.block_at_once)

    def read(
        self, state: torch.Tensor, inputs: dict[str, Any], is_on: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `score` and `advance` block by block, but all that does not depend on the state at once."""
        heads, length = inputs["x"].shape[2], is_on.shape[1]
        padding = -length % self.block_at_once
        x, dt, B, C = (
            pad(one.float().masked_fill(~is_on[:, :, None, None], 0.0).transpose(1, 2), (0, 0, 0, padding)).unflatten(
                2, (-1, self.block_at_once)
            )
            for one in (inputs["x"], inputs["dt"][..., None], inputs["B"], inputs["C"])
        )  # [batch, heads or groups, blocks, block, …]
        sums = (dt * inputs["A"].float()[:, None, None, None]).cumsum(dim=3)
        last, write = sums[..., -1:, :], dt * x
        is_later = torch.ones(self.block_at_once, self.block_at_once, dtype=torch.bool, device=x.device).triu(1)
        decays = (sums - sums.transpose(3, 4)).masked_fill_(is_later, -torch.inf).exp_()
        repeats = heads // B.shape[1]
        products = (C @ B.transpose(3, 4)).repeat_interleave(repeats, dim=1)
        found = decays.mul_(products) @ write + inputs["D"].float()[:, None, None, None] * x
        B, C = (one.repeat_interleave(repeats, dim=1) for one in (B, C))
        C, write, last = sums.exp() * C, ((last - sums).exp() * write).transpose(3, 4), last.exp()
        moved = state.float()
        for place in range(found.shape[2]):
            found[:, :, place] += C[:, :, place] @ moved.transpose(2, 3)
            moved = moved * last[:, :, place] + write[:, :, place] @ B[:, :, place]
        outputs = found.flatten(2, 3)[:, :, :length].transpose(1, 2)
        # Falcon-H1 takes a view of them.
        return outputs.contiguous().to(inputs["x"].dtype), moved.to(state.dtype)

    def advance(self, state: torch.Tensor, kept: dict[str, Any], is_on: torch.Tensor) -> torch.Tensor:
        decay = kept["decay"].masked_fill(~is_on[..., None], 0.0)
        write, B = (kept[name].masked_fill(~is_on[..., None, None], 0.0) for name in ("write", "B"))
        sums = decay.cumsum(dim=1)
        last = sums[:, -1:]
        B = _of_heads(B.movedim(2, -1), decay.shape[2])  # [batch, most, state_size, heads]
        written = torch.einsum("bmhp,bmnh->bhpn", write * (last - sums).exp()[..., None], B)
        return state * last.exp().transpose(1, 2)[..., None] + written


def _of_heads(values: torch.Tensor, heads: int) -> torch.Tensor:
    """`[…, groups]` as `[…, heads]`; a group serves several heads that follow."""
    return values.repeat_interleave(heads // values.shape[-1], dim=-1)
