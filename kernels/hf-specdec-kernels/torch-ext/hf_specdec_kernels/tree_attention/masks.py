"""Ancestor masks as bits."""

from __future__ import annotations

import torch


NODES_PER_WORD = 64


def pack_ancestors(ancestors: torch.Tensor) -> torch.Tensor:
    """
    The mask that `tree_attention` takes.

    Args:
        ancestors (`torch.Tensor` of shape `[rows, queries, nodes]`, bool): which nodes each query attends to.

    Returns:
        `torch.Tensor`: `[rows, queries, ceil(nodes / 64)]` int64; bit j % 64 of word j // 64 is node j.
    """
    rows, queries, nodes = ancestors.shape
    words = -(-nodes // NODES_PER_WORD)
    padded = torch.nn.functional.pad(ancestors, (0, words * NODES_PER_WORD - nodes))
    places = torch.arange(NODES_PER_WORD, device=ancestors.device)
    bits = padded.view(rows, queries, words, NODES_PER_WORD).long() << places
    return bits.sum(dim=-1)  # the bits are disjoint, so that the sum has no carry


def unpack_ancestors(words: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """The inverse of `pack_ancestors`: `[rows, queries, num_nodes]` bool."""
    places = torch.arange(NODES_PER_WORD, device=words.device)
    return ((words[..., None] >> places) & 1).flatten(2)[..., :num_nodes].bool()
