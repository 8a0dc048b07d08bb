"""Drawing of children from the draft's distribution, on the device."""

from __future__ import annotations

from typing import Any

import torch

from ...drafters.growth import Tempered
from ...kernels import DTYPES
from ...trees import DraftTree
from ...verification import DraftTemperature


MOST_KEPT = 256
"""Number of the draft's best tokens that top-k and top-p filters look at."""
_UNIT = 2**30
"""Factor by which overlaps are scaled to integers for a report."""


class Drawing:
    """
    The distribution q from which children are drawn, and its form for the walk. q is made from the draft's logits as p
    is from the target's, by the same warper values of each row, and sharpened or flattened by one more temperature.

    Args:
        drafter: the drafter that draws; its request holds the size of the target's vocabulary.
        draft_temperature (`torch.Tensor` of shape `[batch]`): the value of the `DraftTemperature` of every row.
        temperature, top_p (`torch.Tensor` of shape `[batch]`, *optional*), top_k (`torch.Tensor` of shape `[batch]`,
            int64, *optional*): values of the target's warpers; 1, 1 and 0 where a row has none. All tensors lie at
            fixed addresses.
    """

    def __init__(
        self,
        drafter: Any,
        draft_temperature: torch.Tensor,
        temperature: torch.Tensor | None = None,
        top_k: torch.Tensor | None = None,
        top_p: torch.Tensor | None = None,
    ):
        from hf_specdec_kernels import draft_columns

        self.draft_temperature = draft_temperature
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p
        self._grid = torch.tensor(DraftTemperature.GRID, device=draft_temperature.device)
        self._vocabulary = getattr(drafter, "target_ids", None)
        self.columns = None
        """Draft column of every target token, for `rejection_walk`; None without a draft vocabulary."""
        if self._vocabulary is not None:
            self.columns = draft_columns(self._vocabulary, drafter.request.vocab_size)

    @property
    def warp(self) -> Tempered:
        """
        What makes the scores of q from a draft's logits `[batch, queries, draft vocab]`. Filters look at the
        `MOST_KEPT` best tokens alone: a larger top-k filters nothing, and top-p keeps no more than these, except ties
        with the last one. (Any q is exact, because the walk knows it; so no level has to sort its whole vocabulary.)
        """
        draft_temperature = self.draft_temperature.float()
        if self._is_filtered:
            # Last, as the host does: else the filters would keep other tokens at every draft temperature.
            return Tempered(draft_temperature, self._filtered)
        if self._temperature is None:
            return Tempered(draft_temperature)
        return Tempered(draft_temperature * self._temperature.float())

    @property
    def _is_filtered(self) -> bool:
        return self._top_k is not None or self._top_p is not None

    def _filtered(self, logits: torch.Tensor) -> torch.Tensor:
        """
        Scores `[batch, queries, draft vocab]`, float32, at the target's temperature, with -inf for tokens that top-k
        or top-p of their row hides.
        """
        scores = logits.float()
        if self._temperature is not None:
            scores = scores / _per_row(self._temperature)
        best = scores.topk(min(MOST_KEPT, scores.shape[-1]), dim=-1).values
        total, hidden = scores.logsumexp(dim=-1, keepdim=True), torch.zeros_like(best, dtype=torch.bool)
        if self._top_k is not None:
            filters = ((self._top_k > 0) & (self._top_k <= best.shape[-1]))[:, None, None]
            hidden = (torch.arange(best.shape[-1], device=best.device) >= self._top_k[:, None, None]) & filters
            total = torch.where(filters, best.masked_fill(hidden, -torch.inf).logsumexp(dim=-1, keepdim=True), total)
        is_filtered = filters if self._top_k is not None else torch.zeros_like(total, dtype=torch.bool)
        if self._top_p is not None:
            chances = (best - total).exp()
            hidden = hidden | (chances.cumsum(dim=-1) - chances >= _per_row(self._top_p))
            is_filtered = is_filtered | (_per_row(self._top_p) < 1.0)
        hidden = hidden & (torch.arange(best.shape[-1], device=best.device) > 0)  # the best stays, with any top-p
        last = best.masked_fill(hidden, torch.inf).amin(dim=-1, keepdim=True)
        return scores.masked_fill((scores < last) & is_filtered, -torch.inf)

    def reported_overlaps(self, logits: torch.Tensor, draft: DraftTree) -> torch.Tensor:
        """
        Overlaps of p and q at the root, from which the host learns the draft_temperature: integers for a report,
        `[batch, temperatures]` int64, see `draft_overlaps`. `logits` are the target's at the root, `[batch, vocab]`;
        of the target's warpers only the temperature is applied.
        """
        from hf_specdec_kernels import draft_overlaps

        scores: Any = draft.scores
        temperature = None if self._temperature is None else self._temperature.float()
        found = draft_overlaps(
            logits if logits.dtype in DTYPES else logits.float(),
            scores[:, 0],
            self._grid,
            temperature=temperature,
            draft_temperature=None if self._is_filtered else temperature,
            vocabulary=self._vocabulary,
        )
        return (found * _UNIT).long()


def _per_row(values: torch.Tensor) -> torch.Tensor:
    return values.float()[:, None, None]


def mean_overlaps(reported: list[list[int]]) -> list[float]:
    """Means over the rows of reported overlaps, one per temperature."""
    return [sum(values) / (len(values) * _UNIT) for values in zip(*reported, strict=True)]
