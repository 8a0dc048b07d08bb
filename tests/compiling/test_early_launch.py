"""Kernels that are launched while the ones before them still run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.scheduler import Scheduler
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_specdec.compiling import early_launch, layers


HEAD = "\nasync_compile.triton('triton_poi_1', '''\nimport triton\ntriton_meta={'launch_pdl': True}\n"
BODY = "def triton_poi_1(in_ptr0, out_ptr0):\n"
WAIT, LOAD, STORE = "    tl.extra.cuda.gdc_wait()\n", "    tmp0 = tl.load(in_ptr0)\n", "    tl.store(out_ptr0, tmp0)\n"


@pytest.mark.parametrize(
    "kernels, expected",
    [
        ([WAIT + LOAD + STORE], True),
        ([WAIT + STORE], True),
        ([LOAD + WAIT + STORE], False),
        ([STORE], False),
        ([""], False),
        ([WAIT + LOAD + STORE, STORE + WAIT], False),
        ([WAIT + LOAD + STORE, WAIT + STORE], True),
        (["    tl.atomic_add(out_ptr0, 1)\n" + WAIT], False),
        (["    tmp1 = triton_helpers.bucketize_binary_search(in_ptr0)\n" + WAIT], False),
        (["    rows = tl.make_tensor_descriptor(in_ptr0)\n" + WAIT], False),
        (["    tmp0 = rows.load([0])\n" + WAIT], False),
        ([], True),  # products alone
    ],
)
def test_order_of_waits(kernels: list[str], expected: bool) -> None:
    source = "import torch\n" + "".join(HEAD + BODY + kernel + "''', device_str='cuda')\n" for kernel in kernels)
    assert early_launch.all_wait_first(source) is expected
    assert early_launch.all_wait_first(source.replace("'launch_pdl'", '"launch_pdl"')) is expected
    assert early_launch.all_wait_first(source.replace("True", "False"))


def test_unknown_code() -> None:
    assert not early_launch.all_wait_first("")
    assert not early_launch.all_wait_first("compile.by_other_means('launch_pdl')" + WAIT)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.linear(input)  # no loop, for which a C++ compiler would run


@torch.no_grad()
@pytest.mark.parametrize("waits", [True, False], ids=["kernels that wait", "kernels that do not"])
def test_compiling(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles once more without the option where the code does not show the waits, and leaves torch as it was."""
    from torch._inductor import compile_fx

    compiled_with: list[tuple[bool, bool, bool]] = []
    sources: list[int] = []
    inductor = compile_fx.compile_fx

    def noted(graph: torch.fx.GraphModule, *args: Any, **options: Any) -> Any:
        scheduler: Any = object.__new__(Scheduler)
        scheduler.previous_node = "a node"
        waits_for_all = scheduler.previous_node is None
        is_apart = "all kernels wait first" in torch.compiler.config.cache_key_tag
        compiled_with.append((config.triton.enable_pdl, waits_for_all, is_apart))
        sources.append(sum(hasattr(node, "_dynamo_source") for node in graph.graph.nodes))
        return inductor(graph, *args, **options)

    monkeypatch.setattr(compile_fx, "compile_fx", noted)
    monkeypatch.setattr(layers, "overlaps", lambda inputs: True)
    monkeypatch.setattr(early_launch, "all_wait_first", lambda source: waits)
    torch._dynamo.reset()
    model, input = Model(), torch.randn(3, 8)
    with config.patch({"force_disable_caches": True, "triton.enable_pdl": True}):  # as a user may have set it
        found = torch.compile(model, backend=layers.compile_graph)(input)
    torch.testing.assert_close(found, model(input))
    assert compiled_with[0] == (True, True, True) and sources[0] > 0
    assert compiled_with[1:] == ([] if waits else [(False, False, False)])
    assert sources[1:] == sources[:1] * (not waits)
    assert "previous_node" not in vars(Scheduler) and not torch.compiler.config.cache_key_tag


@torch.no_grad()
def test_what_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_specdec_kernels import devices

    monkeypatch.setattr(devices, "can_overlap", lambda device: device.type == "cuda")
    monkeypatch.setattr(early_launch, "kernels_are_installed", lambda: True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        # Not cuda:1: torch allocates on a GPU that it fakes, and there may be one only.
        first, elsewhere, on_cpu = (torch.empty(3, device=device) for device in ("cuda:0", "meta", "cpu"))
    assert early_launch.overlaps([first, on_cpu, 4])
    assert not early_launch.overlaps([first, elsewhere]) and not early_launch.overlaps([on_cpu, 4])
    assert not early_launch.overlaps([])
    with torch.enable_grad():
        assert not early_launch.overlaps([first])
    with config.patch(combo_kernels=True):
        assert not early_launch.overlaps([first])
    monkeypatch.setattr(early_launch, "_config", lambda: SimpleNamespace(triton=None, combo_kernels=False))
    assert not early_launch.overlaps([first])


@torch.no_grad()
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
)
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that do not read what the last one wrote among others that do: the same results, replay after replay."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(24))

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            for one, other in zip(self.layers[::2], self.layers[1::2], strict=True):
                left, right = one(states), other(states)  # merged
                places = torch.arange(256, device=states.device) * 0.01
                table = left.new_zeros(2, 256).index_add_(0, left.argmax(-1) % 2, right)
                states = torch.nn.functional.rms_norm(left.sin() + places.to(left.dtype), (256,)) + table[1]
            return states

    sources: list[str] = []
    check = early_launch.all_wait_first
    monkeypatch.setattr(early_launch, "all_wait_first", lambda source: sources.append(source) or check(source))
    model, input = Layers().to("cuda", torch.bfloat16), torch.randn(9, 256, device="cuda", dtype=torch.bfloat16)
    results = []
    for overlaps in (False, True):
        torch._dynamo.reset()
        if not overlaps:
            monkeypatch.setattr(layers, "overlaps", lambda inputs: False)
        else:
            monkeypatch.setattr(layers, "overlaps", early_launch.overlaps)
        with config.patch(force_disable_caches=True):
            compiled = torch.compile(model, backend=layers.compile_graph, fullgraph=True)
            expected = compiled(input)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = compiled(input)
        for _ in range(100):
            found.fill_(torch.nan)
            graph.replay()
            assert torch.equal(found, expected)
        results.append(expected)
    assert torch.equal(*results)
    assert sources and all(check(source) and "gdc_wait" in source for source in sources)
