"""Drawing of children from the draft's distribution, on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...drafters.growth import Tempered
from ...kernels import DTYPES
from ...trees import DraftTree
from ...verification import DeviceNoise, DraftTemperature
from .processing import Processing


if TYPE_CHECKING:
    from ...drafters import Drafter

_UNIT = 2**30
"""Factor by which overlaps are scaled to integers for a report."""


class Drawing:
    """
    The distribution q from which children are drawn, and its form for the walk. q is made from the draft's logits as p
    is from the target's, by the same warper values of each row, and sharpened or flattened by one more temperature.

    Args:
        drafter (`Drafter`): the drafter that draws; its request holds the size of the target's vocabulary.
        draft_temperature (`torch.Tensor` of shape `[batch]`, float32): the value of the `DraftTemperature` of every
            row.
        processing (`Processing`): what of the target's processors is done to the draft's logits. All tensors lie at
            fixed addresses.
        noise (`DeviceNoise`, *optional*): of the target's tokens, by which children are drawn; by default they are
            drawn by torch's generator.
    """

    def __init__(
        self,
        drafter: Drafter,
        draft_temperature: torch.Tensor,
        processing: Processing,
        noise: DeviceNoise | None = None,
    ):
        self.draft_temperature = draft_temperature
        self._processing, self._temperature = processing, processing.temperature
        self._grid = torch.tensor(DraftTemperature.GRID, device=draft_temperature.device)
        vocabulary = getattr(drafter, "held_vocabulary", None)
        self._vocabulary = None if vocabulary is None else vocabulary.ids
        self._noise = None if noise is None else replace(noise, token_ids=self._vocabulary)
        self.columns = None if vocabulary is None else vocabulary.columns(drafter.request.vocab_size)
        """Draft column of every target token, for `rejection_walk`; None without a draft vocabulary."""

    @property
    def warp(self) -> Tempered:
        """
        What makes the scores of q from a draft's logits `[batch, queries, draft vocab]`. The draft temperature is left
        out of the filters, as on the host: else they would keep other tokens at every draft temperature.
        """
        temperature = self.draft_temperature
        if self._temperature is not None:
            temperature = temperature * self._temperature
        return Tempered(temperature, self._filtered if self._processing.filters else None, self._noise)

    def _filtered(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits, with -inf for tokens that the processors of their row hide."""
        return self._processing(logits if logits.dtype in DTYPES else logits.float(), columns=self.columns)

    def reported_overlaps(self, logits: torch.Tensor, draft: DraftTree) -> torch.Tensor:
        """
        Overlaps of p and q at the root, from which the host learns the draft_temperature: integers for a report,
        `[batch, temperatures]` int64, see `draft_overlaps`. `logits` are the target's at the root, `[batch, vocab]`;
        of the target's warpers only the temperature is applied.
        """
        from hf_specdec_kernels import draft_overlaps

        assert draft.scores is not None  # children were drawn
        found = draft_overlaps(
            logits if logits.dtype in DTYPES else logits.float(),
            draft.scores[:, 0],
            self._grid,
            temperature=self._temperature,
            draft_temperature=self._temperature,
            vocabulary=self._vocabulary,
        )
        return (found * _UNIT).long()


def mean_overlaps(reported: list[list[int]]) -> list[float]:
    """Means over the rows of reported overlaps, one per temperature."""
    return [sum(values) / (len(values) * _UNIT) for values in zip(*reported, strict=True)]
