"""
Kernels of `torch.compile` that are launched while the kernels before them still run (programmatic dependent launch, a
feature of Hopper GPUs and later ones): what a launch takes, some microseconds, is over when the kernel before ends.

Such a kernel may touch memory only after it has waited on the device for the one before, and must wait even if it does
not read that one's results: the next kernel waits for it alone. Inductor lets a kernel wait only if it touches what
the node right before it touches, so that results of earlier kernels, which may still run, could be read too early.
Here all kernels wait first.
"""

from __future__ import annotations

import copy
import re
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import fx
from transformers.utils import logging

from ..kernels import kernels_are_installed


logger = logging.get_logger(__name__)

_CACHE_KEY_TAG = "hf_specdec: all kernels wait first, checked by rule 2"
"""Sets apart, in torch's caches, what was compiled with these waits; a new rule of `all_wait_first` gets a number."""
_FIRST = re.compile(r"\bgdc_wait\(|\.(?:load|store|atomic_\w+)\(|\bmake_tensor_descriptor\(|\bbucketize\w*\(")
"""What touches memory in a kernel's source, and the wait."""


def overlaps(inputs: list[Any]) -> bool:
    """Whether kernels over these inputs of a graph can be launched early, and torch and our kernels know how to."""
    devices = {value.device for value in inputs if isinstance(value, torch.Tensor)} - {torch.device("cpu")}
    if len(devices) != 1 or not kernels_are_installed() or torch.is_grad_enabled():  # a backward is compiled later
        return False
    from hf_specdec_kernels.devices import can_overlap

    return can_overlap(*devices) and _has_early_launches() and not _config().combo_kernels


def compile_overlapping(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    """
    Inductor, as a backend of `torch.compile`, with kernels that are launched early; without, if the code that it has
    generated does not show that all of them wait first.
    """
    from torch._inductor.scheduler import Scheduler

    untouched = _copy_of(graph)  # compiling changes it
    # A kernel without a node before it waits for whatever there may be.
    nothing = property(lambda scheduler: None, lambda scheduler, node: None)
    tag = f"{torch.compiler.config.cache_key_tag} {_CACHE_KEY_TAG}"
    with (
        mock.patch.object(Scheduler, "previous_node", nothing, create=True),
        _config().patch({"triton.enable_pdl": True}),
        mock.patch.object(torch.compiler.config, "cache_key_tag", tag),
    ):
        try:
            return _inductor()(graph, inputs, inner_compile=_compile_checked, **options)
        except _Unsafe:
            logger.info("Kernels of a compiled graph are not launched early: not all of them wait first.")
    return compile_in_turn(untouched, inputs, **options)


def compile_in_turn(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    """
    Inductor, as a backend of `torch.compile`, with kernels that begin when the one before has ended, also where torch
    is set to launch them early: its kernels do not wait for ours that are.
    """
    late: AbstractContextManager[None] = _config().patch({"triton.enable_pdl": False} if _has_early_launches() else {})
    with late:
        return _inductor()(graph, inputs, **options)


class _Unsafe(Exception):
    """Code in which a kernel that is launched early may touch memory before it has waited."""


def _compile_checked(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    """Inductor's inner compiler; raises `_Unsafe`."""
    from torch._inductor.compile_fx import compile_fx_inner

    compiled = compile_fx_inner(graph, inputs, **options)
    if not all_wait_first(getattr(compiled, "source_code", "")):
        raise _Unsafe
    return compiled


def all_wait_first(source: str) -> bool:
    """Whether all kernels in Inductor's generated code that are launched early wait before they touch memory."""
    first, *kernels = source.split("async_compile.triton(")
    return bool(source) and "launch_pdl" not in first and all(map(_waits_first, kernels))


def _waits_first(kernel: str) -> bool:
    """Whether one kernel waits first, given its source and whatever follows until the next one's."""
    if re.sub(r"['\"]launch_pdl['\"]: False", "", kernel).count("launch_pdl") == 0:
        return True
    found = _FIRST.search(kernel.partition("\ndef triton_")[2])
    return found is not None and found.group().startswith("gdc_wait")


def _copy_of(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy with what Dynamo notes of the parameters and of where inputs come from, which `deepcopy` leaves out."""
    copied: Any = copy.deepcopy(graph)
    if hasattr(graph, "_param_name_to_source"):
        copied._param_name_to_source = graph._param_name_to_source
    for node, own in zip(graph.graph.nodes, copied.graph.nodes, strict=True):
        if hasattr(node, "_dynamo_source"):
            own._dynamo_source = node._dynamo_source
    return copied


def _inductor() -> Any:
    """The backend as torch calls it: it also starts the processes that compile kernels."""
    return torch._dynamo.lookup_backend("inductor")


def _has_early_launches() -> bool:
    return hasattr(_config().triton, "enable_pdl")


def _config() -> Any:
    import torch._inductor.config  # takes time, and only compiling needs it

    return torch._inductor.config
