"""
Linear layers that share an input, merged in the graphs of `torch.compile`: queries, keys and values, for instance, are
projections of the same hidden states. Their weights stay where they are, in the user's modules.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..kernels import kernels_are_installed


MERGED = {"cuda": (torch.bfloat16, torch.float16)}
"""Dtypes whose layers are merged, by device type."""
MOST_BYTES = 2**26
"""Most bytes of the weights of merged layers. Larger ones keep the memory busy by themselves."""


def merge_parallel_linears(module: fx.GraphModule) -> fx.GraphModule:
    """
    Merges calls of `linear` that have the same input into calls of `hf_specdec_kernels.parallel_linear`, in place.
    Products are equal up to rounding. Returns the module.
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
            if len(group) > 1 and sum(_bytes_of_weight(call) for call in group) <= MOST_BYTES:
                _merge(module.graph, group)
    module.recompile()
    return module


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


def _bytes_of_weight(call: fx.Node) -> int:
    weight = _arguments(call)[1].meta["example_value"]
    return weight.numel() * weight.dtype.itemsize


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
