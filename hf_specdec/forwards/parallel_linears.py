"""
Linear layers in the graphs of `torch.compile` that our kernel makes faster. Most of them share an input: queries, keys
and values are projections of the same hidden states. Weights stay where they are, in the user's modules.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..kernels import kernels_are_installed


MERGED = {"cuda": (torch.bfloat16, torch.float16)}
"""Dtypes whose layers are merged, by device type."""
MOST_BYTES = 2**28
"""Most bytes of the weights of merged layers. Larger ones keep the memory busy by themselves."""
MOST_BYTES_ALONE = 2**25
"""Most bytes of the weight of a layer that is put into a call of its own. cuBLAS is as fast with larger ones."""


def merge_parallel_linears(module: fx.GraphModule) -> fx.GraphModule:
    """
    Merges calls of `linear` that have the same input into calls of `hf_specdec_kernels.parallel_linear`, in place, and
    puts small layers with an input of their own into such calls, too. Products are equal up to rounding. Returns the
    module.
    """
    if not kernels_are_installed():
        return module
    from hf_specdec_kernels.parallel_linear import LARGEST_NUM_WEIGHTS

    by_input: dict[Any, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if _can_be_merged(node):
            by_input.setdefault(node.args[0], []).append(node)
    for calls in by_input.values():
        for first in range(0, len(calls), LARGEST_NUM_WEIGHTS):
            group = calls[first : first + LARGEST_NUM_WEIGHTS]
            if _pays(group):
                _merge(module.graph, group)
    module.recompile()
    return module


def _pays(calls: list[fx.Node]) -> bool:
    """
    Whether one call is faster than these, by measurements on an H200 (docs/kernels.md). Programs share the outputs but
    not the input features, so that a layer alone must not have more of the latter.
    """
    num_bytes = sum(weight.numel() * weight.dtype.itemsize for weight in map(_weight, calls))
    if len(calls) > 1:
        return num_bytes <= MOST_BYTES
    out_features, in_features = _weight(calls[0]).shape
    return in_features <= out_features and num_bytes <= MOST_BYTES_ALONE


def _can_be_merged(node: fx.Node) -> bool:
    """Whether a node is a `linear` of half precision on a GPU, whose weight is there from the graph's beginning."""
    if node.op != "call_function" or node.target is not torch._C._nn.linear or node.kwargs:
        return False
    input, weight, *bias = _arguments(node)
    if weight.op not in ("placeholder", "get_attr") or bias not in ([], [None]):
        return False
    values = [one.meta.get("example_value") for one in (input, weight)]
    return all(
        isinstance(value, torch.Tensor) and value.dtype in MERGED.get(value.device.type, ()) for value in values
    )


def _arguments(call: fx.Node) -> list[Any]:
    return list(call.args)


def _weight(call: fx.Node) -> torch.Tensor:
    """The weight of a call, without its values."""
    return _arguments(call)[1].meta["example_value"]


def _merge(graph: fx.Graph, calls: list[fx.Node]) -> None:
    """Puts one call in the place of the first of these calls, and its results in the places of all."""
    from hf_specdec_kernels import parallel_linear

    with graph.inserting_before(calls[0]):
        weights = [_arguments(call)[1] for call in calls]
        merged = graph.call_function(parallel_linear, (calls[0].args[0], weights))
        for place, call in enumerate(calls):
            call.replace_all_uses_with(graph.call_function(operator.getitem, (merged, place)))
    for call in calls:
        graph.erase_node(call)
