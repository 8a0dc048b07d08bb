"""Models that run compiled, where a graph is captured of what they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from .features import decoder_layers


COMPILER = "inductor"


def compiled_whole(model: PreTrainedModel) -> Any:
    """The model, compiled as a whole for every shape that comes, which takes up to a minute each."""
    return torch.compile(model, backend=COMPILER, fullgraph=True, dynamic=False)


@contextmanager
def compiled_layers(model: PreTrainedModel, cache: Any) -> Iterator[None]:
    """
    Inside, the model's decoder layers run compiled, up to where they write to the cache and from there on: a few
    pieces of code, which all layers share. They do for any number of rows and nodes, but that one of either is
    compiled on its own. What lies between layers is not fused, which costs some of the speed, and hooks run as usual.

    Args:
        model (`PreTrainedModel`): runs in this thread alone.
        cache (`Cache`): the one that it is given.

    Raises:
        ValueError: if the model's layers cannot be told.
    """
    layers, writes = decoder_layers(model), cache.update
    own = [layer.__dict__.get("forward") for layer in layers]
    cache.update = torch.compiler.disable(writes)
    try:
        for layer in layers:
            layer.forward = torch.compile(layer.forward, backend=COMPILER, dynamic=True)
        # The number of a layer is no constant: else each would be compiled.
        with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
            yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            if forward is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.forward = forward
        del cache.update
