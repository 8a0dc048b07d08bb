"""
The selective scan of Mamba-1 over a tree in Triton: a program for each row and block of channels, which takes node
after node. A decay for every channel and number of its state leaves no products of matrices.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..compilation import launcher
from ..devices import can_overlap, options_of_launch
from ..pending import unit_stride
from ..triton_states import finite, softplus


@triton.jit(do_not_specialize=["nodes", "width", "ancestors_stride_b"])
def _tree_selective_scan_kernel(
    x, dt, rates, input_keys, queries, states, inputs, steps, keys, ancestors, slots, turns, path, counts,
    skip, gate, dt_bias, of_nodes, out, nodes, width,
    x_stride_b, x_stride_n, dt_stride_b, dt_stride_n, gate_stride_b, gate_stride_n,
    key_stride_b, key_stride_n, key_stride_g, query_stride_b, query_stride_n, query_stride_g, ancestors_stride_b,
    input_stride_b, kept_key_stride_t, kept_key_stride_b, kept_key_stride_n,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, STATE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    SKIP: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, SCORE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    Program (BLOCK_C channels of a group, row): commits the path that is pending, then, if SCORE, takes the nodes.
    Their states are `of_nodes`, `[batch, nodes, channels, STATE]`.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # for the kernel before
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1)
    wide_row = row.to(tl.int64)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    group = tl.program_id(0) * BLOCK_C // GROUP
    numbers = tl.arange(0, BLOCK_S)
    inside = channels < CHANNELS
    is_number = numbers < STATE
    state_inside = inside[:, None] & is_number[None, :]
    tile = channels[:, None] * STATE + numbers[None, :]
    slot = tl.load(slots + row).to(tl.int64)
    kept = channels < tl.where(slot >= 0, CHANNELS, 0)  # of a row without a slot nothing is kept
    count = tl.where(slot >= 0, tl.minimum(tl.load(counts + row).to(tl.int32), width), 0)
    keeps_keys = numbers < tl.where((slot >= 0) & (tl.program_id(0) * BLOCK_C % GROUP == 0), STATE, 0)
    slot = tl.maximum(slot, 0)
    turn = tl.load(turns + slot).to(tl.int64) & 1
    states += slot * CHANNELS * STATE
    inputs += slot * input_stride_b + channels
    steps += slot * input_stride_b + channels
    keys += slot * kept_key_stride_b + group * STATE + numbers
    rate = tl.load(rates + tile, mask=state_inside, other=0.0)
    committed = tl.load(states + tile, mask=state_inside, other=0.0)

    for place in range(count):
        node = tl.load(path + wide_row * width + place).to(tl.int64)
        step = tl.load(steps + node * CHANNELS, mask=inside, other=0.0)
        own = tl.load(inputs + node * CHANNELS, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(keys + turn * kept_key_stride_t + node * kept_key_stride_n, mask=is_number, other=0.0)
        committed = _next_state(committed, rate, step, own, key.to(tl.float32))
    tl.store(states + tile, committed, mask=state_inside & (channels < tl.where(count > 0, CHANNELS, 0))[:, None])

    if SCORE:
        tl.debug_barrier()  # all threads have read what is pending
        keys += (1 - turn) * kept_key_stride_t
        of_nodes += wide_row * nodes * CHANNELS * STATE + tile
        state = committed
        places = tl.arange(0, 64)
        for node in range(nodes):
            word = tl.load(ancestors + wide_row * ancestors_stride_b + node)
            is_above = ((word >> places.to(tl.int64)) & 1) != 0
            parent = tl.max(tl.where(is_above & (places < node), places, -1), axis=0)
            if parent != node - 1:  # else its state is the last one
                if parent < 0:
                    state = committed
                else:
                    tl.debug_barrier()
                    state = tl.load(of_nodes + parent * CHANNELS * STATE, mask=state_inside, other=0.0)
            step = tl.load(dt + wide_row * dt_stride_b + node * dt_stride_n + channels, mask=inside, other=0.0)
            step = step.to(tl.float32)
            if BIAS:
                step += tl.load(dt_bias + channels, mask=inside, other=0.0).to(tl.float32)
            if SOFTPLUS:
                step = softplus(step)
            step = finite(step)
            own = tl.load(x + wide_row * x_stride_b + node * x_stride_n + channels, mask=inside, other=0.0)
            own = finite(own.to(tl.float32))
            key = tl.load(
                input_keys + wide_row * key_stride_b + node * key_stride_n + group * key_stride_g + numbers,
                mask=is_number,
                other=0.0,
            )
            key = finite(key.to(tl.float32))
            query = tl.load(
                queries + wide_row * query_stride_b + node * query_stride_n + group * query_stride_g + numbers,
                mask=is_number,
                other=0.0,
            )
            state = _next_state(state, rate, step, own, key)
            tl.store(of_nodes + node * CHANNELS * STATE, state, mask=state_inside)
            result = tl.sum(state * query.to(tl.float32)[None, :], axis=1)
            if SKIP:
                result += tl.load(skip + channels, mask=inside, other=0.0).to(tl.float32) * own
            if GATE:
                opened = tl.load(
                    gate + wide_row * gate_stride_b + node * gate_stride_n + channels, mask=inside, other=0.0
                ).to(tl.float32)
                result *= opened / (1.0 + tl.exp(-opened))
            result = tl.where(kept, result, 0.0)
            tl.store(out + (wide_row * nodes + node) * CHANNELS + channels, result.to(x.dtype.element_ty), mask=inside)
            tl.store(inputs + node * CHANNELS, own.to(x.dtype.element_ty), mask=kept)
            tl.store(steps + node * CHANNELS, step, mask=kept)
            tl.store(keys + node * kept_key_stride_n, key.to(x.dtype.element_ty), mask=keeps_keys)


@triton.jit
def _next_state(state, rate, step, own, key):
    """The state after one more input."""
    return state * tl.exp(rate * step[:, None]) + (step * own)[:, None] * key[None, :]


def launch_tree_selective_scan(
    x, dt, rates, input_keys, queries, states, inputs, steps, keys, ancestors, slots, turns, path, counts,
    skip, gate, dt_bias, dt_softplus, out,
) -> None:  # fmt: skip
    """See `hf_specdec_kernels.tree_selective_scan`."""
    x, dt, input_keys, queries = (unit_stride(tensor) for tensor in (x, dt, input_keys, queries))
    _launch(
        (x, dt, rates, input_keys, queries), states, (inputs, steps, keys), ancestors.contiguous(),
        (slots, turns, path, counts), (skip, None if gate is None else unit_stride(gate), dt_bias), dt_softplus, out,
    )  # fmt: skip


def launch_commit_selective_scan(states, inputs, steps, keys, rates, slots, turns, path, counts) -> None:
    """See `hf_specdec_kernels.commit_selective_scan`."""
    _launch(rates, states, (inputs, steps, keys), None, (slots, turns, path, counts), (None,) * 3, False, None)


def _launch(step, states, pending, ancestors, rows, options, dt_softplus, out) -> None:
    """Launches a step, or, if `step` is only the rates, a commit."""
    score = out is not None
    x, dt, rates, input_keys, queries = step if score else (states, states, step, states, states)
    _, channels, state_size = states.shape
    batch, nodes = len(rows[0]), x.shape[1]
    if batch == 0:
        return
    skip, gate, dt_bias = options
    group = channels // pending[2].shape[3]
    block_c = channels_of_a_program(group, channels)
    of_nodes = states.new_empty(batch, nodes, channels, state_size) if score else states
    overlap = can_overlap(states.device)
    launcher(_tree_selective_scan_kernel, (triton.cdiv(channels, block_c), batch))(
        x, dt, rates.contiguous(), input_keys, queries, states, *pending, ancestors if score else rows[0],
        *(tensor.contiguous() for tensor in rows),
        rates if skip is None else skip.contiguous(), x if gate is None else gate,
        rates if dt_bias is None else dt_bias.contiguous(), of_nodes, out if score else states, nodes,
        rows[2].shape[1],
        *x.stride()[:2], *dt.stride()[:2], *(x if gate is None else gate).stride()[:2],
        *input_keys.stride()[:3], *queries.stride()[:3], nodes if score and len(ancestors) > 1 else 0,
        pending[0].stride(0), *pending[2].stride()[:3],
        CHANNELS=channels, GROUP=group, STATE=state_size, BLOCK_C=block_c,
        BLOCK_S=triton.next_power_of_2(state_size), SKIP=skip is not None, GATE=gate is not None,
        BIAS=dt_bias is not None, SOFTPLUS=dt_softplus, SCORE=score, OVERLAP=overlap,
        num_warps=1, **options_of_launch(overlap),
    )  # fmt: skip


def channels_of_a_program(group: int, channels: int) -> int:
    """32 channels, or fewer if these do not divide a group of them."""
    return 32 if group == channels else min(32, group & -group)
