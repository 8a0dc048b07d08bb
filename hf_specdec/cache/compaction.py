"""Compaction of K/V by the Triton kernel: accepted nodes of all layers move in one launch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Compaction:
    """
    The kernel that moves K/V of accepted nodes right after the committed slots, for all K/V tensors of one layout.

    Args:
        states (`list[torch.Tensor]`): keys and values of layers, or keys of indexers, of equal shape, strides, dtype
            and device.
        pointers (`torch.Tensor` of shape `[states]`, int64): device addresses of `states`.
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
        """Moves the accepted nodes' K/V in place; arguments as in `hf_specdec_kernels.kv_compaction`."""
        from hf_specdec_kernels import kv_compaction

        kv_compaction(self.states, self.pointers, lengths, path, accepted, block_tables=block_tables)

    @classmethod
    def of(cls, layers: Iterable[Any]) -> list[Compaction]:
        """The compactions of a cache's layers, one per layout of K/V tensors."""
        from hf_specdec_kernels import pointer_table

        found: dict[Any, list[torch.Tensor]] = {}
        for layer in layers:
            for states in layer.states if layer.is_initialized else ():
                key = (states.shape, states.stride(), states.dtype, states.device)
                found.setdefault(key, []).append(states)
        return [cls(group, pointer_table(group)) for group in found.values()]
