"""
Linear layers in the graphs of `torch.compile` that our kernel makes faster. Most of them share an input: queries, keys
and values are projections of the same hidden states. Weights stay where they are, in the user's modules.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..kernels import kernels_are_installed


DTYPES = {"cuda": (torch.bfloat16, torch.float16)}
"""Dtypes of the layers that are merged, by device type."""
MOST_BYTES = 2**28
"""Most bytes of the weights of merged layers: more have not been measured. (An 8B model's MLP inputs have 224 MiB.)"""
MOST_BYTES_ALONE = 2**25
"""Most bytes of the weight of a layer that is put into a call of its own. cuBLAS is as fast with larger ones."""


def merge_linears(module: fx.GraphModule) -> fx.GraphModule:
    """
    Merges calls of `linear` that have the same input into calls of `hf_specdec_kernels.merged_linear`, in place, and
    puts small layers with an input of their own into such calls, too. Products are equal up to rounding. Returns the
    module, which stays as it is where gradients are recorded: the operator has none.
    """
    if kernels_are_installed() and not torch.is_grad_enabled():
        for calls in _groups(module.graph):
            if _pays(calls):
                _merge(module.graph, calls)
        module.recompile()
    return module


def _groups(graph: fx.Graph) -> list[list[fx.Node]]:
    """The calls that one call may stand for: they have the same input, and nothing is written between them."""
    from hf_specdec_kernels.merged_linear import LARGEST_NUM_WEIGHTS

    groups: list[list[fx.Node]] = []
    open_groups: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if _may_write(node):
            open_groups = {}
        elif _can_be_merged(node):
            group = open_groups.get(node.args[0])
            if group is None or len(group) == LARGEST_NUM_WEIGHTS:
                group = open_groups[node.args[0]] = []
                groups.append(group)
            group.append(node)
    return groups


def _may_write(node: fx.Node) -> bool:
    """Whether a node may change a tensor that is there already."""
    target: Any = node.target
    if node.op == "call_method":
        is_special = target.startswith("__")
        return target.startswith(("__i", "__set")) if is_special else target.endswith("_")
    if node.op != "call_function":
        return node.op == "call_module"
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    name = getattr(target, "__name__", "_")
    root = (getattr(target, "__module__", None) or "torch").partition(".")[0]
    if isinstance(target, torch._ops.HigherOrderOperator | torch._ops.OpOverloadPacket) or root not in _PURE:
        return True
    if root == "_operator" and name.startswith("i"):  # iadd, but not is_
        return hasattr(operator, f"__{name[1:]}__")
    return name == "setitem" or name.endswith("_") or any(_option(node, option) for option in ("inplace", "out"))


_PURE = ("torch", "_operator", "builtins", "math")
"""Packages whose functions change a tensor only if their name or an option says so."""


def _option(node: fx.Node, name: str) -> Any:
    """The value that a call passes for the parameter `name`, or None."""
    if name in node.kwargs:
        return node.kwargs[name]
    function: Callable[..., Any] = node.target  # type: ignore[assignment]
    try:
        return inspect.signature(function).bind(*node.args, **node.kwargs).arguments.get(name)
    except (TypeError, ValueError):  # functions written in C, which take such options by name
        return None


def _can_be_merged(node: fx.Node) -> bool:
    """
    Whether a node is a `linear` of one of the dtypes, without a bias, with a matrix that is passed to the graph.
    Tensors of other classes (quantized, sharded) know by themselves how to be multiplied.
    """
    if node.op != "call_function" or node.target is not torch._C._nn.linear or node.kwargs or len(node.args) > 3:
        return False
    weight: Any = node.args[1]
    if weight.op != "placeholder" or (len(node.args) == 3 and node.args[2] is not None):
        return False
    tensors = [_value(node.args[0]), _value(weight), _value(node)]
    if not all(isinstance(one, torch.Tensor) and not is_traceable_wrapper_subclass(one) for one in tensors):
        return False
    dtypes = {one.dtype for one in tensors}
    return (
        len(dtypes) == 1  # else under autocast
        and dtypes <= set(DTYPES.get(tensors[0].device.type, ()))
        and tensors[0].dim() > 0
        and tensors[1].dim() == 2
    )


def _pays(calls: list[fx.Node]) -> bool:
    """
    Whether one call is faster than these, by measurements on an H200 (docs/kernels.md). Programs share the outputs but
    not the input features, so that a layer alone must not have more of the latter.
    """
    weights = [_value(call.args[1]) for call in calls]
    num_bytes = sum(weight.numel() * weight.dtype.itemsize for weight in weights)
    if len(calls) > 1:
        return num_bytes <= MOST_BYTES
    out_features, in_features = weights[0].shape
    return in_features <= out_features and num_bytes <= MOST_BYTES_ALONE


def _value(node: Any) -> Any:
    """The tensor of a node, without its values."""
    return node.meta.get("example_value")


def _merge(graph: fx.Graph, calls: list[fx.Node]) -> None:
    """Puts one call in the place of the first of these calls, and its results in the places of all."""
    from hf_specdec_kernels.merged_linear import operator as merged_linear

    with graph.inserting_before(calls[0]):
        merged = graph.call_function(merged_linear, (calls[0].args[0], [call.args[1] for call in calls]))
        for place, call in enumerate(calls):
            result = graph.call_function(operator.getitem, (merged, place))
            result.meta = dict(call.meta)  # without it, torch compiles the graph anew in every process
            call.replace_all_uses_with(result)
    for call in calls:
        graph.erase_node(call)
