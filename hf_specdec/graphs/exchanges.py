"""
Graphs that hold exchanges between ranks. NCCL ends a communicator only when no graph with its kernels is left: until
then `torch.distributed.destroy_process_group` waits, and the end of the process, too. So these graphs are freed first.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist

from ..ranks import Ranks


_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The ranks' process group, by graph."""
_of_thread = threading.local()


@contextmanager
def captured_together(ranks: Ranks) -> Iterator[None]:
    """A context for a capture that all ranks have or none, see `Ranks.together`."""
    before, _of_thread.group = _group(), ranks.group
    try:
        with ranks.together():
            yield
    finally:
        _of_thread.group = before


def are_captured() -> bool:
    """Whether this thread captures for several ranks."""
    return _group() is not None


def note(graph: Any) -> None:
    """Takes note of a new graph, which is freed before the process group if it was captured for several ranks."""
    if _group() is not None:
        _groups[graph] = _group()
        _free_before_the_group()


def free(group: Any = None) -> None:
    """Frees the graphs with exchanges in a process group (None: in any), after which nothing can replay them."""
    freed = [graph for graph, its in _groups.items() if group in (None, its)]
    if freed:
        torch.cuda.synchronize()
    for graph in freed:
        del _groups[graph]
        graph.reset()


def _group() -> Any:
    return getattr(_of_thread, "group", None)


@cache
def _free_before_the_group() -> None:
    """Lets the end of a process group, and that of the process, free its graphs first."""
    destroy = dist.destroy_process_group

    @wraps(destroy)
    def free_and_destroy(group: Any = None) -> None:
        free(None if group is dist.group.WORLD else group)
        destroy(group)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = free_and_destroy
    atexit.register(free)
