"""Children that are drawn on the device from the draft's distribution."""

from __future__ import annotations

from typing import Any

import torch

from ..drafters.growth import score_index
from ..trees import DraftTree, TokenTree
from ..verification.draft_temperature import overlaps


_UNIT = 2**30
"""Parts of one in which a report counts."""


class Drawing:
    """
    What children are drawn from, and how the walk is told.

    Args:
        drafter: draws; its request's warpers make q, beside the temperature.
        tree (`TokenTree`): of every step.
        temperature (`torch.Tensor` of shape `[batch]`): the value of the `DraftTemperature` of every row, at a fixed
            place.
    """

    def __init__(self, drafter: Any, tree: TokenTree, temperature: torch.Tensor):
        from hf_specdec_kernels import draft_columns

        self.temperature, self._warpers = temperature, drafter.request.warpers
        self._vocabulary = getattr(drafter, "target_ids", None)
        self.columns = None
        """For `rejection_walk`, see `draft_columns` there."""
        if self._vocabulary is not None:
            self.columns = draft_columns(self._vocabulary, drafter.request.vocab_size)
        self.index = torch.tensor([score_index(tree)], device=temperature.device)
        """For every node, which of the tree's distributions its children come from, `[1, nodes + 1]` int64."""

    def warp(self, logits: torch.Tensor) -> torch.Tensor:
        """The scores of q for a draft's logits `[batch, queries, draft vocab]`, in float32."""
        scores = logits.reshape(-1, logits.shape[-1]).to(torch.float32, copy=True)
        return self._warpers(None, scores).view(logits.shape) / self._values

    @property
    def _values(self) -> torch.Tensor:
        return self.temperature.float()[:, None, None]

    def reported_overlaps(
        self, logits: torch.Tensor, temperature: torch.Tensor | None, draft: DraftTree
    ) -> torch.Tensor:
        """
        What the host is to learn the temperature from, as integers for a report, `[batch, temperatures]` int64.

        Args:
            logits (`torch.Tensor` of shape `[batch, vocab]`): the target's, at the root.
            temperature (`torch.Tensor` of shape `[batch]`, *optional*): the target's; no other warper is looked at.
        """
        return (self._overlaps(logits, temperature, draft) * _UNIT).long()

    def _overlaps(self, logits: torch.Tensor, temperature: torch.Tensor | None, draft: DraftTree) -> torch.Tensor:
        """See `overlaps`, `[batch, temperatures]`."""
        scores: Any = draft.scores
        scaled = logits.float() if temperature is None else logits.float() / temperature.float()[:, None]
        p = scaled.softmax(dim=-1)
        return overlaps(p if self._vocabulary is None else p[:, self._vocabulary], scores[:, 0] * self._values[:, 0])


def mean_overlaps(reported: list[list[int]]) -> list[float]:
    """The means over rows of what was reported."""
    return [sum(values) / (len(values) * _UNIT) for values in zip(*reported, strict=True)]
