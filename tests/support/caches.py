"""Comparison of caches."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from hf_specdec.compat import index_keys_of


def assert_same_cache(ours: Cache, plain: Cache, visible: torch.Tensor | None = None, **tolerance: float) -> None:
    """Equal lengths, K/V and keys of indexers in all layers; with `visible` (`[batch, slots]`), only there."""
    assert ours.get_seq_length() == plain.get_seq_length()
    assert len(ours.layers) == len(plain.layers)
    for mine, theirs in zip(ours.layers, plain.layers, strict=True):
        assert type(mine) is type(theirs)
        assert mine.get_seq_length() == theirs.get_seq_length()
        assert mine.get_mask_sizes(3) == theirs.get_mask_sizes(3)
        for held_in in (lambda layer: layer.keys, lambda layer: layer.values, index_keys_of):
            if held_in(theirs) is None:
                assert held_in(mine) is None
                continue
            states = [held_in(layer).transpose(1, 2) for layer in (mine, theirs)]
            assert states[0].shape == states[1].shape
            if visible is not None:
                states = [held[visible[:, visible.shape[1] - held.shape[1] :]] for held in states]
            torch.testing.assert_close(*states, **(tolerance or {"rtol": 0.0, "atol": 0.0}))


def assert_same_states(ours: Any, plain: Any, atol: float = 5e-4) -> None:
    """Equal states, keys and values in all layers, up to rounding, which grows with the sums in a state."""
    assert len(ours.layers) == len(plain.layers)
    num_compared = 0
    for mine, theirs in zip(ours.layers, plain.layers, strict=True):
        assert type(mine) is type(theirs)
        names = ("keys", "values") if hasattr(mine, "keys") else ()
        found = [(getattr(mine, name), getattr(theirs, name)) for name in names]
        for name in ("conv_states", "recurrent_states"):
            pairs = getattr(mine, name, {}).items()
            found += [(one, getattr(theirs, name)[number]) for number, one in pairs if one is not None]
        for one, other in found:
            torch.testing.assert_close(one, other, atol=atol * max(1.0, float(other.abs().max())), rtol=0.0)
        num_compared += len(found)
    assert num_compared  # a layer of experts holds nothing
