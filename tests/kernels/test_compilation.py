"""Kernels that are compiled beside each other, while operators rest."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
import torch


pytest.importorskip("triton", reason="the kernels need triton")
async_compile = pytest.importorskip("triton.runtime._async_compile", reason="Triton before 3.5 compiles in a row")

import hf_specdec  # noqa: E402
import hf_specdec_kernels as kernels  # noqa: E402
from hf_specdec.kernels import DEVICES  # noqa: E402
from hf_specdec.trees import Topology  # noqa: E402
from hf_specdec_kernels import compilation  # noqa: E402


ROW, WEIGHT = torch.arange(1.0, 5.0).view(1, 4), torch.ones(4)
CPU = torch.device("cpu")


def test_operators_rest() -> None:
    """Results are zeros, what is changed in place stays; afterwards, and in other threads, they run."""
    cache, new, slots = torch.ones(2, 1, 4, 4), torch.full((1, 1, 1, 4), 7.0), torch.tensor([[0]])
    found: list[torch.Tensor] = []
    with kernels.operators_rest():
        assert kernels.rms_norm(ROW, WEIGHT, 1e-5).eq(0).all()
        assert all(one.eq(0).all() for one in kernels.merged_linear(ROW, [torch.ones(3, 4), torch.ones(2, 4)]))
        kernels.write_kv(cache, cache.clone(), new, new, slots, slots)
        assert cache.eq(1).all()
        thread = threading.Thread(target=lambda: found.append(kernels.rms_norm(ROW, WEIGHT, 1e-5)))
        thread.start()
        thread.join()
    torch.testing.assert_close(kernels.rms_norm(ROW, WEIGHT, 1e-5), found[0])
    assert found[0].gt(0).all()
    kernels.write_kv(cache, cache.clone(), new, new, slots, slots)
    assert cache[0, 0, 0].eq(7).all()


class _Kernel:
    """Stands for a kernel of Triton: compiled once for all launches."""

    def __init__(self, fails: bool = False):
        self.fails, self.compiled, self.launched = fails, list[str](), 0

    def run(self, number: int, *, grid: Any, warmup: bool) -> None:
        assert warmup and grid == (2,) and number == 3
        submit = async_compile.active_mode.get().submit
        ends = [lambda kernel: None] * (len(inspect.signature(submit).parameters) - 2)  # more with a newer Triton
        submit(id(self), self._compile, *ends)

    def _compile(self) -> _Kernel:
        self.compiled.append(threading.current_thread().name)
        if self.fails:
            raise RuntimeError("no such instruction")
        return self

    def __getitem__(self, grid: Any) -> Any:
        return lambda number: setattr(self, "launched", self.launched + 1)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_num_cores", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


@pytest.mark.usefixtures("two_cores")
def test_kernels_are_compiled_and_not_run() -> None:
    first, second = _Kernel(), _Kernel()

    def run(*own: _Kernel) -> None:
        assert compilation.operators_are_resting()
        for kernel in own:
            compilation.launcher(kernel, (2,))(3)

    assert kernels.compile_kernels_of(lambda: run(first, first), CPU, waits=False)
    assert kernels.compile_kernels_of(lambda: run(first, second), CPU)
    for kernel in (first, second):
        assert [name.partition("_")[0] for name in kernel.compiled] == ["compile-kernels"] and not kernel.launched
        compilation.launcher(kernel, (2,))(3)
        assert kernel.launched == 1
    assert async_compile.active_mode.get() is None and not compilation.operators_are_resting()


@pytest.mark.usefixtures("two_cores")
def test_failures() -> None:
    """One of a compilation is left to the launch, beside others; one of the function leaves nothing behind."""
    bad, good = _Kernel(fails=True), _Kernel()

    def run() -> None:
        for kernel in (bad, good):
            compilation.launcher(kernel, (2,))(3)

    assert kernels.compile_kernels_of(run, CPU)
    assert bad.compiled and good.compiled
    with pytest.raises(ZeroDivisionError):
        kernels.compile_kernels_of(lambda: 1 / 0, CPU)
    assert kernels.compile_kernels_of(lambda: None, CPU) and not compilation.operators_are_resting()


@pytest.mark.usefixtures("two_cores")
def test_devices_have_their_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, devices = _Kernel(), _Kernel(), list[torch.device]()
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    places = [torch.device("cuda", number) for number in (0, 1)]
    for kernel, place in zip((first, second), places, strict=True):
        kernels.compile_kernels_of(lambda kernel=kernel: compilation.launcher(kernel, (2,))(3), place, waits=False)
    kernels.end_compilation()
    kernels.end_compilation()  # nothing is left
    assert devices == places and first.compiled and second.compiled


@pytest.mark.usefixtures("two_cores")
def test_shapes_that_are_kept_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of static trees, also if they are made while operators rest."""
    tree, device = hf_specdec.TokenTree.from_branching((5, 1, 2)), torch.device("cpu")
    monkeypatch.setitem(DEVICES, "cpu", (torch.float32,))
    with kernels.operators_rest():
        assert Topology.of_parents(torch.tensor([[0, 0, 1]]), 2).depths.eq(0).all()
        depths = Topology.of_tree(tree, device).depths
    assert depths.tolist() == [[0] + [len(path) for path in tree.paths]]


def test_where_nothing_is_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        raise AssertionError("is called")

    monkeypatch.setattr(compilation, "_num_cores", lambda: 1)
    assert not kernels.compile_kernels_of(run, CPU)
    monkeypatch.setattr(compilation, "_num_cores", lambda: 2)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not kernels.compile_kernels_of(run, CPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu() -> None:
    """What has been compiled so is not compiled again, and computes what it should."""
    from triton.runtime.jit import JITFunction

    device = torch.device("cuda", torch.cuda.current_device())
    input, weight = torch.randn(3, 712, device=device), torch.randn(712, device=device)
    assert kernels.compile_kernels_of(lambda: kernels.rms_norm(input, weight, 1e-5), device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "_do_compile", lambda *args: pytest.fail("compiled again"))
        found = kernels.rms_norm(input, weight, 1e-5)
    torch.testing.assert_close(found, kernels.rms_norm(input.cpu(), weight.cpu(), 1e-5).to(device))
