"""The operators of state layers against the functions of transformers that they stand for, on a chain."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import hf_specdec_kernels
from hf_specdec_kernels import (
    DeltaPending,
    PendingPath,
    ScanPending,
    conv_table,
    pack_ancestors,
    tree_conv,
    tree_delta_rule,
    tree_selective_scan,
    tree_ssd,
)


NODES, ROWS = 6, 2
CHAIN = pack_ancestors(torch.ones(1, NODES, NODES).tril().bool())
FIRST = PendingPath(torch.tensor([1, 0]), torch.zeros(2).long(), torch.zeros(2, 1).long(), torch.zeros(2).long())


def random(*sizes: int) -> torch.Tensor:
    return torch.randn(ROWS, NODES, *sizes)


def model_file(name: str):
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


@pytest.mark.parametrize(
    "family, function",
    [("qwen3_next", "torch_recurrent_gated_delta_rule"), ("kimi_linear", "recurrent_kimi_delta_attention")],
)
def test_delta_rule(family: str, function: str) -> None:
    channels = family == "kimi_linear"
    key_heads = 4 if channels else 2
    query, key, value = random(key_heads, 24), random(key_heads, 24), random(4, 20)
    decay, beta, states = -random(4, 24).abs(), random(4).sigmoid(), torch.randn(ROWS, 4, 24, 20)
    decay = decay if channels else decay[..., 0]
    rule = getattr(model_file(family), function)
    options = {"initial_state": states[FIRST.slots].clone(), "output_final_state": True}
    wanted, after = rule(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True, **options)
    kept = DeltaPending(
        torch.empty(2, ROWS, NODES, key_heads, 24),
        torch.empty(ROWS, NODES, 4, 20),
        torch.empty(2, ROWS, NODES, *decay.shape[2:]),
    )
    torch.testing.assert_close(tree_delta_rule(query, key, value, decay, beta, states, kept, CHAIN, FIRST), wanted)
    # All nodes are kept; the next step commits them.
    one = (query[:, :1], key[:, :1], value[:, :1], decay[:, :1], beta[:, :1])
    tree_delta_rule(*one, states, kept, CHAIN[:, :1], all_nodes())
    torch.testing.assert_close(states[FIRST.slots], after)


def all_nodes() -> PendingPath:
    """All nodes of the first step are kept."""
    return FIRST._replace(
        turns=torch.ones(2).long(),
        path=torch.arange(NODES).expand(ROWS, -1),
        counts=torch.full((ROWS,), NODES),
    )


def test_ssd() -> None:
    x, dt, keys, queries = random(4, 10), random(4), random(2, 12), random(2, 12)
    rates, skip, bias, states = -torch.rand(4), torch.randn(4), torch.randn(4), torch.randn(ROWS, 4, 10, 12)
    expected, wanted = states[FIRST.slots].clone(), []
    for node in range(NODES):
        wanted.append(
            model_file("bamba").mamba2_selective_state_update(
                expected,
                x[:, node],
                dt[:, node, :, None].expand(-1, -1, 10),
                rates[:, None, None].expand(-1, 10, 12),
                keys[:, node],
                queries[:, node],
                skip[:, None].expand(-1, 10),
                dt_bias=bias[:, None].expand(-1, 10),
                dt_softplus=True,
            )
        )
    kept = DeltaPending(
        torch.empty(2, ROWS, NODES, 2, 12), torch.empty(ROWS, NODES, 4, 10), torch.empty(2, ROWS, NODES, 4)
    )
    options = {"D": skip, "dt_bias": bias, "dt_softplus": True}
    found = tree_ssd(x, dt, rates, keys, queries, states, kept, CHAIN, FIRST, **options)
    torch.testing.assert_close(found, torch.stack(wanted, dim=1))
    one = (x[:, :1], dt[:, :1], rates, keys[:, :1], queries[:, :1])
    tree_ssd(*one, states, kept, CHAIN[:, :1], all_nodes(), **options)
    torch.testing.assert_close(states[FIRST.slots], expected)


def test_selective_scan() -> None:
    x, dt, gate, keys, queries = random(10), random(10), random(10), random(12), random(12)
    rates, skip, bias, states = -torch.rand(10, 12), torch.randn(10), torch.randn(10), torch.randn(ROWS, 10, 12)
    expected, wanted = states[FIRST.slots].clone(), []
    for node in range(NODES):
        of_node = (tensor[:, node] for tensor in (x, dt))
        constants = {"dt_bias": bias, "dt_softplus": True, "z": gate[:, node]}
        wanted.append(
            model_file("jamba").mamba_selective_state_update(
                expected, *of_node, rates, keys[:, node], queries[:, node], skip, **constants
            )
        )
    kept = ScanPending(torch.empty(ROWS, NODES, 10), torch.empty(ROWS, NODES, 10), torch.empty(2, ROWS, NODES, 1, 12))
    options = {"D": skip, "dt_bias": bias, "dt_softplus": True}
    keys, queries = keys[:, :, None], queries[:, :, None]
    found = tree_selective_scan(x, dt, rates, keys, queries, states, kept, CHAIN, FIRST, z=gate, **options)
    torch.testing.assert_close(found, torch.stack(wanted, dim=1))
    one = (x[:, :1], dt[:, :1], rates, keys[:, :1], queries[:, :1])
    tree_selective_scan(*one, states, kept, CHAIN[:, :1], all_nodes(), **options)
    torch.testing.assert_close(states[FIRST.slots], expected)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_conv(activation: str | None) -> None:
    x, weight, bias, windows = random(10), torch.randn(10, 4), torch.randn(10), torch.randn(ROWS, 10, 4)
    expected = windows[FIRST.slots].clone()
    wanted = model_file("qwen3_next").causal_conv1d_update(x.mT, expected, weight, bias, activation).mT
    chain = torch.arange(NODES)[None]
    table = conv_table((chain - 1).clamp(min=0), chain, 4)
    pending = torch.empty(ROWS, NODES, 10)
    found = tree_conv(x, weight, windows, pending, table, FIRST, bias=bias, activation=activation)
    torch.testing.assert_close(found, wanted)
    tree_conv(x[:, :1], weight, windows, pending, table[:, :1], all_nodes())
    torch.testing.assert_close(windows[FIRST.slots], expected)


def step_of(name: str) -> dict[str, Any]:
    """Arguments of a call, with nodes that are pending."""
    rows, decay = all_nodes(), -random(4).abs()
    pending = DeltaPending(torch.randn(2, ROWS, NODES, 2, 12), random(4, 10), torch.stack([decay, decay]))
    states, rates = torch.randn(ROWS, 4, 12, 10), -torch.rand(10, 12)
    scanned = ScanPending(random(10), random(10).abs(), torch.randn(2, ROWS, NODES, 1, 12))
    tree = {"ancestors": CHAIN, "rows": rows}
    delta = {"query": random(2, 12), "key": random(2, 12), "value": random(4, 10), "decay": decay, "beta": decay}
    windows = {"windows": torch.randn(ROWS, 10, 4), "pending": random(10), "rows": rows}
    spaces = {"dt": random(4).abs(), "A": rates[:4, 0].contiguous(), "B": random(2, 12), "C": random(2, 12)}
    channels = {"A": rates, "states": rates.expand(ROWS, -1, -1).clone(), "pending": scanned, "rows": rows}
    return {
        "tree_delta_rule": {**delta, "states": states, "pending": pending, **tree},
        "commit_delta_rule": {"states": states, "pending": pending, "rows": rows},
        "tree_ssd": {"x": random(4, 10), **spaces, "states": states.mT.contiguous(), "pending": pending, **tree},
        "commit_ssd": {"states": states.mT.contiguous(), "pending": pending, "rows": rows},
        "tree_conv": {
            "x": random(10),
            "weight": torch.randn(10, 3),
            "table": torch.zeros(1, NODES, 3).long(),
            **windows,
        },
        "commit_conv": windows,
        "tree_selective_scan": {
            **{"x": random(10), "dt": random(10), "B": random(1, 12), "C": random(1, 12)},
            **channels,
            "ancestors": CHAIN,
        },
        "commit_selective_scan": channels,
    }[name]


LAYERS = ("delta_rule", "ssd", "conv", "selective_scan")
OPERATORS = [f"{verb}_{layer}" for layer in LAYERS for verb in ("tree", "commit")]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.some_cases(2)
def test_operators_are_registered_well(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`opcheck` on the arguments that a call hands to its operator: schema, fake implementation, autograd."""
    calls = []

    class Recorder:
        def __getattr__(self, other: str) -> Any:
            return lambda *args: calls.append(args)

    function = getattr(hf_specdec_kernels, name)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[function.__module__], "ops", Recorder())
        function(**step_of(name))
    operator = getattr(torch.ops.hf_specdec_kernels, name)
    assert set(torch.library.opcheck(operator.default, calls[0]).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", OPERATORS[::2])
@pytest.mark.some_cases(2)
def test_compiles_as_a_whole(name: str) -> None:
    """With the states that it changes in place."""
    function, state = getattr(hf_specdec_kernels, name), "windows" if name.endswith("conv") else "states"
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        arguments = step_of(name)
        before = arguments[state].clone()
        if compiled:
            torch._dynamo.reset()
            function = torch.compile(function, backend="aot_eager", fullgraph=True)
        found.append((function(**arguments), arguments[state]))
        assert not torch.equal(before, arguments[state])
    torch.testing.assert_close(*found)
