"""Outputs of the frozen target for a batch of texts: features, embeddings, logits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..drafters.heads import BorrowedRows
from ..forwards.features import watch_features
from ..models.structure import num_logits_of
from .vocabulary import draft_indices


@dataclass
class TargetOutputs:
    """
    The frozen target's outputs for a batch, in its dtype.

    Args:
        features (`torch.Tensor` of shape `[batch, tokens, feature_size]`): see `EagleHead.fuse`; of size 0 for
            objectives without features.
        embeddings (`torch.Tensor` of shape `[batch, tokens, H]`): the target's embeddings of the tokens.
        logits (`torch.Tensor` of shape `[batch, tokens, draft vocab]`): row t predicts token t + 1. Of all tokens
            where the reader keeps `all_logits`.
        best (`torch.Tensor` of shape `[batch, tokens]`, int64): index of the target's best token in the draft
            vocabulary, −1 if the draft vocabulary does not have it.
        lm_head (callable): the target's lm_head, or its rows of the draft vocabulary (`BorrowedRows`).
        embed (callable): the target's token embeddings.
    """

    features: torch.Tensor
    embeddings: torch.Tensor
    logits: torch.Tensor
    best: torch.Tensor
    lm_head: Callable[[torch.Tensor], torch.Tensor]
    embed: Callable[[torch.Tensor], torch.Tensor]


class TargetReader:
    """
    Runs a target on batches without gradients, in its own dtype.

    Args:
        target (`PreTrainedModel`): the target, in evaluation mode.
        boundaries (`list[int]`, *optional*): the hidden states that a head reads (see `watch_features`); None for
            objectives without features.
        token_ids (`torch.Tensor` of shape `[draft vocab]`, int64, *optional*): the draft vocabulary.
        packed (`bool`): whether rows hold several texts, separated by positions that restart at 0.
        all_logits (`bool`, *optional*, defaults to `False`): whether logits of tokens outside the draft vocabulary are
            kept, for objectives that ask for their probability.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        boundaries: list[int] | None,
        token_ids: torch.Tensor | None = None,
        packed: bool = False,
        all_logits: bool = False,
    ):
        self.target = target
        self.boundaries = boundaries
        self.packed, self.all_logits = packed, all_logits
        self.token_ids = None if token_ids is None else token_ids.to(target.device)
        vocab_size = num_logits_of(target)
        self._lm_head: Any = target.get_output_embeddings()
        if self.token_ids is not None:
            self._lm_head = BorrowedRows(self._lm_head, target.dtype, self.token_ids)
        self._indices = draft_indices(token_ids, vocab_size, target.device)

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> TargetOutputs:
        """
        One forward of the target.

        Args:
            input_ids (`torch.Tensor` of shape `[batch, tokens]`, int64): tokens, padded on the right, where no token
                of a text sees the padding.
            position_ids (`torch.Tensor` of shape `[batch, tokens]`, int64, *optional*): read only if `packed`.
        """
        target = self.target
        inputs = {"input_ids": input_ids, "use_cache": False}
        if self.packed:
            inputs["position_ids"] = position_ids
        # The target has a dtype of its own already; autocast would only cast its weights again for every batch.
        with torch.autocast(input_ids.device.type, enabled=False):
            with nullcontext() if self.boundaries is None else watch_features(target, self.boundaries) as watched:
                logits = target(**inputs).logits
            if watched is None:
                features = logits.new_empty(*input_ids.shape, 0)
            else:
                features = watched.take(logits.device, logits.dtype)
            embed = target.get_input_embeddings()
            embeddings = embed(input_ids)
        best = logits.argmax(dim=-1)
        if self._indices is not None:
            best = self._indices[best]
            if not self.all_logits:
                logits = logits.index_select(-1, self.token_ids)
        return TargetOutputs(features, embeddings, logits, best, self._lm_head, embed)


@torch.no_grad()
def supports_packing(target: PreTrainedModel) -> bool:
    """
    Whether the target separates the texts of a packed row when their positions restart at 0.

    Models that build their masks with transformers' common functions do; two forwards test this target.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, num_logits_of(target), (1, 24), generator=generator, device="cpu").to(target.device)
    positions = torch.tensor([[*range(11), *range(13)]], device=target.device)
    try:
        together = target(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 11:].float()
    except (TypeError, ValueError):  # takes no positions
        return False
    alone = target(input_ids=ids[:, 11:], use_cache=False).logits.float()
    # Half precision rounds differently for other shapes; a text that sees the previous one differs by far more.
    difference = (together - alone).norm() / (alone - alone.mean(-1, keepdim=True)).norm()
    return bool(difference < (1e-3 if target.dtype in (torch.float32, torch.float64) else 0.05))
