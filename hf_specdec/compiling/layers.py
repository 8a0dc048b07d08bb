"""Models compiled by `torch.compile`, for forwards that are captured in CUDA graphs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ..building import building
from ..models.structure import decoder_layers
from .early_launch import compile_in_turn, compile_overlapping, overlaps
from .merged_linears import merge_linears


COMPILER = "inductor"
MOST_SHAPES = 2**14
"""Most input shapes for which a model is compiled."""

_LEFT_OUT = (
    "update",
    "update_conv_state",
    "update_recurrent_state",
    "get_conv_state",
    "get_recurrent_state",
    "has_previous_state",
    "is_recording_past",
)
"""Methods of a cache that layers call."""
_compiling = threading.Lock()
"""Lock held while layers run compiled, so that their `forward`s are restored before another thread replaces them."""


def compile_graph(module: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Callable:
    """The compiler of all forwards, as a backend of `torch.compile`."""
    if COMPILER != "inductor":
        compiler = torch._dynamo.lookup_backend(COMPILER)
    else:
        compiler = compile_overlapping if overlaps(inputs) else compile_in_turn
    with building():
        return compiler(merge_linears(module), inputs, **options)


def any_number_of_shapes() -> AbstractContextManager[None]:
    """Context in which models are compiled for any number of shapes: each is captured, and seldom comes again."""
    return torch._dynamo.config.patch(recompile_limit=MOST_SHAPES, accumulated_recompile_limit=MOST_SHAPES)


def compiled_whole(model: PreTrainedModel) -> Any:
    """The model compiled as a whole, anew for every input shape; compiling takes up to a minute per shape."""
    return torch.compile(model, backend=compile_graph, fullgraph=True, dynamic=False)


def compiled_function(function: Callable) -> Callable:
    """A function of tensors as a few kernels, compiled anew for every shape."""
    return torch.compile(function, backend=compile_graph, fullgraph=True, dynamic=False)


@contextmanager
def compiled_layers(model: PreTrainedModel, cache: Any) -> Iterator[None]:
    """
    Runs the model's decoder layers compiled inside the context, in this thread only. The cache's `update` is left out
    (a graph break), as is what layers with states call of it, so that a layer consists of a few compiled pieces, which
    all layers share. The pieces serve any number of rows and nodes, but a size of 1 is compiled separately, and a
    piece is recompiled where two sizes that were equal at first turn out to differ. Code between layers is not fused,
    which costs some of the speed; hooks run as usual.

    Args:
        model (`PreTrainedModel`): the model; other threads run it uncompiled.
        cache (`Cache`): the cache that the model's forward is given.

    Raises:
        ValueError: if the model has no list of its decoder layers.
    """
    try:
        layers = list(decoder_layers(model))
    except ValueError as error:
        raise ValueError(f"{type(model).__name__} has no list of its decoder layers.") from error
    with _compiling:
        own = [vars(layer).get("forward") for layer in layers]
        left_out = [name for name in _LEFT_OUT if hasattr(cache, name)]
        for name in left_out:
            setattr(cache, name, torch.compiler.disable(getattr(cache, name)))
        try:
            for layer in layers:
                layer.forward = _in_this_thread(
                    torch.compile(layer.forward, backend=compile_graph, dynamic=True), layer.forward
                )
            # `layer_idx` must not be a constant: else every layer would be compiled separately.
            with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
                yield
        finally:
            for layer, forward in zip(layers, own, strict=True):
                if forward is None:
                    vars(layer).pop("forward", None)
                else:
                    layer.forward = forward
            for name in left_out:
                delattr(cache, name)


def _in_this_thread(function: Callable, elsewhere: Callable) -> Callable:
    """A function that calls `function` in the present thread and `elsewhere` in all other threads."""
    thread = threading.get_ident()

    @functools.wraps(elsewhere)
    def call(*args: Any, **options: Any) -> Any:
        return (function if threading.get_ident() == thread else elsewhere)(*args, **options)

    return call
