"""Budgets in Triton: one program for each row, which holds all pairs of a node and a rank in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..compilation import launcher
from ..triton_ranking import nothing, pack, place_of


@triton.jit
def _is_among_the_best(keys, places, count):
    """1 for the `count` largest keys, of equals those of the lowest places; else 0."""
    packed = pack(keys, places)
    found = places * 0
    for _ in range(count):
        winner = tl.max(packed, axis=0)
        found = tl.where(places == place_of(winner), 1, found)
        packed = tl.where(packed == winner, nothing(), packed)
    return found


@triton.jit(do_not_specialize=["above", "ranks", "budget", "num_chosen", "first_node"])
def _share_out_kernel(
    numbers, path_log_q, valid, best, drawn, drawn_log_q,
    tokens, node_valid, parents, chosen, chosen_log_q, chosen_tokens, chosen_valid, chosen_above,
    above, ranks, budget, num_chosen, first_node, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): see `BudgetedLevel`."""
    row = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    inside = pair < above * ranks
    node = pair // ranks
    path = tl.load(path_log_q + row * above + node, mask=inside, other=float("-inf"))
    first = row * above * ranks
    gains = path + tl.load(best + first + pair, mask=inside, other=float("-inf"))
    # Gains fall along the ranks, so that the pairs that count for a node are its first ranks: its first draws.
    is_node = _is_among_the_best(gains, pair, budget)
    place = tl.cumsum(is_node, axis=0) - 1
    taken = is_node > 0
    token = tl.load(drawn + first + pair, mask=inside, other=0)
    log_q = tl.load(drawn_log_q + first + pair, mask=inside, other=float("-inf"))
    counts = taken & (log_q > float("-inf")) & (tl.load(valid + row * above + node, mask=inside, other=0) != 0)
    at = row * budget + place
    tl.store(tokens + at, token, mask=taken)
    tl.store(node_valid + at, counts.to(tl.int8), mask=taken)
    tl.store(parents + at, tl.load(numbers + row * above + node, mask=inside, other=0), mask=taken)

    path += log_q
    places = tl.where(taken, pair, pair + BLOCK)  # what is no node comes last
    is_chosen = _is_among_the_best(tl.where(counts, path, float("-inf")), places, num_chosen)
    at = row * num_chosen + tl.cumsum(is_chosen, axis=0) - 1
    taken = is_chosen > 0
    tl.store(chosen + at, (first_node + place).to(tl.int64), mask=taken)
    tl.store(chosen_log_q + at, path, mask=taken)
    tl.store(chosen_tokens + at, token, mask=taken)
    tl.store(chosen_valid + at, counts.to(tl.int8), mask=taken)
    tl.store(chosen_above + at, node.to(tl.int64), mask=taken)


def launch_share_out(
    numbers, path_log_q, valid, best, drawn, drawn_log_q, budget, num_chosen, first_node, *results
) -> None:  # fmt: skip
    """See `hf_specdec_kernels.share_out`; writes to contiguous `results`, the fields of `BudgetedLevel`."""
    batch, above, ranks = best.shape
    if batch == 0:
        return
    block = triton.next_power_of_2(above * ranks)
    inputs = [tensor.contiguous() for tensor in (numbers, path_log_q, valid, best, drawn, drawn_log_q)]
    everything = (tensor.view(torch.int8) if tensor.dtype == torch.bool else tensor for tensor in (*inputs, *results))
    launcher(_share_out_kernel, (batch,))(
        *everything, above, ranks, budget, num_chosen, first_node,
        BLOCK=block, num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
