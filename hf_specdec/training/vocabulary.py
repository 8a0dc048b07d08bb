"""The draft vocabulary: the tokens that an EAGLE-3 head can propose."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def count_tokens(texts: Iterable[tuple[torch.Tensor, torch.Tensor]], vocab_size: int) -> tuple[torch.Tensor, ...]:
    """
    Counts the tokens of texts, under the loss mask and everywhere.

    Args:
        texts: pairs of ids `[tokens]` int64 and loss mask `[tokens]` bool.
        vocab_size (`int`): V.

    Returns:
        Two `torch.Tensor` of shape `[V]`, int64: occurrences of each token under the loss mask, and in all texts.
    """
    masked, everywhere = torch.zeros(2, vocab_size, dtype=torch.long, device="cpu")
    for ids, mask in texts:
        everywhere += torch.bincount(ids, minlength=vocab_size)
        masked += torch.bincount(ids[mask], minlength=vocab_size)
    return masked, everywhere


def choose_vocabulary(
    masked: torch.Tensor, everywhere: torch.Tensor, size: int, always: Iterable[int] = ()
) -> torch.Tensor:
    """
    The `size` most frequent tokens under the loss mask; ties are broken by the count in all texts, then by lower id.

    Args:
        masked, everywhere (`torch.Tensor` of shape `[V]`, int64): see `count_tokens`.
        size (`int`): Vd.
        always (iterable of `int`, *optional*): tokens to include whatever their counts, such as the end token.

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
    # The score sorts by `masked`, then by `everywhere`; a stable sort keeps low ids first.
    score = masked.double() * (everywhere.sum() + 1) + everywhere
    for token in always:
        if 0 <= token < vocab_size:
            score[token] = float("inf")
    order = torch.sort(score, descending=True, stable=True).indices
    return order[:size].sort().values


def offsets(token_ids: torch.Tensor) -> torch.Tensor:
    """`d2t` of published heads, `[Vd]` int64: the target's token id minus the index in the draft vocabulary."""
    return token_ids - torch.arange(len(token_ids), device=token_ids.device)


def draft_indices(token_ids: torch.Tensor | None, vocab_size: int, device: torch.device) -> torch.Tensor | None:
    """Index of every target token in the draft vocabulary, or −1, `[V]` int64; None if `token_ids` is None."""
    if token_ids is None:
        return None
    indices = torch.full((vocab_size,), -1, dtype=torch.long, device=device)
    indices[token_ids.to(device)] = torch.arange(len(token_ids), device=device)
    return indices
