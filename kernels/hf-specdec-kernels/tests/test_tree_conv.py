"""The short convolution over a tree, in Triton against the inputs one by one."""

from __future__ import annotations

import pytest
import torch
from state_cases import NUM_SLOTS, TOLERANCE, Tree, close, in_double, never_written, rows_of

from hf_specdec_kernels import conv_table, tree_conv
from hf_specdec_kernels.tree_conv import commit_conv_naive, tree_conv_naive
from hf_specdec_kernels.tree_conv.triton import launch_commit_conv, launch_tree_conv


@pytest.mark.parametrize(
    "nodes, taps, slots, dtype, spare",
    [
        (9, 4, (3, 0, -1), torch.float32, 1),
        (1, 4, (1,), torch.bfloat16, 2),
        (64, 3, (4,), torch.float16, 0),
        (3, 6, (2,), torch.bfloat16, 0),
    ],
)
def test_against_naive(
    nodes: int, taps: int, slots: tuple[int, ...], dtype: torch.dtype, spare: int, device: torch.device
) -> None:
    """Steps with and without bias and activation, from windows that were written, and a commit."""
    channels, tree = 40, None
    windows = torch.randn(NUM_SLOTS, channels, taps - 1 + spare).to(device, dtype)
    pending = never_written(NUM_SLOTS, nodes + 2, channels, dtype=dtype, device=device)
    weight, bias = torch.randn(channels, taps).to(device, dtype), torch.randn(channels).to(device, dtype)
    expected = in_double((windows, pending))
    turns = torch.zeros(NUM_SLOTS, dtype=torch.long, device=device)
    for counts, options in (((0, 0, 0), (None, False)), ((2, 1, 0), (bias, True)), ((6, 0, 1), (bias, False))):
        slot_numbers, _, path, kept = rows_of(tree, slots, counts, turns)
        tree = Tree(len(slots), nodes, device)
        table = conv_table(tree.parents, tree.depths, taps).to(device)
        whole = torch.randn(len(slots), channels + 5, nodes).to(device, dtype)
        x = whole.transpose(1, 2)[..., 3:-2] if options[1] else whole.transpose(1, 2).contiguous()[..., 3:-2]
        out = torch.full(x.shape, torch.nan).to(x)
        launch_tree_conv(x, weight, windows, pending, table, slot_numbers, path, kept, *options, out)
        wanted = tree_conv_naive(
            x.double(), weight.double(), *expected, table, slot_numbers, path, kept, *in_double_or_none(options)
        )
        close(out, wanted, TOLERANCE[dtype])
        for found, kept_values in zip((windows, pending), expected, strict=True):
            close(found, kept_values, 0.0)
    slot_numbers, _, path, kept = rows_of(tree, slots, (3, 4, 5), turns)
    launch_commit_conv(windows, pending, slot_numbers, path, kept)
    commit_conv_naive(*expected, slot_numbers, path, kept)
    close(windows, expected[0], 0.0)


def in_double_or_none(options: tuple) -> tuple:
    return (None if options[0] is None else options[0].double(), options[1])


def test_a_chain_is_a_convolution(device: torch.device) -> None:
    """Token after token, chunk after chunk, as torch convolves the whole text."""
    text, weight = torch.randn(1, 30, 8).to(device), torch.randn(8, 4).to(device)
    wanted = torch.nn.functional.conv1d(text.mT, weight[:, None], padding=3, groups=8)[..., :30].mT
    windows, turns = torch.zeros(NUM_SLOTS, 8, 4, device=device), torch.zeros(NUM_SLOTS, dtype=torch.long)
    pending = never_written(NUM_SLOTS, 20, 8, dtype=torch.float32, device=device)
    found, before = [], None
    for chunk in text.split([20, 1, 1, 8], dim=1):
        rows = rows_of(before, (2,), (0 if before is None else before.nodes,), turns.to(device), width=20)
        before = Tree(1, chunk.shape[1], device, chain=True)
        table = conv_table(before.parents, before.depths, 4).to(device)
        found.append(tree_conv(chunk, weight, windows, pending, table, rows))
        out = torch.full(chunk.shape, torch.nan).to(device)
        none = rows.counts * 0  # the call before has committed, unless it ran on a CPU: nothing is pending twice
        launch_tree_conv(chunk, weight, windows, pending, table, rows.slots, rows.path, none, None, False, out)
        close(out, found[-1], 1e-6)
    close(torch.cat(found, dim=1), wanted, 1e-6)


def test_refusals(device: torch.device) -> None:
    tree, turns = Tree(1, 5, device), torch.zeros(NUM_SLOTS, dtype=torch.long, device=device)
    rows, table = rows_of(None, (1,), (0,), turns), conv_table(tree.parents, tree.depths, 4).to(device)
    x, weight = torch.randn(1, 5, 8).to(device), torch.randn(8, 4).to(device)
    windows, pending = torch.zeros(NUM_SLOTS, 8, 3, device=device), torch.zeros(NUM_SLOTS, 5, 8, device=device)
    tree_conv(x, weight, windows, pending, table, rows)
    with pytest.raises(ValueError, match="`activation` is 'gelu'"):
        tree_conv(x, weight, windows, pending, table, rows, activation="gelu")
    with pytest.raises(ValueError, match="4 taps and `windows` keep 2 inputs"):
        tree_conv(x, weight, windows[..., 1:].contiguous(), pending, table, rows)
    with pytest.raises(TypeError, match="`pending` has dtype torch.float16"):
        tree_conv(x, weight, windows, pending.half(), table, rows)
    with pytest.raises(ValueError, match="room for 4 nodes"):
        tree_conv(x, weight, windows, pending[:, 1:].contiguous(), table, rows)
