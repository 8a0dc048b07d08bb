"""The tokens that a draft proposes as children of each node of a level: its best ones, or ones drawn by a noise."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._ops import ops, register
from ..checks import check, check_dtype, check_shape
from .naive import draft_tokens_naive, draw_children_naive
from .noise import exponential_noise_naive


__all__ = [
    "Children",
    "draft_tokens",
    "draft_tokens_naive",
    "draw_children",
    "draw_children_naive",
    "exponential_noise",
    "exponential_noise_naive",
]

LARGEST_COUNT = 64
MOST_CHILDREN = 1024


class Children(NamedTuple):
    """
    Drawn children of the nodes of a level.

    Args:
        tokens (`torch.Tensor` of shape `[batch, queries, count]`, int64): in the order of the draws; 0 after the last
            possible token, and everywhere if the logits have NaN, +inf or nothing but -inf.
        log_probabilities (`torch.Tensor` of shape `[batch, queries, count]`, float32): log q of these tokens; -inf
            where there is none.
        best (`torch.Tensor` of shape `[batch, queries, count]`, float32, *optional*): log q of the best tokens, the
            best first.
    """

    tokens: torch.Tensor
    log_probabilities: torch.Tensor
    best: torch.Tensor | None


def draft_tokens(
    logits: torch.Tensor,
    count: int,
    *,
    temperature: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The `count` best tokens of q, the softmax of a draft's logits.

    On CUDA nothing is sorted, no tensor as large as the logits is written, nothing is read on the host, and the launch
    depends on shapes only.

    Args:
        logits (`torch.Tensor` of shape `[batch, queries, vocab]`): the draft's logits, float32, float16 or bfloat16,
            -inf outside the support. The last stride is 1.
        count (`int`): number of tokens per query, at most 64.
        temperature (`torch.Tensor` of shape `[batch]`, float32, *optional*): positive divisor of the logits.
        out (`tuple`, *optional*): contiguous tensors for the two results.

    Returns:
        `tuple`: tokens `[batch, queries, count]` int64, the best first, the lowest id first among equals, -1 after the
        last possible token; and their log-probabilities under q, `[batch, queries, count]` float32, -inf after the
        last possible token. There is none where the logits have NaN, +inf or nothing but -inf.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    _check(logits, count, LARGEST_COUNT, temperature)
    shape = (*logits.shape[:2], count)
    if out is None:
        out = logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)
    for name, tensor, dtype in (("out[0]", out[0], torch.int64), ("out[1]", out[1], torch.float32)):
        check(name, tensor, logits.device, (dtype,), *shape)
        if not tensor.is_contiguous():
            raise ValueError(f"`{name}` has strides {tensor.stride()}; it must be contiguous.")
    ops.draft_tokens(logits, count, temperature, *out)
    return out


def draw_children(
    logits: torch.Tensor,
    count: int,
    seeds: torch.Tensor,
    *,
    first_query: int = 0,
    positions: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    with_best: bool = False,
) -> Children:
    """
    Draws `count` tokens from q, the softmax of a draft's logits, without replacement: the largest sums of log q and
    Gumbel noise, in this order (Gumbel-top-k, arXiv 1903.06059). `rejection_walk`, given the same logits and the same
    temperature as `draft_temperature`, tests them by the q from which they were drawn.

    The noise is computed where it is needed, from a seed, the number of the query and the token; see
    `exponential_noise`. Launches are as those of `draft_tokens`.

    Args:
        logits, temperature: see `draft_tokens`.
        count (`int`): number of tokens per query, at most 1,024.
        seeds (`torch.Tensor` of shape `[batch]`, int64): random numbers, drawn anew for every tree, as by
            `torch.empty(batch, dtype=torch.int64).random_()`.
        first_query (`int`): number of the first query. With the same seeds, no two queries may have the same number.
        positions (`torch.Tensor` of shape `[batch, 1 or queries]`, int64, *optional*): in [0, 2³²), the number of
            every query, in place of those from `first_query` on. Queries with the same number and seed draw by the
            same noise: with the position in the text as the number, and the target's token drawn by the noise of its
            position, the text depends on the seed alone. (Two nodes of one path must not have the same number.)
        token_ids (`torch.Tensor` of shape `[vocab]`, int64, *optional*): the token whose noise a column of the logits
            has, as for a draft's vocabulary that is a part of the target's; by default its own number.
        with_best (`bool`): whether log q of the best tokens are wanted, too.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    _check(logits, count, MOST_CHILDREN, temperature)
    batch, queries, _ = logits.shape
    check("seeds", seeds, logits.device, (torch.int64,), batch)
    tokens = logits.new_empty((batch, queries, count), dtype=torch.int64)
    found = Children(
        tokens,
        torch.empty_like(tokens, dtype=torch.float32),
        torch.empty_like(tokens, dtype=torch.float32) if with_best else None,
    )
    check("positions", positions, logits.device, (torch.int64,), batch, (1, queries))
    check("token_ids", token_ids, logits.device, (torch.int64,), logits.shape[2])
    ops.draw_children(logits, count, seeds, first_query, temperature, positions, token_ids, *found)
    return found


def exponential_noise(seeds: torch.Tensor, numbers: torch.Tensor, vocab: int) -> torch.Tensor:
    """
    Exponential random numbers, -log of which is Gumbel noise: those by which `draw_children` draws. The number of
    token t at query i comes from the row's seed and Philox's counter (⌊t / 4⌋, `numbers[:, i]`, 0, 0), of whose four
    numbers it takes number t mod 4, and depends on nothing else.

    Args:
        seeds (`torch.Tensor` of shape `[batch]`, int64): seed of every row.
        numbers (`torch.Tensor` of shape `[batch, queries]`, int64): in [0, 2³²).
        vocab (`int`): number of tokens.

    Returns:
        `torch.Tensor`: `[batch, queries, vocab]` float32, all positive.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    check("seeds", seeds, seeds.device, (torch.int64,), None)
    check("numbers", numbers, seeds.device, (torch.int64,), len(seeds), None)
    if vocab < 1:
        raise ValueError(f"`vocab` is {vocab}; there must be one token at least.")
    noise = torch.empty(*numbers.shape, vocab, dtype=torch.float32, device=seeds.device)
    ops.exponential_noise(seeds, numbers, vocab, noise)
    return noise


def _check(logits: torch.Tensor, count: int, most: int, temperature: torch.Tensor | None) -> None:
    check_shape("logits", logits, None, None, None)
    check_dtype("logits", logits, (torch.bfloat16, torch.float16, torch.float32))
    batch, _, vocab = logits.shape
    if not 0 < count <= min(most, vocab):
        raise ValueError(f"`count` is {count}; it must be from 1 to {min(most, vocab)}.")
    if vocab > 1 and logits.stride(2) != 1:
        raise ValueError(f"`logits` has strides {logits.stride()}; the last must be 1: pass `logits.contiguous()`.")
    check("temperature", temperature, logits.device, (torch.float32,), batch)


register(draft_tokens_naive, results=("tokens", "log_probabilities"))
register(draw_children_naive, results=("tokens", "log_probabilities", "best"), optional=("best",))
register(exponential_noise_naive, results=("noise",))
