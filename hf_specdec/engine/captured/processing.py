"""What the logits processors of rows do within a captured step: tokens are hidden, by their ids or their scores."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch

from ...kernels import DTYPES
from ...verification.device_warpers import FOR_EVER, HIDDEN_TOKENS
from ...verification.filters import AFTER, BEFORE
from .rows import HiddenTokens, InFlightRows


if TYPE_CHECKING:
    from ..request import Request

KERNEL_FILTERS = ("top_k", "top_p")
"""Filters that kernels apply."""
MOST_SCORES = 2**24
"""Most scores that filters in plain PyTorch look at in one go: their memory is some times as much in float32."""
_PADDING = 16
"""Columns beside a vocabulary, of which one takes what is not hidden: so many that rows stay aligned."""


def processing_of(requests: Iterable[Request]) -> frozenset[str]:
    """What a captured step of these requests has to do beside temperature, top-k and top-p; see `Warpers.kinds`."""
    warpers = (request.options.device_warpers for request in requests)
    return frozenset().union(*(one.kinds for one in warpers if one is not None))


def filters_by_kernels(requests: Iterable[Request]) -> bool:
    """Whether any of these requests has a filter that kernels apply."""
    warpers = (request.options.device_warpers for request in requests)
    return any(one is not None and not one.values.keys().isdisjoint(KERNEL_FILTERS) for one in warpers)


class Processing:
    """
    The processors of rows, in transformers' order. The logits of tokens that stay are left as they are: what reads the
    result still divides it by the temperature.

    Args:
        values (`dict[str, torch.Tensor]`): by name, values of the warpers to apply, `[batch]` each; see `NONE`.
        hidden (`HiddenTokens`, *optional*): tokens that are hidden by their ids.
        lengths (`torch.Tensor` of shape `[batch]`, int64, *optional*): tokens of every row, root included.
    """

    def __init__(
        self,
        values: dict[str, torch.Tensor],
        hidden: HiddenTokens | None = None,
        lengths: torch.Tensor | None = None,
    ):
        self.values, self._hidden, self._lengths = values, hidden, lengths
        self._has_later = any(name in values for name in AFTER)

    @classmethod
    def of(
        cls, rows: InFlightRows, kinds: Collection[str], by_kernels: Collection[str] = KERNEL_FILTERS
    ) -> Processing:
        """That of a step's rows, with the `kinds` of `Warpers.kinds`, the temperature and some `KERNEL_FILTERS`."""
        values = {name: rows.warpers[name] for name in ("temperature", *by_kernels, *kinds) if name in rows.warpers}
        return cls(values, rows.hidden if HIDDEN_TOKENS in kinds else None, rows.lengths)

    @property
    def temperature(self) -> torch.Tensor | None:
        """The temperature of every row, `[batch]` float32; None for none."""
        return self.values.get("temperature")

    @property
    def filters(self) -> bool:
        """Whether any token may be hidden."""
        return self._hidden is not None or self.values.keys() != {"temperature"} & self.values.keys()

    def for_walk(
        self, logits: torch.Tensor, depths: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        """
        Logits for a walk's kernel, and the warpers that it has to apply itself: as many as it can, since it looks at
        visited nodes alone.
        """
        names = ("temperature",) if self._has_later else ("temperature", *KERNEL_FILTERS)
        found = self(logits, depths) if self._has_later else self._before(logits, depths)
        return found, {name: self.values.get(name) for name in names}

    def __call__(
        self, logits: torch.Tensor, depths: torch.Tensor | None = None, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        """
        Logits `[batch, nodes, vocab]`, with -inf for tokens that the rows' processors hide.

        Args:
            depths (`torch.Tensor` of shape `[1 or batch, nodes]`, int64, *optional*): depths of the nodes, which count
                as tokens of the text. Without them, as for a draft, only tokens that are always hidden are.
            columns (`torch.Tensor` of shape `[target vocab]`, *optional*): columns of the target's tokens in the
                logits, -1 for none; by default the tokens themselves.
        """
        logits = self._before(logits, depths, columns)
        by_kernel = {name: self.values[name] for name in KERNEL_FILTERS if name in self.values}
        if by_kernel:
            from hf_specdec_kernels import filter_logits

            logits = logits if logits.dtype in DTYPES else logits.float()
            logits = filter_logits(logits, temperature=self.temperature, **by_kernel)
        return self._filtered(logits, AFTER) if self._has_later else logits

    def _before(
        self, logits: torch.Tensor, depths: torch.Tensor | None, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The logits after the processors that come before top-k."""
        if self._hidden is not None:
            logits = self._without_hidden(logits, self._hidden, depths, columns)
        return self._filtered(logits, BEFORE) if any(name in self.values for name in BEFORE) else logits

    def _without_hidden(
        self, logits: torch.Tensor, hidden: HiddenTokens, depths: torch.Tensor | None, columns: torch.Tensor | None
    ) -> torch.Tensor:
        vocab, tokens = logits.shape[2], hidden.token
        if columns is not None:
            tokens = columns[tokens.clamp(max=len(columns) - 1)].long()
        if depths is None:
            applies = ((hidden.first == 0) & (hidden.end == FOR_EVER))[:, None].expand(-1, logits.shape[1], -1)
        else:
            assert self._lengths is not None
            texts = (self._lengths[:, None] + depths)[:, :, None]
            applies = (hidden.first[:, None] <= texts) & (texts < hidden.end[:, None])
        is_known = (tokens >= 0) & (tokens < vocab)
        index = torch.where(applies & is_known[:, None], tokens[:, None], vocab)
        return torch.nn.functional.pad(logits, (0, _PADDING)).scatter_(2, index, -torch.inf)[..., :vocab]

    def _filtered(self, logits: torch.Tensor, filters: Collection[str]) -> torch.Tensor:
        """The logits after some filters of `BEFORE` or `AFTER`, of which some nodes are processed at a time."""
        batch, nodes, vocab = logits.shape
        found, step = torch.empty_like(logits), max(1, MOST_SCORES // (batch * vocab))
        for first in range(0, nodes, step):
            part = logits[:, first : first + step]
            scores = self._scores(part)
            for name in filters:
                if name in self.values:
                    value = self.values[name][:, None].expand(scores.shape[:2])
                    scores = scores.masked_fill((BEFORE | AFTER)[name](scores, value), -torch.inf)
            found[:, first : first + step] = part.masked_fill(scores == -torch.inf, -torch.inf)
        return found

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits in float32, after the temperature."""
        return logits.float() if self.temperature is None else logits.float() / self.temperature[:, None, None]
