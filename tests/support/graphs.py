"""A stand-in for CUDA graphs, with which their users run on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C import _len_torch_dispatch_stack
from torch._library.custom_ops import OPDEFS
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_specdec
from hf_specdec import graphs, kernels
from hf_specdec.attention.kernel import KernelInputs
from hf_specdec.generation import engines
from hf_specdec.graphs import capturing


TREE = hf_specdec.TokenTree.from_branching((2, 2, 1))


class StandIn:
    """Counts what was captured and replayed, and how often the kernel ran."""

    def __init__(self) -> None:
        self.captures = self.replays = self.attended = 0
        self.has_kernel = False

    def __call__(
        self, run: Callable[[], list[torch.Tensor]], device: torch.device, pool: Any = None
    ) -> tuple[Callable, Any]:
        if self.captures % 4 == 0:  # as a warm-up does; not each time, since it takes as long as a step
            if self.has_kernel:
                from hf_specdec_kernels import operators_rest

                with operators_rest():
                    run()
            run()
        tensors = [tensor.clone() for tensor in run()]
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            for tensor, new in zip(tensors, run(), strict=True):
                tensor.copy_(new)

        return replay, tensors


class ReadFromOutside(TorchDispatchMode):
    """Notes the memory that operations read and that was there before them: where a graph would read it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, StorageWeakRef]] = []
        self._made: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = {storage._cdata for storage in self._made}
        for tensor in tree_leaves((args, kwargs or {})):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in made:
                self.found.append((f"{func} {list(tensor.shape)}", StorageWeakRef(tensor.untyped_storage())))
        outputs = func(*args, **(kwargs or {}))
        self._made += [one.untyped_storage() for one in tree_leaves(outputs) if isinstance(one, torch.Tensor)]
        return outputs

    def gone(self) -> list[str]:
        """What read memory that nobody has kept."""
        self._made.clear()
        return [what for what, storage in self.found if storage.expired()]


def pass_dispatcher_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Lets plain versions of kernels run as functions, as the kernels do on CUDA: on the way through torch's dispatcher
    the small ones take more than twice as long. tests/kernels/test_package.py tests what is registered.
    """
    from hf_specdec_kernels import _ops

    def is_watched() -> bool:
        return torch.is_grad_enabled() or _len_torch_dispatch_stack() > 0

    def directly(operator: Any, plain: Callable[..., None]) -> Any:
        def call(*arguments: Any) -> None:
            return (operator if is_watched() else plain)(*arguments)

        vars(call)["default"] = operator.default  # which torch looks up when an operator runs for the first time
        return call

    def run(operator: Any, *arguments: Any) -> None:
        (operator if is_watched() else operator._init_fn)(*arguments)

    for qualified, definition in list(OPDEFS.items()):
        namespace, _, name = qualified.partition("::")
        if namespace == _ops.NAMESPACE:
            monkeypatch.setattr(_ops.ops, name, directly(getattr(_ops.ops, name), definition._init_fn))
    dispatched = _ops.run
    for name, module in list(sys.modules.items()):
        if name.startswith(_ops.__package__) and getattr(module, "run", None) is dispatched:
            monkeypatch.setattr(module, "run", run)


def install_stand_in(
    monkeypatch: pytest.MonkeyPatch, with_kernel: bool, counts: bool = True, dispatches: bool = False
) -> StandIn:
    """
    Captures forwards on the CPU by a stand-in, `with_kernel` in its plain version or with masks. What `counts` how
    often the kernel runs is compiled anew each time. With `dispatches`, kernels are called through torch's dispatcher:
    what is compiled, or registers other kernels, needs it.
    """
    found = StandIn()
    if with_kernel:
        pytest.importorskip("triton", reason="the kernels need triton")
        monkeypatch.setitem(kernels.DEVICES, "cpu", (torch.float64, torch.float32))
        if not dispatches:
            pass_dispatcher_by(monkeypatch)
        attend, found.has_kernel = KernelInputs.attend, True

        def counted(*args: Any, **options: Any) -> torch.Tensor:
            found.attended += 1
            return attend(*args, **options)

        if counts:
            monkeypatch.setattr(KernelInputs, "attend", counted)
    monkeypatch.setitem(graphs.RECORDERS, "cpu", found)
    monkeypatch.setattr(graphs.stores, "SMALLEST_CAPACITY", 32)
    monkeypatch.setattr(engines, "FEWEST_BLOCKS", 4)
    return found


def make_up_cuda(monkeypatch: pytest.MonkeyPatch, graph: type) -> list[str]:
    """
    Lets `record_cuda_graph` run on a CPU, with made-up CUDA graphs. Returns a list to which the calls of torch's
    allocator and what lets its generator go are added by name.
    """
    told: list[str] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)

    def noted(name: str) -> Callable[..., None]:
        return lambda *args: told.append(name)

    of_cuda: dict[str, Any] = {"CUDAGraph": graph, "empty_cache": noted("empty_cache")}
    of_cuda |= {"current_stream": lambda device: stream, "current_device": lambda: 0}
    of_cuda |= {"stream": lambda one: nullcontext(), "synchronize": lambda device: None}
    of_cuda |= {"graph_pool_handle": lambda: (0, 1)}
    for name, fake in of_cuda.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, noted(name), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(capturing, "kernels_are_installed", lambda: False)  # for a device that is made up
    monkeypatch.setattr(capturing, "_capture_something", noted("_capture_something"))
    monkeypatch.setattr(capturing, "own_stream", lambda device, purpose: stream)
    return told


def graphed(tree: Any) -> dict[str, Any]:
    """The options of a call with graphs."""
    return {"speculative_config": hf_specdec.SpeculativeConfig(tree=tree, cuda_graphs=True)}


BY_ATTENTION = pytest.mark.parametrize("stand_in", [False, True], ids=["masks", "kernel"], indirect=True)
