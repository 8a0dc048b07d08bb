"""The draft vocabulary of a drafter, where captured steps find it."""

from __future__ import annotations

import weakref

import torch
from torch import nn


_held: weakref.WeakKeyDictionary[nn.Module, HeldVocabulary] = weakref.WeakKeyDictionary()


def held_by(head: nn.Module, ids: torch.Tensor) -> HeldVocabulary:
    """
    The vocabulary of a head, which captured steps of several calls read: the one object that there is for it, with the
    tokens `ids`.
    """
    held = _held.get(head)
    _held[head] = held = HeldVocabulary(ids) if held is None else held.renewed(ids)
    return held


class HeldVocabulary:
    """
    A head's draft vocabulary in tensors that keep their addresses: captured steps read them as long as they live, and
    a head may exchange tokens between calls (`OnlineHead`).

    Args:
        ids (`torch.Tensor` of shape `[draft vocab]`, int64): the target's token of every index of the head's logits.
    """

    def __init__(self, ids: torch.Tensor):
        self.ids = ids.clone()
        self._columns: dict[int, torch.Tensor] = {}

    def columns(self, vocab_size: int) -> torch.Tensor:
        """The inverse, `[vocab_size]` int32: the index of every token of the target, −1 where there is none."""
        if vocab_size not in self._columns:
            self._columns[vocab_size] = _columns_of(self.ids, vocab_size)
        return self._columns[vocab_size]

    def renewed(self, ids: torch.Tensor) -> HeldVocabulary:
        """The vocabulary `ids`: this object, written over in place, if number and device are the same."""
        if ids.shape != self.ids.shape or ids.device != self.ids.device:
            return HeldVocabulary(ids)
        if torch.equal(ids, self.ids):
            return self
        with torch.inference_mode():  # tensors made in it can be written nowhere else
            self.ids.copy_(ids)
            for vocab_size, columns in self._columns.items():
                columns.copy_(_columns_of(self.ids, vocab_size))
        return self


def _columns_of(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    columns = torch.full((vocab_size,), -1, dtype=torch.int32, device=ids.device)
    return columns.scatter_(0, ids, torch.arange(len(ids), dtype=torch.int32, device=ids.device))
