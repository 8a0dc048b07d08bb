"""
The gated delta rule: Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo hybrid), and Kimi Delta Attention, whose decay is per
key channel. Over a tree it is the chunk form with the mask of ancestors; see `DeltaRule.score`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from .kernel import LARGEST_KEY, KernelForward, StateKernel
from .recurrence import Recurrence
from .topology import NodeTopology


if TYPE_CHECKING:
    from hf_specdec_kernels import PendingPath


PART = 16
"""Tokens of a text whose products are taken channel by channel, where each channel has a decay of its own."""


class DeltaRuleKernel(StateKernel):
    """`tree_delta_rule` of `hf_specdec_kernels`, for a decay per head or per key channel."""

    constants = ("normalize",)

    def __init__(self, decays_channels: bool):
        self._decays_channels = decays_channels

    def serves(self, state: tuple[int, ...]) -> bool:
        return len(state) == 3 and state[1] <= LARGEST_KEY

    def pending_bytes(self, channels: int, state: tuple[int, ...], itemsize: int) -> int:
        heads, key_dim, value_dim = state
        decays = heads * (key_dim if self._decays_channels else 1)
        keys = 2 * _key_heads(channels, heads, key_dim, value_dim) * key_dim
        return keys * itemsize + 4 * (heads * value_dim + 2 * decays)

    def arguments(
        self,
        channels: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        repeats = key.shape[2] // _key_heads(channels, value.shape[2], key.shape[3], value.shape[3])
        if repeats > 1:  # some releases repeat a head for all that share it
            query, key = query[:, :, ::repeats], key[:, :, ::repeats]
        of_nodes = {"query": query, "key": key, "value": value, "decay": g.float(), "beta": beta}
        return of_nodes | {"normalize": use_qk_l2norm_in_kernel}

    def pending(self, arguments: dict[str, Any], states: torch.Tensor, nodes: int) -> Any:
        from hf_specdec_kernels import DeltaPending

        key, decay, (slots, heads, _, value_dim) = arguments["key"], arguments["decay"], states.shape
        return DeltaPending(
            key.new_zeros(2, slots, nodes, *key.shape[2:]),
            states.new_zeros(slots, nodes, heads, value_dim),
            states.new_zeros(2, slots, nodes, *decay.shape[2:]),
        )

    def score(
        self,
        arguments: dict[str, Any],
        states: torch.Tensor,
        pending: Any,
        forward: KernelForward,
    ) -> torch.Tensor:
        from hf_specdec_kernels import tree_delta_rule

        return tree_delta_rule(
            **arguments,
            states=states,
            pending=pending,
            ancestors=forward.ancestors(states.device),
            rows=forward.rows(states.device),
            max_depth=forward.topology.max_depth,
        )

    def commit(self, arguments: dict[str, Any], states: torch.Tensor, pending: Any, rows: PendingPath) -> None:
        from hf_specdec_kernels import commit_delta_rule

        commit_delta_rule(states, pending, rows, **arguments)


def _key_heads(channels: int, heads: int, key_dim: int, value_dim: int) -> int:
    """Heads of keys, where queries, keys and values lie behind one convolution; else those of values."""
    of_keys, rest = divmod(channels - heads * value_dim, 2 * key_dim)
    return of_keys if rest == 0 and of_keys > 0 and heads % of_keys == 0 else heads


class DeltaRule(Recurrence):
    """
    S ← e^g S; u = β(v − Sᵀk); S ← S + k uᵀ; o = Sᵀq/√dk, with S `[batch, value_heads, dk, dv]` float32.

    With G_i the sum of g over node i and its ancestors, and S the state before the root, u solves (I + L) u = β(v −
    Sᵀ(e^G k)), where L_ij = β_i (k_i · e^(G_i − G_j) k_j) for strict ancestors j of i. Nodes come after their
    ancestors, so L is lower triangular. All exponents are at most 0.
    """

    functions = ("torch_chunk_gated_delta_rule",)
    reads_at_once = True
    kernel = DeltaRuleKernel(decays_channels=False)

    def inputs(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        query, key, g, beta = (one.float() for one in (query, key, g, beta))
        if use_qk_l2norm_in_kernel:
            query, key = (one * torch.rsqrt(one.square().sum(dim=-1, keepdim=True) + 1e-6) for one in (query, key))
        if g.dim() == 3:
            g = g[..., None]  # one decay for all channels of a head
        return {
            "query": query * query.shape[-1] ** -0.5,
            "key": key,
            "value": value,
            "g": g,
            "beta": beta[..., None],
        }

    def first_state(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        key, value = inputs["key"], inputs["value"]
        return key.new_zeros(len(value), value.shape[2], key.shape[3], value.shape[3])

    def score(
        self,
        state: torch.Tensor,
        inputs: dict[str, torch.Tensor],
        earlier: dict[str, torch.Tensor] | None,
        topology: NodeTopology,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        num_heads, offset = inputs["value"].shape[2], topology.offset
        query, key, value, beta = (
            _by_head(inputs[name].float(), num_heads) for name in ("query", "key", "value", "beta")
        )
        g, keys = inputs["g"], key
        if earlier is not None:
            g = torch.cat([earlier["g"], g], dim=1)
            keys = torch.cat([_by_head(earlier["key"], num_heads), key], dim=2)
        ancestors = topology.ancestors_on(value.device)[:, None]  # [1 or batch, 1, queries, nodes]
        sums = ancestors.float() @ _by_head(g, num_heads)  # G of the queries
        all_sums = sums if earlier is None else torch.cat([_by_head(earlier["sums"], num_heads), sums], dim=2)
        among_keys, with_queries = _products(key, query, keys, sums, all_sums, ancestors)
        among_keys = beta * among_keys
        decay = sums.exp()
        new = beta * (value - (decay * key) @ state)
        if earlier is not None:
            deltas = _by_head(earlier["delta"], num_heads)
            new = new - among_keys[..., :offset] @ deltas
        # Reads what is below the diagonal alone.
        new = torch.linalg.solve_triangular(among_keys[..., offset:], new, upper=False, unitriangular=True)
        deltas = new if earlier is None else torch.cat([deltas, new], dim=2)
        outputs = (decay * query) @ state + with_queries @ deltas
        kept = {
            "key": inputs["key"],
            "g": inputs["g"],
            "sums": sums.transpose(1, 2),
            "delta": new.transpose(1, 2),
        }
        return outputs.transpose(1, 2).to(inputs["value"].dtype), kept

    def bytes_of_reading(self, state: tuple[int, ...]) -> int:
        heads, key_dim, value_dim = state
        # Queries, keys and values as they are, decayed, and solved; and three products of a block.
        return 4 * heads * (5 * (key_dim + value_dim) + 3 * self.block_at_once)

    def read(
        self, state: torch.Tensor, inputs: dict[str, torch.Tensor], is_on: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        As `score` and `advance` block by block, but all that does not depend on the state at once: with T = (I + L)⁻¹
        of a block, u = T β v − T β e^G k S (the chunk form of arXiv 2412.06464).
        """
        num_heads, length = inputs["value"].shape[2], is_on.shape[1]
        block = self.block_at_once
        is_off, padding = ~is_on[:, :, None, None], -length % block
        query, key, value, g, beta = (
            F.pad(_by_head(inputs[name].float().masked_fill(is_off, 0.0), num_heads), (0, 0, 0, padding)).unflatten(
                2, (-1, block)
            )
            for name in ("query", "key", "value", "g", "beta")
        )
        sums = g.cumsum(dim=3)
        last, decay = sums[..., -1:, :], sums.exp()
        given = torch.cat([value, decay * key], dim=-1) * beta
        among_keys, with_queries = _products_of_blocks(key, query, sums)
        solved = torch.linalg.solve_triangular(beta * among_keys, given, upper=False, unitriangular=True)
        new, reads = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
        query, key, last = decay * query, (last - sums).exp() * key, last.exp().transpose(3, 4)
        outputs, moved = [], state.float()
        for place in range(new.shape[2]):
            deltas = new[:, :, place] - reads[:, :, place] @ moved
            outputs.append(query[:, :, place] @ moved + with_queries[:, :, place] @ deltas)
            moved = moved * last[:, :, place] + key[:, :, place].transpose(2, 3) @ deltas
        found = torch.cat(outputs, dim=2)[:, :, :length]
        return found.transpose(1, 2).to(inputs["value"].dtype), moved.to(state.dtype)

    def advance(self, state: torch.Tensor, kept: dict[str, torch.Tensor], is_on: torch.Tensor) -> torch.Tensor:
        num_heads, is_off = state.shape[1], ~is_on[:, :, None, None]
        key, g, delta = (_by_head(kept[name].masked_fill(is_off, 0.0), num_heads) for name in ("key", "g", "delta"))
        sums = g.cumsum(dim=2)
        last = sums[:, :, -1:]
        return state * last.exp().transpose(2, 3) + ((last - sums).exp() * key).transpose(2, 3) @ delta


