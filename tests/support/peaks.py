"""The most memory that tensors take at once, counted as they are made and dropped: as an allocator would, anywhere."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """
    A context that counts the bytes of tensors that operations make inside.

    Args:
        known (`Iterable[torch.Tensor]`): tensors that were there before, such as weights, of which views do not count.
    """

    def __init__(self, known: Iterable[torch.Tensor]):
        super().__init__()
        self.live = self.peak = 0
        self._kept = list(known)
        self._counted = {tensor.untyped_storage()._cdata for tensor in self._kept}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._counted:
            return
        self._counted.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.live -= size
