"""The random generators of devices, which all threads of a process share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


_lock = threading.RLock()


@contextmanager
def drawing(device: torch.device) -> Iterator[None]:
    """
    A context for draws from a device's generator, and for replays of CUDA graphs, which draw as well. It waits until
    no other thread captures a graph or has its draws undone. (While a graph is captured, torch lets the generator
    serve the capture alone: draws and replays of other threads end with "Offset increment outside graph capture
    encountered unexpectedly".)
    """
    if device.type == "cpu":
        yield
    else:
        with _lock:
            yield


@contextmanager
def draws_undone(device: torch.device) -> Iterator[None]:
    """
    Undoes all draws inside from the generator of a device, as of a function that capturing runs once more. Other
    threads draw before or after: their numbers would come again.
    """
    with drawing(device):
        state = _state(device)
        try:
            yield
        finally:
            _set_state(state, device)


@contextmanager
def draws_undone_on_error(device: torch.device) -> Iterator[None]:
    """On an exception, undoes draws inside from the generators of a device and of the CPU."""
    devices = {torch.device("cpu"), device}
    states = [(_state(one), one) for one in devices]
    try:
        yield
    except BaseException:
        for state, one in states:
            _set_state(state, one)
        raise


def _state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
