"""Ancestor masks packed into bits of int64 words."""

from __future__ import annotations

import torch


NODES_PER_WORD = 64


def pack_ancestors(ancestors: torch.Tensor) -> torch.Tensor:
    """
    Packs an ancestor mask for `tree_attention`.

    Args:
        ancestors (`torch.Tensor` of shape `[rows, queries, nodes]`, bool): whether a query attends to a node.

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