class KimiDeltaAttention(DeltaRule):
    """The gated delta rule with a decay per key channel."""

    functions = ("chunk_kimi_delta_attention",)
    kernel = DeltaRuleKernel(decays_channels=True)
    block = PART  # the products of a block are taken channel by channel

    def transient_bytes(self, state: tuple[int, ...], queries: int, nodes: int) -> int:
        heads, channels = state[:2]
        return 4 * heads * queries * nodes * channels  # `_products`: the decayed keys

    def bytes_of_reading(self, state: tuple[int, ...]) -> int:
        heads, channels = state[:2]
        # Sums and decays of channels; and the decayed keys of `_products_of_blocks`.
        return super().bytes_of_reading(state) + 4 * heads * channels * (4 + PART)


def _by_head(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """`[batch, nodes, heads, size]` as `[batch, num_heads, nodes, size]`; a head serves several that follow."""
    values = values.transpose(1, 2)
    repeats = num_heads // values.shape[1]
    return values if repeats == 1 else values.repeat_interleave(repeats, dim=1)


def _products(
    key: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    sums: torch.Tensor,
    all_sums: torch.Tensor,
    ancestors: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Decayed products of keys, and of queries, with the keys of the nodes that they follow, `[batch, heads, queries,
    nodes]` each; 0 for all other nodes.
    """
    decays = sums[..., :, None, :] - all_sums[..., None, :, :]
    decays.masked_fill_(~ancestors[..., None], -torch.inf).exp_()  # in place: by channels this is large
    if decays.shape[-1] == 1:
        decay, others = decays[..., 0], keys.transpose(2, 3)
        is_off = ~ancestors
        return tuple((decay * (one @ others)).masked_fill(is_off, 0.0) for one in (key, query))  # type: ignore
    decayed = decays.mul_(keys[:, :, None])
    return tuple(torch.einsum("bhid,bhijd->bhij", one, decayed) for one in (key, query))  # type: ignore


def _products_of_blocks(
    key: torch.Tensor, query: torch.Tensor, sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    As `_products`, of each block of a text with itself, `[batch, heads, blocks, block, block]` each; what is above the
    diagonal of the first one is any number.

    By channels, a block is divided in parts. With R the sum before a part, its tokens i and the tokens j before it
    have k_i e^(G_i − R) · k_j e^(R − G_j), whose exponents are at most 0; within a part, products go by channels.
    """
    block = key.shape[3]
    if sums.shape[-1] == 1:
        is_later = torch.ones(block, block, dtype=torch.bool, device=key.device).triu(1)
        decays = (sums - sums.transpose(3, 4)).masked_fill_(is_later, -torch.inf).exp_()
        others = key.transpose(3, 4)
        return decays * (key @ others), decays * (query @ others)
    found = tuple(one.new_zeros(*one.shape[:4], block) for one in (key, query))
    is_later = torch.ones(PART, PART, dtype=torch.bool, device=key.device).triu(1)[..., None]
    of_parts = sums.unflatten(3, (-1, PART))
    decayed = of_parts[..., None, :] - of_parts[..., None, :, :]
    decayed.masked_fill_(is_later, -torch.inf).exp_().mul_(key.unflatten(3, (-1, PART))[..., None, :, :])
    within = [(decayed @ one.unflatten(3, (-1, PART))[..., None])[..., 0] for one in (key, query)]
    for start in range(0, block, PART):
        own = slice(start, start + PART)
        before = sums[..., start - 1 : start, :] if start else 0.0
        earlier = ((before - sums[..., :start, :]).exp() * key[..., :start, :]).transpose(3, 4)
        since = (sums[..., own, :] - before).exp()
        for products, one, inner in zip(found, (key, query), within, strict=True):
            products[..., own, :start] = (since * one[..., own, :]) @ earlier
            products[..., own, own] = inner[..., start // PART, :, :]
    return found  # type: ignore[return-value]
