"""The random generators of devices, which all threads of a process share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


_lock = threading.RLock()
"""One for all devices: they are rarely captured at the same time, and two locks could be taken in two orders."""


@contextmanager
def generator_held(device: torch.device) -> Iterator[None]:
    """
    A context for captures of CUDA graphs, for their replays, and for draws from the device's generator: one thread at
    a time. (While a graph is captured, torch lets the generator serve the capture alone: draws and replays of other
    threads end with "Offset increment outside graph capture encountered unexpectedly".) Does nothing on a CPU.
    """
    if device.type == "cpu":
        yield
    else:
        with _lock:
            yield


@contextmanager
def draws_undone(device: torch.device) -> Iterator[None]:
    """
    Undoes all draws inside from the generator of a device, as of a function that capturing runs once more. On a GPU
    other threads draw before or after, since their numbers would come again: they wait, also for a compilation inside.
    """
    with generator_held(device):
        state = _state(device)
        try:
            yield
        finally:
            _set_state(state, device)


@contextmanager
def draws_undone_on_error(*devices: torch.device) -> Iterator[None]:
    """
    On an exception, sets the generators of the devices and of the CPU back to where they were. (What other threads
    have drawn meanwhile then comes again.)
    """
    states = []
    for device in {torch.device("cpu"), *devices}:
        with generator_held(device):
            states.append((_state(device), device))
    try:
        yield
    except BaseException:
        for state, device in states:
            with generator_held(device):
                _set_state(state, device)
        raise


def _state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
