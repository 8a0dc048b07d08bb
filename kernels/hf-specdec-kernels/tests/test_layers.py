"""RMSNorm, gated products, rotary embedding and writes of K/V, in Triton against plain PyTorch."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from selection import fast

from hf_specdec_kernels import gated_product, gated_rms_norm, rms_norm, rotary, write_kv
from hf_specdec_kernels.gated_product import ACTIVATIONS
from hf_specdec_kernels.gated_product.naive import gated_product_naive
from hf_specdec_kernels.gated_product.triton import launch_gated_product
from hf_specdec_kernels.gated_rms_norm.naive import gated_rms_norm_naive
from hf_specdec_kernels.gated_rms_norm.triton import launch_gated_rms_norm
from hf_specdec_kernels.kv_writes.naive import write_kv_naive
from hf_specdec_kernels.kv_writes.triton import launch_write_kv
from hf_specdec_kernels.rms_norm import SCALINGS
from hf_specdec_kernels.rms_norm.naive import rms_norm_naive
from hf_specdec_kernels.rms_norm.triton import launch_rms_norm
from hf_specdec_kernels.rotary import LAYOUTS
from hf_specdec_kernels.rotary.naive import rotary_naive
from hf_specdec_kernels.rotary.triton import launch_rotary


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_UNEQUAL = 2e-3
"""Share of numbers in half precision that may be rounded the other way, since sums are in another order."""


def agree(found: torch.Tensor, expected: torch.Tensor, slack: int = 1) -> bool:
    """Whether numbers of float32 differ by 1e-6 at most, and almost none of half precision at all, times `slack`."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if found.dtype == torch.float32:
        return torch.allclose(found, expected, atol=slack * 1e-6, rtol=1e-6)
    # A number that is rounded the other way is the next one.
    unequal, atol = (found != expected).double().mean().item(), slack * 1e-6
    return unequal <= slack * MOST_UNEQUAL and torch.allclose(found.float(), expected.float(), atol=atol, rtol=2**-6)


