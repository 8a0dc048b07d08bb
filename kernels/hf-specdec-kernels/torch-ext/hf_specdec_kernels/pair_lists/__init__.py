"""Lists of the best tokens after each candidate of the position before, scored by a product of two vectors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._ops import ops, register
from ..checks import check, check_dtype, check_shape
from ..devices import shared_memory_limit
from .naive import pair_lists_naive


__all__ = ["PairLists", "pair_lists", "pair_lists_naive"]

BYTES_OF_KEY = 64
"""Bytes of a token's numbers that are multiplied at once; two such parts of every candidate lie in shared memory."""
_MORE_MEMORY = 4096
"""Bytes of shared memory for all else, at most."""
MOST_CANDIDATES = 1024
"""Candidates of a position that a program holds; of more, plain PyTorch makes the lists."""
MOST_RANKS = 64
"""Most tokens of a list by the kernel."""
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class PairLists(NamedTuple):
    """
    The best tokens after every candidate of the position before, the best first; on the first position, after the
    root. They are what `best_paths` takes.

    Args:
        tokens (`torch.Tensor` of shape `[batch, levels, candidates, ranks]`, int64): the tokens.
        log_q (`torch.Tensor` of the same shape, float32): their log-probabilities.
        following (`torch.Tensor` of the same shape, int64): their places among the candidates of their position: the
            lists of the next one that hold their children.
    """

    tokens: torch.Tensor
    log_q: torch.Tensor
    following: torch.Tensor


def pair_lists(
    tokens: torch.Tensor,
    log_q: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    ranks: int,
    counts_others: bool = False,
) -> PairLists:
    """
    Scores each candidate b of a position after each candidate a of the one before by `log_q[b]` plus the product of
    `queries[a]` and `keys[tokens[b]]`, in float32, and lists the best ones of every a. q is the softmax of the scores.

    One launch on CUDA, with up to 1,024 candidates and lists of up to 64 tokens; no table of all pairs is written.

    Args:
        tokens (`torch.Tensor` of shape `[batch, levels, candidates]`, int64): the candidates of each position.
        log_q (`torch.Tensor` of shape `[batch, levels, candidates]`, float32): their log-probabilities without regard
            to the token before; NaN is listed last.
        queries (`torch.Tensor` of shape `[batch, levels, candidates, rank]`): float32, float16 or bfloat16, for every
            candidate of the position before; on the first position for the root, as often as there are candidates.
        keys (`torch.Tensor` of shape `[vocab, rank]`): of the queries' dtype, for every token.
        ranks (`int`): tokens of a list, at most the number of candidates.
        counts_others (`bool`, *optional*, defaults to `False`): whether what `log_q` leaves to other tokens has its
            share of q, with scores that gain nothing.

    Returns:
        `PairLists`: the lists; of tokens with equal scores any may come first.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    check_shape("log_q", log_q, None, None, None)
    (batch, levels, candidates), device = log_q.shape, log_q.device
    check("log_q", log_q, device, (torch.float32,), *log_q.shape)
    check("tokens", tokens, device, (torch.int64,), *log_q.shape)
    check_dtype("queries", queries, _FLOATS + ((torch.float64,) if device.type == "cpu" else ()))
    check("queries", queries, device, None, batch, levels, candidates, None)
    check("keys", keys, device, (queries.dtype,), None, queries.shape[3])
    if not 0 < ranks <= candidates:
        raise ValueError(f"`ranks` is {ranks}; it must be from 1 to the {candidates} candidates.")
    shape = (*log_q.shape, ranks)
    found = PairLists(tokens.new_empty(shape), log_q.new_empty(shape), tokens.new_empty(shape))
    ops.pair_lists(tokens, log_q, queries, keys, ranks, counts_others, *found)
    return found


def _suits(tokens: torch.Tensor, log_q: torch.Tensor, queries: torch.Tensor, *others: object) -> bool:
    if tokens.shape[2] > MOST_CANDIDATES or others[1] > MOST_RANKS:  # type: ignore[operator]
        return False
    block = 1 << max(tokens.shape[2] - 1, 15).bit_length()
    return 2 * BYTES_OF_KEY * block + _MORE_MEMORY <= shared_memory_limit(tokens.device)


register(pair_lists_naive, results=("named", "scored", "following"), suits=_suits)
