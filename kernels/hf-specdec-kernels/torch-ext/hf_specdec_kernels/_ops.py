"""
Namespace in which the operators are registered. A build for the Hub (see `build.py`) replaces it by one that is unique
to the build, so that several versions can be loaded in one process.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack

from .compilation import operators_are_resting


NAMESPACE = "hf_specdec_kernels"

ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """The name of an operator with its namespace."""
    return f"{NAMESPACE}::{op_name}"


def register(
    naive: Callable[..., Any],
    results: tuple[str, ...] = (),
    *,
    optional: tuple[str, ...] = (),
    mutated: tuple[str, ...] = (),
    suits: Callable[..., bool] = lambda *arguments: True,
) -> Any:
    """
    Registers the operator of a pair: `name_naive`, which runs on a CPU, and `launch_name` of `triton.py` beside it,
    which is imported where it runs. Its arguments are those of `name_naive`, and then tensors for the results.

    Args:
        naive (`Callable`): the plain version; its signature is the operator's.
        results (`tuple[str, …]`): names of the tensors to which what `naive` returns is written.
        optional (`tuple[str, …]`): those of them that may be None.
        mutated (`tuple[str, …]`): arguments that it changes in place.
        suits (`Callable[..., bool]`): whether the kernels take the arguments; else `naive` runs on CUDA, too.
    """
    name, package = naive.__name__.removesuffix("_naive"), naive.__module__.rpartition(".")[0]
    signature = inspect.signature(naive, eval_str=True)
    given = [parameter.replace(default=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    types = {result: torch.Tensor | None if result in optional else torch.Tensor for result in results}
    written = [inspect.Parameter(result, given[0].kind, annotation=types[result]) for result in results]

    def clear_results(arguments: tuple[Any, ...]) -> None:
        for result in arguments[len(given) :]:
            if result is not None:
                result.zero_()

    def on_cpu(*arguments: Any) -> None:
        if operators_are_resting():
            return clear_results(arguments)
        device = next(one.device.type for one in arguments if isinstance(one, torch.Tensor))
        with torch.autocast(device, enabled=False):  # of which kernels know nothing either
            found = naive(*arguments[: len(given)])
        for result, value in zip(arguments[len(given) :], (found,) if len(results) == 1 else found or (), strict=True):
            if result is not None:
                result.copy_(value)

    @lru_cache(maxsize=1)
    def launcher() -> Callable[..., None]:
        found: Callable[..., None] = getattr(importlib.import_module(f"{package}.triton"), f"launch_{name}")
        return found

    def on_cuda(*arguments: Any) -> None:
        if not suits(*arguments):
            return on_cpu(*arguments)
        if operators_are_resting():
            clear_results(arguments)
        tensor = arguments[0] if isinstance(arguments[0], torch.Tensor) else arguments[0][0]
        if tensor.device.index == torch.cuda.current_device():
            return launcher()(*arguments)
        with torch.cuda.device_of(tensor):  # Triton launches on the current device
            launcher()(*arguments)

    vars(on_cpu)["__signature__"] = inspect.Signature([*given, *written], return_annotation=None)
    qualified, changed = add_op_namespace_prefix(name), (*mutated, *results)
    operator = torch.library.custom_op(qualified, on_cpu, mutates_args=changed, device_types="cpu")
    operator.register_kernel("cuda", on_cuda)
    operator.register_fake(lambda *arguments: None)
    operator.on_cuda = on_cuda  # type: ignore[attr-defined]
    return operator


def run(operator: Any, *arguments: Any) -> None:
    """
    Runs an operator that `register` has returned. On CUDA torch's dispatcher, which takes longer than some of the
    kernels, is passed by where nothing is traced, differentiated or watched.
    """
    is_plain = type(arguments[0]) in (torch.Tensor, torch.nn.Parameter) and arguments[0].is_cuda
    if not is_plain or torch.is_grad_enabled() or torch.compiler.is_compiling() or _len_torch_dispatch_stack():
        operator(*arguments)
    else:
        operator.on_cuda(*arguments)
