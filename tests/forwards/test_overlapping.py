"""Kernels that are launched while the ones before them still run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.scheduler import Scheduler

from hf_specdec.forwards import compiling, overlapping


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
        ([], False),  # of unknown code
    ],
)
def test_order_of_waits(kernels: list[str], expected: bool) -> None:
    source = "import torch\n" + "".join(HEAD + BODY + kernel + "''', device_str='cuda')\n" for kernel in kernels)
    assert overlapping.all_wait_first(source) is expected
    assert overlapping.all_wait_first(source.replace("True", "False")) is (kernels != [])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.linear(input).sin() + torch.arange(8)


@torch.no_grad()
@pytest.mark.parametrize("waits", [True, False], ids=["kernels that wait", "kernels that do not"])
def test_compiling(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles once more without the option where the code does not show the waits, and leaves torch as it was."""
    from torch._inductor import compile_fx

    compiled_with: list[tuple[bool, bool]] = []
    inductor = compile_fx.compile_fx

    def noted(*args: Any, **options: Any) -> Any:
        compiled_with.append((config.triton.enable_pdl, "previous_node" in vars(Scheduler)))
        return inductor(*args, **options)

    monkeypatch.setattr(compile_fx, "compile_fx", noted)
    monkeypatch.setattr(compiling, "overlaps", lambda inputs: True)
    monkeypatch.setattr(overlapping, "all_wait_first", lambda source: waits)
    torch._dynamo.reset()
    model, input = Model(), torch.randn(3, 8)
    with config.patch(force_disable_caches=True):
        found = torch.compile(model, backend=compiling.compile_graph)(input)
    torch.testing.assert_close(found, model(input))
    assert compiled_with[:1] == [(True, True)] and compiled_with[-1] == (waits, waits)
    assert "previous_node" not in vars(Scheduler) and not config.triton.enable_pdl


def test_where_nothing_overlaps() -> None:
    assert not overlapping.overlaps([torch.zeros(3), 4]) and not overlapping.overlaps([])