def numbers(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return (3 * torch.randn(shape)).to(device, dtype)


def _slack(activation: str, device: torch.device) -> int:
    """Triton's interpreter has no tanh."""
    return 40 if activation == "gelu_tanh" and device.type == "cpu" else 1


def normed(input: torch.Tensor, weight: torch.Tensor, scaling: str, eps: float = 1e-5) -> torch.Tensor:
    out = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    launch_rms_norm(input, weight, eps, scaling, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_norms(scaling: str, dtype: torch.dtype, device: torch.device) -> None:
    for shape in ((2, 3, 5), (1, 1, 576), (7, 130), (3, 2, 17, 64)):
        input = numbers(*shape, dtype=dtype, device=device)
        weight = numbers(shape[-1], dtype=dtype, device=device)
        assert agree(normed(input, weight, scaling), rms_norm_naive(input, weight, 1e-5, scaling))


def test_norms_of_parts_of_others(device: torch.device) -> None:
    whole, weight = (numbers(*shape, dtype=torch.bfloat16, device=device) for shape in ((4, 6, 96), (32,)))
    for part in (whole[1:, ::2, 5:37], whole[:, :, 64:], whole[..., :4].transpose(0, 2)[:, :1].expand(-1, 32, -1).mT):
        assert agree(normed(part, weight, "rounded"), rms_norm_naive(part, weight, 1e-5, "rounded"))


def test_wrong_norms_show(device: torch.device) -> None:
    """Without eps, rounded at another place, and with another weight."""
    small = 1e-3 * numbers(8, 64, dtype=torch.float32, device=device)
    weight = numbers(64, dtype=torch.float32, device=device)
    assert not agree(normed(small, weight, "exact", eps=0.0), rms_norm_naive(small, weight, 1e-5, "exact"))
    input, weight = (numbers(*shape, dtype=torch.bfloat16, device=device) for shape in ((8, 64), (64,)))
    for wrong in SCALINGS:
        for scaling in set(SCALINGS) - {wrong}:
            assert not agree(normed(input, weight, wrong), rms_norm_naive(input, weight, 1e-5, scaling))


Way = tuple[int, str, str, bool]
"""Groups, scaling, activation, and whether the gate comes first."""
WAYS: list[Way] = [
    (1, "rounded", "silu", False),
    (1, "exact", "sigmoid", False),
    (4, "rounded", "silu", True),
    (2, "exact", "silu", False),
    (2, "rounded", "sigmoid", True),
]


def gated(input: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, way: Way, eps: float = 1e-5) -> torch.Tensor:
    out = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    launch_gated_rms_norm(input, gate, weight, eps, *way, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_gated_norms(way: Way, dtype: torch.dtype, device: torch.device) -> None:
    for shape in ((2, 3, 12), (7, 132), (3, 2, 5, 64)):
        input, gate, weight = (numbers(*of, dtype=dtype, device=device) for of in (shape, shape, shape[-1:]))
        assert agree(gated(input, gate, weight, way), gated_rms_norm_naive(input, gate, weight, 1e-5, *way), 2)
    whole = numbers(4, 6, 3 * 40, dtype=dtype, device=device)
    input, gate, weight = whole[1:, ::2, 40:80], whole[1:, ::2, 80:], whole[0, 0, :40]
    assert agree(gated(input, gate, weight, way), gated_rms_norm_naive(input, gate, weight, 1e-5, *way), 2)


def test_wrong_gated_norms_show(device: torch.device) -> None:
    """Without eps, in other groups or another order, with another activation, rounded at another place."""
    input, gate, weight = (numbers(*of, dtype=torch.bfloat16, device=device) for of in ((8, 64), (8, 64), (64,)))
    for way in WAYS:
        expected = gated_rms_norm_naive(1e-3 * input, gate, weight, 1e-5, *way)
        assert agree(gated(1e-3 * input, gate, weight, way), expected, 2)
        assert not agree(gated(1e-3 * input, gate, weight, way, eps=0.0), expected, 2)
        groups, scaling, activation, gate_first = way
        others: list[Way] = [
            (3 - min(groups, 2), scaling, activation, gate_first),
            (groups, scaling, "sigmoid" if activation == "silu" else "silu", gate_first),
            (groups, scaling, activation, not gate_first),
            (groups, "exact" if scaling == "rounded" else "rounded", activation, gate_first),
        ]
        expected = gated_rms_norm_naive(input, gate, weight, 1e-5, *way)
        for wrong in others:
            assert not agree(gated(input, gate, weight, wrong), expected, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_products(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    both = numbers(2, 5, 2 * 700, dtype=dtype, device=device)
    slack = _slack(activation, device)
    for gate, up in ((both[..., :700], both[..., 700:]), both[:1, :, :62].chunk(2, dim=-1), both[:, :3].chunk(2)):
        out = torch.empty(gate.shape, dtype=dtype, device=device)
        launch_gated_product(gate, up, activation, out)
        assert agree(out, gated_product_naive(gate, up, activation), slack)
    # Activations that are not rounded before the product.
    unrounded = gated_product_naive(gate.float(), up.float(), activation).to(dtype)
    assert agree(out, unrounded, slack) == (dtype == torch.float32)


def turned(query: torch.Tensor, key: torch.Tensor, *others) -> tuple[torch.Tensor, torch.Tensor]:
    out = [torch.empty_like(one.transpose(1, 2), memory_format=torch.contiguous_format) for one in (query, key)]
    launch_rotary(query, key, *others, *(one.transpose(1, 2) for one in out))
    return out[0].transpose(1, 2), out[1].transpose(1, 2)


TURNS = [(32, False), (32, True), (12, False)]
"""Rotated dimensions, and whether in float32."""
ROTARY = [(layout, *turn, dtype) for layout, turn, dtype in product(LAYOUTS, TURNS, DTYPES)]
# Every two of a layout, a turn and a dtype come together.
FAST = [
    (layout, *turn, DTYPES[(place + number) % len(DTYPES)])
    for place, layout in enumerate(LAYOUTS)
    for number, turn in enumerate(TURNS)
]


@pytest.mark.parametrize("layout, rotary_dim, in_float, dtype", fast(ROTARY, FAST))
def test_rotary(layout: str, rotary_dim: int, in_float: bool, dtype: torch.dtype, device: torch.device) -> None:
    """All bits are equal: nothing is summed in another order."""
    angles = numbers(2, 5, rotary_dim, dtype=torch.float32, device=device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    query, key = (numbers(2, 5, heads, 32, dtype=dtype, device=device).transpose(1, 2) for heads in (6, 2))
    for states in ((query, key, cos, sin), (query.contiguous(), key[:, :1], cos[:1], sin[:1])):
        found, expected = turned(*states, layout, in_float), rotary_naive(*states, layout, in_float)
        assert all(map(torch.equal, found, expected))
    # Rounded elsewhere, and turned by other angles.
    if dtype != torch.float32:
        assert not torch.equal(found[0], rotary_naive(*states, layout, not in_float)[0])
    for wrong in set(LAYOUTS) - {layout}:
        assert not torch.equal(found[0], rotary_naive(*states, wrong, in_float)[0])


def test_rotary_by_cosines_in_float32(device: torch.device) -> None:
    query, key = (numbers(1, heads, 3, 16, dtype=torch.bfloat16, device=device) for heads in (4, 2))
    angles = numbers(1, 3, 16, dtype=torch.float32, device=device)
    states = query, key, angles.cos(), angles.sin(), "halves", False
    assert all(map(torch.equal, turned(*states), rotary_naive(*states)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads, key_dim, value_dim", [(3, 8, 8), (1, 70, 33)])
def test_writes_of_kv(heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Caches that are parts of others, states of any strides, and blocks that rows share."""
    caches = [numbers(7, heads + 1, 4, dim, dtype=dtype, device=device)[:, 1:] for dim in (key_dim, value_dim)]
    states = numbers(2, 5, heads, key_dim, dtype=dtype, device=device).transpose(1, 2)
    states = states, numbers(2, heads, value_dim, 5, dtype=dtype, device=device).mT
    blocks = torch.tensor([[3, 3, 0, 5, 5], [1, 6, 6, 2, 1]], device=device)
    offsets = torch.tensor([[0, 2, 3, 1, 0], [3, 1, 0, 2, 0]], device=device)
    expected, wrong = ([cache.clone() for cache in caches] for _ in range(2))
    write_kv_naive(*expected, *states, blocks, offsets)
    write_kv_naive(*wrong, *states, blocks, offsets.flip(1))
    launch_write_kv(*caches, *states, blocks, offsets)
    assert all(map(torch.equal, caches, expected)) and not torch.equal(caches[0], wrong[0])
    write_kv(*wrong, *states, blocks, offsets)
    assert torch.equal(wrong[1][blocks, :, offsets], expected[1][blocks, :, offsets])
    with pytest.raises(ValueError, match="`value_states` has shape"):
        write_kv(*caches, states[0], states[1][..., 1:], blocks, offsets)


def test_operators(device: torch.device) -> None:
    """What the functions return is what the plain versions do."""
    input, weight = (numbers(*shape, dtype=torch.bfloat16, device=device) for shape in ((2, 3, 64), (64,)))
    assert agree(rms_norm(input, weight, 1e-5, "offset"), rms_norm_naive(input, weight, 1e-5, "offset"))
    assert agree(gated_product(input, input, "gelu_tanh"), gated_product_naive(input, input, "gelu_tanh"))
    query, key = (numbers(2, 3, heads, 8, dtype=torch.bfloat16, device=device).transpose(1, 2) for heads in (4, 2))
    cos, sin = numbers(2, 2, 3, 8, dtype=torch.bfloat16, device=device)
    found = rotary(query, key, cos, sin)
    assert all(map(torch.equal, found, rotary_naive(query, key, cos, sin, "halves", False)))
    assert rms_norm(input[:0], weight, 1e-5).shape == (0, 3, 64)
    expected = gated_rms_norm_naive(input, input, weight, 1e-5, 1, "rounded", "silu", False)
    assert agree(gated_rms_norm(input, input, weight, 1e-5), expected, 2)


def test_what_is_refused(device: torch.device) -> None:
    input, weight = torch.ones(2, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(ValueError, match="`scaling` is 'none'; pass one of 'rounded', 'exact', 'offset'"):
        rms_norm(input, weight, 1e-5, "none")
    with pytest.raises(ValueError, match=r"`weight` has shape \[7\]"):
        rms_norm(input, weight[:7], 1e-5)
    for told, message in (
        ({"groups": 3}, "`groups` is 3; pass a divisor of the input's last dimension, 8"),
        ({"scaling": "offset"}, "`scaling` is 'offset'"),
        ({"activation": "relu"}, "`activation` is 'relu'"),
    ):
        with pytest.raises(ValueError, match=message):
            gated_rms_norm(input, input, weight, 1e-5, **told)
    with pytest.raises(ValueError, match="`gate` has shape"):
        gated_rms_norm(input, input[:1], weight, 1e-5)
    with pytest.raises(TypeError, match="`up` has dtype"):
        gated_product(input, input.half())
    with pytest.raises(ValueError, match="`activation` is 'relu'"):
        gated_product(input, input, "relu")
    states, cos = torch.ones(1, 2, 3, 8, device=device), torch.ones(1, 3, 10, device=device)
    with pytest.raises(ValueError, match="`cos` has 10 numbers a node"):
        rotary(states, states, cos, cos)
    with pytest.raises(ValueError, match="`layout` is 'thirds'"):
        rotary(states, states, cos[..., :8], cos[..., :8], "thirds")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes_of_models(dtype: torch.dtype, device: torch.device) -> None:
    for tokens, size, inner, heads, kv_heads in ((1, 576, 1536, 9, 3), (2048, 4096, 14336, 32, 8)):
        input, weight = (numbers(*shape, dtype=dtype, device=device) for shape in ((1, tokens, size), (size,)))
        for scaling in SCALINGS:
            assert agree(normed(input, weight, scaling), rms_norm_naive(input, weight, 1e-5, scaling))
        gate, up = (numbers(1, tokens, inner, dtype=dtype, device=device) for _ in range(2))
        for activation in ACTIVATIONS:
            expected = gated_product_naive(gate, up, activation)
            found = gated_product(gate, up, activation)
            assert agree(found, expected)
            unequal = (found != expected).double().mean().item()
            print(f"{dtype}, {tokens} tokens, {activation}: {unequal:.1e} of the numbers are not bit-equal")
        size = size // heads
        query, key = (numbers(1, tokens, one, size, dtype=dtype, device=device) for one in (heads, kv_heads))
        angles = numbers(1, tokens, size, dtype=torch.float32, device=device)
        states = query.transpose(1, 2), key.transpose(1, 2), angles.cos().to(dtype), angles.sin().to(dtype)
        assert all(map(torch.equal, rotary(*states), rotary_naive(*states, "halves", False)))
