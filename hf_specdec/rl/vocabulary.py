"""The draft vocabulary of a head that learns: tokens that the policy writes take the places of others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..eagle import EagleHead


KEPT = 0.8
"""What is left of a token's count after every call."""
LEAST = 2.0
"""Count from which a token takes a place: what was drawn once may not come again."""
MOST_ROWS = 8192
"""Rows of an lm_head that its relation to the target's is read from."""


class VocabularyInUse:
    """
    How often a policy has lately written each token, by which a head's draft vocabulary follows it. A token that the
    head cannot propose is rejected at every place where the policy writes it, however well the head has learnt.

    Args:
        vocab_size (`int`): size of the policy's vocabulary.
    """

    def __init__(self, vocab_size: int):
        self.counts = torch.zeros(vocab_size, device="cpu")

    def count(self, texts: Iterable[list[int]]) -> None:
        """Takes up what was written in a call; what was written before counts less."""
        self.counts *= KEPT
        for tokens in texts:
            found = torch.bincount(torch.tensor(tokens, dtype=torch.long, device="cpu"), minlength=len(self.counts))
            self.counts += found[: len(self.counts)]

    def exchange(self, ids: torch.Tensor, always: Iterable[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Which places of a draft vocabulary get another token: the most frequent ones that it lacks take the places of
        the rarest that it has, as long as they are at least twice as frequent; of equally rare ones the token of the
        highest number goes first, as tokenizers number frequent tokens first.

        Args:
            ids (`torch.Tensor` of shape `[draft vocab]`, int64): the draft vocabulary, on the CPU.
            always (iterable of `int`): tokens that stay, such as the end token.

        Returns:
            Two `torch.Tensor` of one length, int64: places in the draft vocabulary, and their new tokens.
        """
        missing = self.counts.clone()
        missing[ids] = 0.0
        wanted = torch.sort(missing, descending=True, stable=True).indices[: int((missing >= LEAST).sum())]
        own = self.counts[ids]
        own[torch.isin(ids, torch.tensor(list(always), dtype=torch.long, device="cpu"))] = torch.inf
        by_number = torch.sort(ids, descending=True).indices
        places = by_number[torch.sort(own[by_number], stable=True).indices][: len(wanted)]
        wanted = wanted[: len(places)]
        is_better = missing[wanted] >= 2 * own[places]  # falls from true to false: one side sinks, the other rises
        return places[is_better], wanted[is_better]


@torch.no_grad()
def give_places(head: EagleHead, target: PreTrainedModel, places: torch.Tensor, tokens: torch.Tensor) -> bool:
    """
    Writes tokens into places of a head's draft vocabulary and lm_head, in place. Their rows begin as what the head's
    own rows are of the target's, by the linear map that fits best.

    Args:
        head (`EagleHead`): a head with a draft vocabulary and an lm_head of its own.
        target (`PreTrainedModel`): its target.
        places, tokens (`torch.Tensor` of one length, int64): as `VocabularyInUse.exchange` returns them.

    Returns:
        `bool`: False if the target's rows are not finite, and nothing was written.
    """
    ids, lm_head = head.target_ids, head.lm_head
    assert ids is not None and head.d2t is not None and lm_head is not None
    places, tokens = places.to(ids.device), tokens.to(ids.device)
    rows = _rows_for(lm_head.weight, target.get_output_embeddings(), ids, tokens)
    if not rows.isfinite().all():
        return False
    lm_head.weight[places] = rows
    head.d2t[places] = tokens - places
    return True


def _rows_for(rows: torch.Tensor, module: Any, ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Rows of a head's lm_head for other tokens, `[tokens, H]`; the mean row where the target's cannot be read."""
    weight: Any = getattr(module, "weight", None)
    is_plain = isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.device.type != "meta"
    if type(module) is not nn.Linear or not is_plain or getattr(module, "_hf_hook", None) is not None:
        return rows.mean(dim=0).expand(len(tokens), -1)
    some = slice(0, None, -(-len(ids) // MOST_ROWS))
    known = weight[ids[some].to(weight.device)].to(rows.device, torch.float32)
    mean, own_mean = known.mean(dim=0), rows[some].float().mean(dim=0)
    known = known - mean
    products = known.T @ known
    products.diagonal().add_(0.1 * products.diagonal().mean())
    mapping, _ = torch.linalg.solve_ex(products, known.T @ (rows[some].float() - own_mean))
    new = weight[tokens.to(weight.device)].to(rows.device, torch.float32) - mean
    return (new @ mapping + own_mean).to(rows.dtype)


def end_tokens_of(target: PreTrainedModel) -> list[int]:
    """The tokens that end a policy's texts."""
    ends = getattr(target.generation_config, "eos_token_id", None)
    return list(ends) if isinstance(ends, list | tuple) else [] if ends is None else [ends]


def forget(optimizer: torch.optim.Optimizer, weight: torch.Tensor, places: torch.Tensor) -> None:
    """Lets an optimizer begin anew with some rows of a weight."""
    for value in optimizer.state.get(weight, {}).values():
        if isinstance(value, torch.Tensor) and value.shape == weight.shape:
            value[places.to(value.device)] = 0.0
