"""The objectives of heads that draft blocks: DFlash's (arXiv 2602.06036) and DSpark's (deepseek-ai/DeepSpec)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..block import BlockHead
from ..block.anchored import blocks_after
from ..eagle.unroll import upcast
from ..kernels import DTYPES, kernels_are_installed
from ..whole_texts import check_trainable
from .loss_weights import WEIGHTS, LossWeights
from .losses import masked_mean
from .metrics import counts_by_depth
from .reading import TargetOutputs
from .vocabulary import draft_indices


_LOGITS_AT_ONCE = 2**27
"""Logits of one part: some ten tensors of as many float32 values are held at a time."""
_SHARE_OF_MEMORY = 32
"""Where a kernel computes the losses, the logits of one part take at most a GPU's memory divided by this; some four
tensors of their size are held at a time."""
_LEAST = 1e-6  # of the sum of weights: a batch without predictions has no loss


class BlockObjective(nn.Module):
    """
    The loss of the blocks after random anchors of every text, in which prediction k weighs exp(−(k − 1) / gamma).

    An anchor is a token after which a token is to be predicted; blocks see the features of the tokens before their
    anchor, and a Markov head is given the text's tokens. A prediction counts if its token and all from the anchor on
    are under the loss mask. In evaluation the anchors are always the same.

    Args:
        head (`BlockHead`): a DFlash (or JetSpec) or DSpark head. Its token embeddings and lm_head, if it has any, are
            frozen.
        weights (`LossWeights`, *optional*): defaults to those of the head's kind, see `WEIGHTS`. A
            confidence head without a weight is frozen.
        num_anchors (`int`, *optional*, defaults to 512): anchors of a row of texts, at most.
        gamma (`float`, *optional*): defaults to `default_gamma`.

    Raises:
        ValueError: for heads that `check_trainable` refuses, or whose kind is not trained.
    """

    def __init__(
        self,
        head: BlockHead,
        weights: LossWeights | None = None,
        num_anchors: int = 512,
        gamma: float | None = None,
    ):
        super().__init__()
        config = head.config
        if config.kind not in ("dflash", "dspark"):
            raise ValueError(f"`head` is of kind {config.kind!r}; 'dflash' and 'dspark' are trained.")
        check_trainable(head)
        for shared in (head.embed_tokens, head.lm_head):
            if shared is not None:
                shared.requires_grad_(False)
        self.model = head
        self.weights = weights or WEIGHTS[config.kind]
        if head.confidence_head is not None and not self.weights.confidence:
            head.confidence_head.requires_grad_(False)
        self.num_anchors = num_anchors
        self.gamma = default_gamma(config.block_size) if gamma is None else gamma

    def forward(
        self,
        outputs: TargetOutputs,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        position_ids: torch.Tensor,
        segment_ids: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """
        Loss and counts of a batch.

        Args:
            outputs (`TargetOutputs`): the target's outputs for the batch, with all logits.
            input_ids, position_ids, segment_ids (`torch.Tensor` of shape `[batch, tokens]`, int64): see `Collator`.
            loss_mask (`torch.Tensor` of shape `[batch, tokens]`, bool): tokens to be predicted.

        Returns:
            `dict`: `loss`, a scalar, and `counts`, `[batch, 4, drafts]` float32, see `counts_by_depth`.
        """
        head, depths = self.model, torch.arange(self.model.num_drafts, device=input_ids.device)
        anchors, is_anchor = self._anchors(loss_mask, segment_ids)
        states = blocks_after(
            head,
            outputs.features,
            input_ids,
            anchors,
            outputs.embed,
            position_ids=position_ids,
            segment_ids=segment_ids,
        )[:, :, head.first_row :]
        before = anchors[..., None] + depths  # places of the tokens before the predicted ones
        mask = is_anchor[..., None] & (before + 1 < input_ids.shape[1])
        before = before.clamp(max=input_ids.shape[1] - 2)
        mask = mask & _at(loss_mask, before + 1)
        if segment_ids is not None:
            mask = mask & (_at(segment_ids, before + 1) == segment_ids.gather(1, anchors)[..., None])
        mask = mask.cumprod(dim=-1).bool()
        parts = self._losses(outputs, states, _at(input_ids, before), _at(input_ids, before + 1), before)
        cross_entropy, divergence, distance, confidence, predicted, has_token = (part.view_as(mask) for part in parts)
        has_token = mask & has_token
        by_depth = torch.exp(-depths.to(cross_entropy.dtype) / self.gamma)
        loss = self.weights.cross_entropy * masked_mean(cross_entropy, has_token * by_depth, least=_LEAST)
        for name, values in (("divergence", divergence), ("distance", distance), ("confidence", confidence)):
            if weight := getattr(self.weights, name):
                loss = loss + weight * masked_mean(values, mask * by_depth, least=_LEAST)
        right = (predicted == _at(outputs.best, before)) & mask
        columns = (right, mask, cross_entropy * has_token, has_token)
        return {"loss": loss, "counts": counts_by_depth(zip(*(column.unbind(-1) for column in columns), strict=True))}

    def _anchors(self, loss_mask: torch.Tensor, segment_ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Places of anchors `[batch, anchors]`, ascending, and whether each is one: a row has fewer where fewer tokens
        are to be predicted. The first token of a text is none, since it has no context.
        """
        can_be = loss_mask[:, 1:].clone()
        can_be[:, :1] = False
        if segment_ids is not None:
            can_be &= segment_ids[:, 1:] == segment_ids[:, :-1]
            can_be[:, 1:] &= segment_ids[:, 1:-1] == segment_ids[:, :-2]
        if self.training:
            order = torch.rand(can_be.shape, device=can_be.device)
        else:
            order = torch.rand(can_be.shape[1], generator=torch.Generator().manual_seed(0), device="cpu")
            order = order.to(can_be.device).expand_as(can_be)
        order, places = torch.where(can_be, order, -1.0).topk(min(self.num_anchors, can_be.shape[1]))
        places = torch.where(order >= 0, places, can_be.shape[1]).sort(dim=-1).values
        is_anchor = places < can_be.shape[1]
        return torch.where(is_anchor, places, 0), is_anchor

    def _losses(
        self,
        outputs: TargetOutputs,
        states: torch.Tensor,
        parents: torch.Tensor,
        wanted: torch.Tensor,
        places: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """
        What `_part` returns for all predictions, a part at a time; if there are several parts, logits are computed
        again in the backward pass.

        Args:
            states (`torch.Tensor` of shape `[batch, anchors, drafts, H]`): states of the predicting rows.
            parents, wanted, places (`torch.Tensor` of shape `[batch, anchors, drafts]`, int64): the tokens before, the
                text's tokens, and the rows of the target that predict the same.
        """
        head, (batch, _, drafts, _) = self.model, states.shape
        indices = draft_indices(head.target_ids, head.config.vocab_size, states.device)
        wanted = wanted if indices is None else indices[wanted]
        rows = torch.arange(batch, device=places.device)[:, None, None] * outputs.logits.shape[1] + places
        at_once = max(1, _logits_at_once(outputs.logits) // (drafts * outputs.logits.shape[-1]))
        columns = (of.flatten(0, 1).split(at_once) for of in (states, parents, wanted, rows))
        parts = list(zip(*columns, strict=True))
        found = []
        for part in parts:
            if torch.is_grad_enabled() and len(parts) > 1:
                found.append(checkpoint(self._part, outputs, *part, use_reentrant=False))
            else:
                found.append(self._part(outputs, *part))
        return tuple(map(torch.cat, zip(*found, strict=True)))

    def _part(
        self,
        outputs: TargetOutputs,
        states: torch.Tensor,
        parents: torch.Tensor,
        wanted: torch.Tensor,
        rows: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """
        Cross-entropy, divergence, distance and confidence loss of predictions, the head's best token, and whether the
        head can propose the text's token: `[anchors, drafts]` each.
        """
        head = self.model
        logits = conditioned_logits(head, states, parents, outputs.lm_head)
        losses = _by_kernel if _suits_the_kernel(logits) else _by_formula
        *values, best = losses(logits, outputs.logits, rows, wanted, head.target_ids)
        confidence = torch.zeros_like(values[0])
        if self.weights.confidence and head.confidence_head is not None:
            estimate: Any = head.confidence_logits(states, parents)
            accepted = (1 - values[-1].detach() / 2).clamp(0, 1)
            confidence = F.binary_cross_entropy_with_logits(upcast(estimate), accepted, reduction="none")
        return *values, confidence, best, wanted >= 0


def _suits_the_kernel(logits: torch.Tensor) -> bool:
    return logits.is_cuda and logits.dtype in DTYPES and kernels_are_installed()


def _logits_at_once(logits: torch.Tensor) -> int:
    """Logits of one part."""
    if not (_suits_the_kernel(logits) and logits.is_cuda):
        return _LOGITS_AT_ONCE
    memory = torch.cuda.get_device_properties(logits.device).total_memory
    return memory // (_SHARE_OF_MEMORY * logits.element_size())


def _by_kernel(
    draft_logits: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    wanted: torch.Tensor,
    target_ids: torch.Tensor | None,
) -> list[torch.Tensor]:
    """See `_by_formula`."""
    from hf_specdec_kernels import draft_losses

    found = draft_losses(
        draft_logits.flatten(0, 1), logits.flatten(0, 1), rows.flatten(), wanted.flatten(), target_ids
    )
    return [part.view_as(rows) for part in found]


def _by_formula(
    draft_logits: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    wanted: torch.Tensor,
    target_ids: torch.Tensor | None,
) -> list[torch.Tensor]:
    """
    Cross-entropy, divergence, distance and best token of predictions, `[anchors, drafts]` each; see
    `hf_specdec_kernels.draft_losses`.

    Args:
        draft_logits (`torch.Tensor` of shape `[anchors, drafts, draft vocab]`): the head's logits.
        logits (`torch.Tensor` of shape `[batch, tokens, V]`): the target's.
        rows, wanted (`torch.Tensor` of shape `[anchors, drafts]`, int64): the rows of the target that predict the
            same, counted through the batch, and the text's tokens.
        target_ids (`torch.Tensor` of shape `[draft vocab]`, int64, *optional*): the draft vocabulary.
    """
    scores = upcast(draft_logits)
    log_q = scores.log_softmax(dim=-1)
    cross_entropy = -log_q.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    p = upcast(logits.flatten(0, 1)[rows]).softmax(dim=-1).to(log_q.dtype)
    outside: Any = 0.0
    if target_ids is not None:
        p = p.index_select(-1, target_ids)
        outside = 1 - p.sum(dim=-1)  # where q is 0
    distance = (p - log_q.exp()).abs().sum(dim=-1) + outside
    return [cross_entropy, -(p * log_q).sum(dim=-1), distance, scores.detach().argmax(dim=-1)]


def conditioned_logits(head: BlockHead, states: torch.Tensor, parents: torch.Tensor, lm_head: Any) -> torch.Tensor:
    """
    The logits of the predictions of blocks `[blocks, drafts, draft vocab]`, given the tokens before.

    Args:
        states (`torch.Tensor` of shape `[blocks, drafts, H]`): states of the predicting rows.
        parents (`torch.Tensor` of shape `[blocks, drafts]`, int64): the tokens before, the first the anchor.
        lm_head (callable): the target's lm_head, for heads without one.
    """
    base = head.compute_logits(states, lm_head)
    if head.config.markov_type != "rnn":
        return head.conditional_logits(base, states, parents)[0]
    carried, found = None, []
    for one in (slice(depth, depth + 1) for depth in range(states.shape[1])):
        logits, carried = head.conditional_logits(base[:, one], states[:, one], parents[:, one], carried)
        found.append(logits)
    return torch.cat(found, dim=1)


def default_gamma(block_size: int) -> float:
    """
    How slowly the weights of a block's predictions fall: 4 for blocks of 7 and 8 rows and 7 for 16, as published heads
    were trained (DeepSpec, z-lab/dflash), and in proportion between and beyond.

    ```python
    >>> from hf_specdec.training.blocks import default_gamma

    >>> [default_gamma(size) for size in (7, 8, 12, 16)]
    [4.0, 4.0, 5.5, 7.0]

    ```
    """
    if block_size < 7:
        return 4 * block_size / 7
    return 4 + 3 * max(block_size - 8, 0) / 8


def _at(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`values[batch, places]` for values `[batch, tokens]` and places `[batch, anchors, drafts]`."""
    return values.gather(1, places.flatten(1)).view_as(places)
