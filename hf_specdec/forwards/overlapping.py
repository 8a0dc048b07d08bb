"""
Kernels of `torch.compile` that are launched while the kernels before them still run (programmatic dependent launch, a
feature of Hopper GPUs and later ones): what a launch takes, some microseconds, is over when the kernel before ends.

Such a kernel may touch memory only after it has waited on the device for the one before, and must wait even if it does
not read that one's results: the next kernel waits for it alone. Inductor leaves out waits that one scheduled node does
not need for the node before it, which is too few where kernels of others lie between. Here all kernels wait first.
"""

from __future__ import annotations

import copy
import re
from typing import Any
from unittest import mock

import torch
from torch import fx

from ..kernels import kernels_are_installed


def overlaps(inputs: list[Any]) -> bool:
    """Whether kernels over these inputs of a graph can be launched early, and torch and our kernels know how to."""
    devices = {value.device for value in inputs if isinstance(value, torch.Tensor)} - {torch.device("cpu")}
    if len(devices) != 1 or not kernels_are_installed():
        return False
    from hf_specdec_kernels.devices import can_overlap

    return can_overlap(*devices) and hasattr(_config().triton, "enable_pdl") and not _config().combo_kernels


def compile_overlapping(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    """
    Inductor, as a backend of `torch.compile`, with kernels that are launched early. Compiles without these unless the
    code that it has generated shows that they all wait first.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.scheduler import Scheduler

    untouched = copy.deepcopy(graph)  # compiling changes it
    # A kernel without a node before it waits for whatever there may be.
    nothing = property(lambda scheduler: None, lambda scheduler, node: None)
    # Nothing is to be taken from torch's caches that was compiled with the option, but without these waits.
    tag = f"{torch.compiler.config.cache_key_tag} hf_specdec: all kernels wait first"
    with (
        mock.patch.object(Scheduler, "previous_node", nothing, create=True),
        _config().patch({"triton.enable_pdl": True}),
        mock.patch.object(torch.compiler.config, "cache_key_tag", tag),
    ):
        try:
            return compile_fx(graph, inputs, inner_compile=_compile_checked, **options)
        except _Unsafe:
            pass
    return compile_fx(untouched, inputs, **options)


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
    kernels = source.split("async_compile.triton(")
    return len(kernels) > 1 and all(map(_waits_first, kernels[1:]))


def _waits_first(kernel: str) -> bool:
    """Whether one kernel waits first, given its source and whatever follows until the next one's."""
    if "'launch_pdl': True" not in kernel:
        return True
    body = kernel.partition("\ndef triton_")[2]
    found = re.search(r"\bgdc_wait\(|\btl\.(load|store|atomic_\w+)\(|\btriton_helpers\.bucketize\w*\(", body)
    return found is not None and found.group().startswith("gdc_wait")


def _config() -> Any:
    import torch._inductor.config  # takes time, and only compiling needs it

    return torch._inductor.config
