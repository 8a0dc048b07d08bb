"""Models that run compiled, where a graph is captured of what they do."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from .features import decoder_layers


COMPILER = "inductor"

_compiling = threading.Lock()
"""Held by the thread whose layers run compiled: what it changes of them is undone before another changes it."""


def compiled_whole(model: PreTrainedModel) -> Any:
    """The model, compiled as a whole for every shape that comes, which takes up to a minute each."""
    return torch.compile(model, backend=COMPILER, fullgraph=True, dynamic=False)


@contextmanager
def compiled_layers(model: PreTrainedModel, cache: Any) -> Iterator[None]:
    """
    Inside, the model's decoder layers run compiled in this thread, up to where they write to the cache and from there
    on: a few pieces of code, which all layers share. They do for any number of rows and nodes, but that one of either
    is compiled on its own, and a piece anew where it has taken two sizes for one. What lies between layers is not
    fused, which costs some of the speed, and hooks run as usual.

    Args:
        model (`PreTrainedModel`): in other threads it runs as it is.
        cache (`Cache`): the one that it is given.

    Raises:
        ValueError: if the model's layers cannot be told.
    """
    try:
        layers = list(decoder_layers(model))
    except ValueError as error:
        raise ValueError(f"{type(model).__name__} has no list of its decoder layers.") from error
    with _compiling:
        own = [vars(layer).get("forward") for layer in layers]
        cache.update = torch.compiler.disable(cache.update)
        try:
            for layer in layers:
                layer.forward = _in_this_thread(
                    torch.compile(layer.forward, backend=COMPILER, dynamic=True), layer.forward
                )
            # The number of a layer is no constant: else each would be compiled.
            with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
                yield
        finally:
            for layer, forward in zip(layers, own, strict=True):
                if forward is None:
                    vars(layer).pop("forward", None)
                else:
                    layer.forward = forward
            del cache.update


def _in_this_thread(function: Callable, elsewhere: Callable) -> Callable:
    """Calls one function in this thread, and another in all others."""
    thread = threading.get_ident()

    @functools.wraps(elsewhere)
    def call(*args: Any, **options: Any) -> Any:
        return (function if threading.get_ident() == thread else elsewhere)(*args, **options)

    return call
