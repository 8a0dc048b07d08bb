"""The inputs of a forward over nodes, and the nodes of a plain text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class NodeInputs:
    """
    Inputs of a forward over nodes, except for its `TreeContext`.

    Args:
        tokens (`torch.Tensor` of shape `[batch, queries]`, int64): tokens of the nodes.
        positions (`torch.Tensor` of shape `[…, batch, queries]`, int64, *optional*): positions of the nodes.
        logits_to_keep (`int` or `torch.Tensor`): how many of the last queries get logits (0: all), or the indices of
            the queries that get logits.
        others (`dict`, *optional*): keyword arguments that the model gets instead of tokens.
    """

    tokens: torch.Tensor
    positions: torch.Tensor | None
    logits_to_keep: int | torch.Tensor
    others: dict[str, Any] | None

    @property
    def key(self) -> Any:
        """Shapes, dtypes and constants, which are equal for all inputs that one captured CUDA graph can run."""
        others = tuple(
            (name, (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value)
            for name, value in (self.others or {}).items()
        )
        positions = None if self.positions is None else self.positions.shape
        return self.tokens.shape, positions, self.logits_to_keep, others

    def clone(self) -> NodeInputs:
        """A copy in memory of its own."""
        others = self.others and {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in self.others.items()
        }
        positions = None if self.positions is None else self.positions.clone()
        return NodeInputs(self.tokens.clone(), positions, self.logits_to_keep, others)

    def copy_(self, source: NodeInputs) -> None:
        """Copies the values of other inputs, which must have an equal `key`, into these tensors."""
        self.tokens.copy_(source.tokens)
        if self.positions is not None and source.positions is not None:
            self.positions.copy_(source.positions)
        new = source.others or {}
        for name, value in (self.others or {}).items():
            if isinstance(value, torch.Tensor):
                value.copy_(new[name])


def causal_chain(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A chain of nodes, as of a text: `ancestors` `[1, length, length]` bool and `depths` `[1, length]` int64."""
    return _short_causal_chain(length, device) if length <= 32 else _new_causal_chain(length, device)


def _new_causal_chain(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ancestors: Any = torch.ones(1, length, length, dtype=torch.bool, device=device).tril()
    ancestors.is_causal_chain = True  # to see this in the numbers would wait for the device
    return ancestors, torch.arange(length, device=device)[None]


def is_causal_chain(ancestors: torch.Tensor) -> bool:
    """Whether `causal_chain` has made these ancestors."""
    return getattr(ancestors, "is_causal_chain", False)


_short_causal_chain = lru_cache(maxsize=128)(_new_causal_chain)
"""Cached chains, because every step of a draft model needs one."""
