"""Models compiled by `torch.compile`, for forwards that are captured in CUDA graphs."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..building import building
from ..models.structure import decoder_layers
from .early_launch import compile_in_turn, compile_overlapping, overlaps
from .merged_linears import merge_linears
from .one_row import OneRow


logger = logging.get_logger(__name__)

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
_INDEX_OF_LAYER = r".*\.layer_idx$"
"""What torch calls the number of a layer, which must not be a constant: else every layer would be compiled anew."""
_compiling = threading.Lock()
"""Lock held while layers run compiled, so that their `forward`s are restored before another thread replaces them."""


def compile_graph(module: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Callable:
    """The compiler of all forwards, as a backend of `torch.compile`."""
    if COMPILER != "inductor":
        compiler = torch._dynamo.lookup_backend(COMPILER)
    else:
        compiler = compile_overlapping if overlaps(inputs) else compile_in_turn
    what, began = f"a piece of {_owner_of(module)} with {len(module.graph.nodes)} operations", time.perf_counter()
    with building():
        compiled = compiler(merge_linears(module), inputs, **options)
    logger.info(f"Compiled {what}: {time.perf_counter() - began:.2f} s after tracing.")
    return compiled


def _owner_of(module: torch.fx.GraphModule) -> str:
    """Class of the innermost module whose code a traced graph begins with."""
    stacks = (node.meta.get("nn_module_stack") for node in module.graph.nodes)
    owners = [owner for stack in stacks if stack for _, owner in list(stack.values())[-1:]]
    return getattr(owners[0], "__name__", str(owners[0])) if owners else "a forward"


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
def compiled_layers(model: PreTrainedModel, cache: Any, context: Any = None, joins: bool = False) -> Iterator[None]:
    """
    Runs the model's decoder layers compiled inside the context, in this thread only. The cache's `update` is left out
    (a graph break), as are attention by the kernel and what layers with states call of the cache, so that a layer
    consists of a few compiled pieces, which all layers share. The pieces serve any number of tokens, but a size of 1
    is compiled separately. Code between layers is not fused, which costs some of the speed; hooks run as usual.

    Args:
        model (`PreTrainedModel`): the model; other threads run it uncompiled.
        cache (`Cache`): the cache that the model's forward is given.
        context (`AttentionContext`, *optional*): the context that the model's forward is given.
        joins (`bool`): whether layers whose inputs are alike see the tokens of all rows as those of one, see `OneRow`;
            else rows and tokens vary, and pieces are recompiled where two sizes that were equal at first turn out to
            differ. Only for a context with the kernel, and a cache without states.

    Raises:
        ValueError: if the model has no list of its decoder layers.
    """
    try:
        layers = list(decoder_layers(model))
    except ValueError as error:
        raise ValueError(f"{type(model).__name__} has no list of its decoder layers.") from error
    by_kernel = context is not None and context.uses_kernel
    one_row = OneRow(joins, has_mask=not by_kernel)
    with _compiling:
        own = [vars(layer).get("forward") for layer in layers]
        left_out = [name for name in _LEFT_OUT if hasattr(cache, name)]
        for name in left_out:
            setattr(cache, name, _left_out(getattr(cache, name), one_row if name == "update" else None))
        if by_kernel:
            context.one_row = one_row
        try:
            for layer in layers:
                compiled = torch.compile(layer.forward, backend=compile_graph, dynamic=True)
                layer.forward = _in_this_thread(functools.partial(_call, one_row, compiled), layer.forward)
            with _any_layer():
                yield
        finally:
            for layer, forward in zip(layers, own, strict=True):
                if forward is None:
                    vars(layer).pop("forward", None)
                else:
                    layer.forward = forward
            for name in left_out:
                delattr(cache, name)
            if by_kernel:
                context.one_row = None


def _call(one_row: OneRow, layer: Callable, *args: Any, **options: Any) -> Any:
    return one_row.call(layer, args, options)


def _left_out(method: Callable, one_row: OneRow | None) -> Callable:
    """A method that is not compiled; one that takes keys and values, if they are to be parted by rows again."""
    if one_row is None:
        return torch.compiler.disable(method)

    def update(keys: torch.Tensor, values: torch.Tensor, *args: Any, **options: Any) -> Any:
        return method(one_row.by_rows(keys), one_row.by_rows(values), *args, **options)

    return torch.compiler.disable(functools.wraps(method)(update))


def _any_layer() -> AbstractContextManager[None]:
    """A context in which the number of a layer is not a constant of what is compiled; others of its integers are."""
    config: Any = torch.compiler.config
    if not hasattr(config, "dynamic_sources"):  # torch before 2.8: none of them is, and tracing takes longer
        return torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True)
    return config.patch(dynamic_sources=",".join(filter(None, [config.dynamic_sources, _INDEX_OF_LAYER])))


def _in_this_thread(function: Callable, elsewhere: Callable) -> Callable:
    """A function that calls `function` in the present thread and `elsewhere` in all other threads."""
    thread = threading.get_ident()

    @functools.wraps(elsewhere)
    def call(*args: Any, **options: Any) -> Any:
        return (function if threading.get_ident() == thread else elsewhere)(*args, **options)

    return call
