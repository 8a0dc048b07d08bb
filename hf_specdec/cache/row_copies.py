"""Copying between a row of a `TreeCache` and the blocks of a request in flight."""

from __future__ import annotations

from .paged_cache import PagedCache
from .tree_cache import TreeCache


def copy_start(source: PagedCache | TreeCache, length: int, target: TreeCache) -> None:
    """Copies the first `length` slots of the only row of `source` into `target`, an empty cache of one row."""
    for held, layer in zip(source.layers, target.layers, strict=False):
        if held.is_initialized:
            keys, values = held.read(0, length)
            layer.lazy_initialization(keys, values)
            layer.keys[:, :, :length], layer.values[:, :, :length] = keys, values
            layer.filled = length
    target.set_lengths([length])


def copy_row(source: TreeCache, row: int, first: int, target: PagedCache, num_held: int = 0) -> None:
    """
    Copies a row of `source`, from slot `first` on, into the blocks and states of the only request that is seated in
    `target`, and already has the first `num_held` of these slots.
    """
    end = source.lengths[row]
    length, first = end - first, first + num_held
    target.set_lengths([num_held])
    target.write_nodes(0, end - first)
    window = target.write_window
    assert window is not None
    for layer, held in zip(source.layers, target.layers, strict=False):
        if not layer.is_initialized:
            continue
        if not held.is_initialized:
            held.lazy_initialization(layer.keys, layer.values)
        if layer.index_keys is not None:
            held.hold_index(layer.index_keys)
        if layer.positions is not None:
            target.prompt_positions[target.tables[0]] = layer.positions[:, row, first:]
        blocks, offsets = window.blocks.to(held.device), window.offsets.to(held.device)
        for own, states in zip(held.states, layer.states, strict=True):
            own[blocks, :, offsets] = states[row : row + 1, :, first:end].transpose(1, 2)
    if target.state_layers:
        slot = target.slots_of_rows()[0]
        for states_of, held_by in zip(source.state_layers, target.state_layers, strict=True):
            held_by.take_row(slot, states_of, row)
    target.set_lengths([length])
