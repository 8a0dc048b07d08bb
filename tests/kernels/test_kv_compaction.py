"""The kernels' compaction against `TreeCache.keep`."""

from __future__ import annotations

import pytest
import torch

import hf_specdec_kernels
from hf_specdec.cache import TreeCache


@pytest.mark.parametrize("paths", [[[2, 3, 7]], [[1, 2], None, [3, 5, 6, 8], []]], ids=["one row", "several"])
def test_against_the_cache(paths: list[list[int] | None]) -> None:
    batch, layers, nodes = len(paths), 3, 9
    lengths = [5 + 2 * row for row in range(batch)]
    cache = TreeCache(layers, batch, torch.device("cpu"), capacity=40)
    for layer in cache.layers:
        layer.update(torch.randn(batch, 2, max(lengths), 4), torch.randn(batch, 2, max(lengths), 4))
    cache.set_lengths(lengths)
    cache.write_nodes(0, nodes)
    for layer in cache.layers:
        layer.update(torch.randn(batch, 2, nodes, 4), torch.randn(batch, 2, nodes, 4))
    states = [states.clone() for layer in cache.layers for states in (layer.keys, layer.values)]

    cache.keep(paths)
    depth = max(len(path) for path in paths if path is not None)
    accepted = torch.tensor([-1 if path is None else len(path) for path in paths])
    table = [[0, *(path or [])] for path in paths]
    padded = torch.tensor([row + list(range(len(row), depth + 1)) for row in table])
    pointers = hf_specdec_kernels.pointer_table(states)
    hf_specdec_kernels.kv_compaction(states, pointers, torch.tensor(lengths), padded, accepted)

    kept = [states for layer in cache.layers for states in (layer.keys, layer.values)]
    assert cache.lengths == [length + count + 1 for length, count in zip(lengths, accepted.tolist(), strict=True)]
    for ours, theirs in zip(states, kept, strict=True):
        for row, length in enumerate(cache.lengths):
            assert torch.equal(ours[row, :, :length], theirs[row, :, :length])
