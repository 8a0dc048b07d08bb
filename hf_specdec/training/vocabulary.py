"""The draft vocabulary: the tokens that an EAGLE-3 head can propose."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def count_tokens(texts: Iterable[tuple[torch.Tensor, torch.Tensor]], vocab_size: int) -> tuple[torch.Tensor, ...]:
    """
    Args:
        texts: pairs of ids `[tokens]` int64 and loss mask `[tokens]` bool.
        vocab_size (`int`): V.

    Returns:
        Two `torch.Tensor` of shape `[V]`, int64: how often each token comes under the loss mask, and at all.
    """
    masked, everywhere = torch.zeros(2, vocab_size, dtype=torch.long)
    for ids, mask in texts:
        everywhere += torch.bincount(ids, minlength=vocab_size)
        masked += torch.bincount(ids[mask], minlength=vocab_size)
    return masked, everywhere


def choose_vocabulary(
    masked: torch.Tensor, everywhere: torch.Tensor, size: int, always: Iterable[int] = ()
) -> torch.Tensor:
    """
    The `size` most frequent tokens under the loss mask; where there are too few, the most frequent of all texts, then
    the lowest ids.

    Args:
        masked, everywhere (`torch.Tensor` of shape `[V]`, int64): see `count_tokens`.
        size (`int`): Vd.
        always (iterable of `int`, *optional*): tokens to take in any case, such as the end token.

    Returns:
        `torch.Tensor` of shape `[Vd]`, int64: the target's ids, ascending.

    Raises:
        ValueError: if `size` is not between 1 and V.

    ```python
    >>> import torch
    >>> from hf_specdec.training.vocabulary import choose_vocabulary

    >>> counts = torch.tensor([0, 5, 1, 9])
    >>> choose_vocabulary(counts, counts, 2)
    tensor([1, 3])

    ```
    """
    vocab_size = len(masked)
    if not 1 <= size <= vocab_size:
        raise ValueError(
            f"`draft_vocab_size`={size}: the target's vocabulary has {vocab_size} tokens. Choose 1 … {vocab_size}."
        )
    # One number that sorts by the first count, then the second; a stable sort keeps low ids first.
    score = masked.double() * (everywhere.sum() + 1) + everywhere
    for token in always:
        if 0 <= token < vocab_size:
            score[token] = float("inf")
    order = torch.sort(score, descending=True, stable=True).indices
    return order[:size].sort().values


def offsets(token_ids: torch.Tensor) -> torch.Tensor:
    """`d2t` of published heads, `[Vd]` int64: what is added to a draft token's index to have the target's id."""
    return token_ids - torch.arange(len(token_ids))


def draft_indices(token_ids: torch.Tensor | None, vocab_size: int, device: torch.device) -> torch.Tensor | None:
    """
    The way back: for every token of the target its index among the draft's, −1 where it has none, `[V]` int64; None
    if the draft has all tokens.
    """
    if token_ids is None:
        return None
    indices = torch.full((vocab_size,), -1, dtype=torch.long, device=device)
    indices[token_ids.to(device)] = torch.arange(len(token_ids), device=device)
    return indices
