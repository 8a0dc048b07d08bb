"""
The tree-attention kernel in place of a dense mask: it reads the keys of every row up to its length, once for all heads
that share them, and takes a tree as bits. Used where it can run: on CUDA with Triton, by models that attend by "sdpa".
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from transformers import PreTrainedModel

from .kv_sizes import head_dim_of


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What the kernels take."""
DEVICES = {"cuda": DTYPES}
"""By type of device, the dtypes that the attention kernel takes."""
MOST_QUERIES = 1024
"""More are the tokens of a prompt, for which dense matrix products are as good."""
NODES_PER_WORD = 64
_LARGEST_HEAD = 256
_MOST_TOKENS = 64


@dataclass(frozen=True, eq=False)
class KernelInputs:
    """
    What the kernel is told of a forward; see `hf_specdec_kernels.tree_attention` for each.

    Args:
        lengths (`torch.Tensor` of shape `[batch]`, int64).
        ancestors (`torch.Tensor` of shape `[1 or batch, queries, words]`, int64).
        query_depths (`torch.Tensor` of shape `[1 or batch, queries]`, int64).
        node_depths (`torch.Tensor` of shape `[1 or batch, nodes]`, int64).
        first_slots (`torch.Tensor` of shape `[batch]`, int64).
        block_tables (`torch.Tensor` of shape `[batch, blocks]`, int64, *optional*).
    """

    lengths: torch.Tensor
    ancestors: torch.Tensor
    query_depths: torch.Tensor
    node_depths: torch.Tensor
    first_slots: torch.Tensor
    block_tables: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        lengths: torch.Tensor,
        ancestors: torch.Tensor,
        query_depths: torch.Tensor,
        node_depths: torch.Tensor,
        first_slots: torch.Tensor | None,
        multiple: int = 1,
        block_tables: torch.Tensor | None = None,
    ) -> KernelInputs:
        """From a mask `[1 or batch, queries, nodes]` bool, with nodes that nobody sees up to a multiple of nodes."""
        from hf_specdec_kernels import pack_ancestors

        behind = -ancestors.shape[2] % multiple
        if behind:
            node_depths = torch.nn.functional.pad(node_depths, (0, behind))
        if first_slots is None:
            first_slots = torch.zeros_like(lengths)
        return cls(lengths, pack_ancestors(ancestors), query_depths, node_depths, first_slots, block_tables)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, all that it has."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def to(self, device: torch.device) -> KernelInputs:
        """The same on a device."""
        return KernelInputs(**{name: value.to(device) for name, value in self.tensors().items()})

    def for_batch(self, batch_size: int) -> KernelInputs:
        """The same in memory of its own, with a row for every sequence."""
        expanded = {name: value.expand(batch_size, *value.shape[1:]) for name, value in self.tensors().items()}
        return KernelInputs(**{name: value.clone() for name, value in expanded.items()})

    def copy_(self, source: KernelInputs) -> None:
        """Takes the values of another step."""
        for name, value in self.tensors().items():
            value.copy_(getattr(source, name))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """
        The kernel: query `[batch, heads, queries, head_dim]` to `[batch, queries, heads, head_dim]`. Without soft-caps
        and sinks, of which "sdpa" knows nothing either.
        """
        from hf_specdec_kernels import tree_attention

        return tree_attention(
            query,
            key,
            value,
            self.lengths,
            self.ancestors,
            num_nodes=self.node_depths.shape[1],
            first_slots=self.first_slots,
            query_depths=self.query_depths,
            node_depths=self.node_depths,
            block_tables=self.block_tables,
            scale=scale,
            window=window,
        )


@dataclass(frozen=True, eq=False)
class Compaction:
    """
    The kernel that moves accepted nodes to their places, for keys and values of one layout.

    Args:
        states (`list[torch.Tensor]`): keys and values of layers.
        pointers (`torch.Tensor` of shape `[states]`, int64): their addresses.
    """

    states: list[torch.Tensor]
    pointers: torch.Tensor

    def __call__(
        self,
        lengths: torch.Tensor,
        path: torch.Tensor,
        accepted: torch.Tensor,
        block_tables: torch.Tensor | None = None,
    ) -> None:
        """See `hf_specdec_kernels.kv_compaction`."""
        from hf_specdec_kernels import kv_compaction

        kv_compaction(self.states, self.pointers, lengths, path, accepted, block_tables=block_tables)

    @classmethod
    def of(cls, layers: Iterable[Any]) -> list[Compaction]:
        """Those that all of a cache's layers need."""
        from hf_specdec_kernels import pointer_table

        found: dict[Any, list[torch.Tensor]] = {}
        for layer in layers:
            for states in (layer.keys, layer.values) if layer.is_initialized else ():
                key = (states.shape, states.stride(), states.dtype, states.device)
                found.setdefault(key, []).append(states)
        return [cls(group, pointer_table(group)) for group in found.values()]


@lru_cache(maxsize=1)
def are_installed() -> bool:
    """Whether the kernels, and what they are written in, are there."""
    return all(importlib.util.find_spec(name) is not None for name in ("triton", "hf_specdec_kernels"))


def pick_tokens(logits: torch.Tensor, count: int) -> bool:
    """Whether `best_tokens` can find the best of these."""
    return (
        logits.device.type in DEVICES
        and logits.dtype in DTYPES
        and count <= min(_MOST_TOKENS, logits.shape[-1])
        and logits.stride(-1) == 1
        and are_installed()
    )


def best_tokens(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The `count` best tokens for logits `[…, vocab]`, and their log-probabilities in float32, `[…, count]` each, in one
    pass and without the softmax of all.
    """
    from hf_specdec_kernels import draft_tokens

    rows = logits.reshape(1, -1, logits.shape[-1])
    tokens, log_q = (found.view(*logits.shape[:-1], count) for found in draft_tokens(rows, count))
    return tokens.clamp(min=0), log_q  # where there are fewer than `count`, any will do


def attends_by_kernel(model: PreTrainedModel, implementation: str) -> bool:
    """Whether a model's forwards over trees can use the kernel instead of `implementation`."""
    config = model.config.get_text_config(decoder=True)
    return (
        implementation == "sdpa"
        and model.dtype in DEVICES.get(model.device.type, ())
        and head_dim_of(config) <= _LARGEST_HEAD
        and are_installed()
    )


def first_slots_of(visible: torch.Tensor | None) -> torch.Tensor | None:
    """
    The first slot of every row that holds a token, `[batch]` int64, from `[batch, slots]` bool; None if there is
    padding anywhere but on the left. Waits for the device.
    """
    if visible is None or bool((visible[:, 1:] < visible[:, :-1]).any()):
        return None
    return (~visible).sum(dim=1)
