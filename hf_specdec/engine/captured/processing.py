"""What the logits processors of rows do within a captured step, apart from what the walks' kernels do themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...kernels import DTYPES
from ...trees import Topology
from ...verification.device_warpers import FOR_EVER, HIDDEN_TOKENS, PENALTIES
from ...verification.filters import AFTER, BEFORE
from ...verification.penalties import lowered, repeated
from .rows import HiddenTokens, InFlightRows


if TYPE_CHECKING:
    from ..request import Request

KERNEL_FILTERS = ("top_k", "top_p")
"""Filters that kernels apply."""
MOST_SCORES = 2**24
"""Most scores that plain PyTorch processes in one go: its memory is some times as much in float32."""
PENALTY_VALUES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "counts_from")
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


class Places(NamedTuple):
    """
    Nodes whose logits are processed.

    Args:
        depths (`torch.Tensor` of shape `[1 or batch, nodes]`, int64): their depths.
        paths (`torch.Tensor` of shape `[batch, nodes, most]`, int64): the draft tokens from the root to each of them,
            its own included, in any order among -1.
    """

    depths: torch.Tensor
    paths: torch.Tensor

    @classmethod
    def of_tree(cls, topology: Topology, tokens: torch.Tensor) -> Places:
        """All nodes of a tree with these tokens, `[batch, nodes]`; -1 for nodes that no walk comes to."""
        paths = torch.where(topology.ancestors[:, :, 1:], tokens[:, None, 1:], -1)
        return cls(topology.depths, paths)

    @classmethod
    def of_path(cls, new: torch.Tensor, level: int) -> Places:
        """The nodes of a level on the paths with the tokens `new`, `[batch, depth + 1]`."""
        return cls(torch.full_like(new[:, :1], level), new[:, None, :level])


class Processing:
    """
    The processors of rows, in transformers' order. What reads the result still divides it by the temperature.

    Args:
        values (`dict[str, torch.Tensor]`): by name, values of the processors to apply, `[batch]` each; see `NONE`.
        lengths (`torch.Tensor` of shape `[batch]`, int64, *optional*): tokens of every row, root included.
        hidden (`HiddenTokens`, *optional*): tokens that are hidden by their ids.
        texts (`torch.Tensor` of shape `[batch, most]`, int64, *optional*): the rows' tokens, for penalties.
    """

    def __init__(
        self,
        values: dict[str, torch.Tensor],
        lengths: torch.Tensor | None = None,
        hidden: HiddenTokens | None = None,
        texts: torch.Tensor | None = None,
    ):
        self.values, self._lengths, self._hidden, self._texts = values, lengths, hidden, texts
        self._has_later = any(name in values for name in AFTER)

    @classmethod
    def of(
        cls, rows: InFlightRows, kinds: Collection[str], by_kernels: Collection[str] = KERNEL_FILTERS
    ) -> Processing:
        """The processing of a step's rows: these `Warpers.kinds`, the temperature, and some `KERNEL_FILTERS`."""
        names = {"temperature", *by_kernels, *kinds, *(PENALTY_VALUES if PENALTIES in kinds else ())}
        values = {name: value for name, value in rows.warpers.items() if name in names}
        hidden = rows.hidden if HIDDEN_TOKENS in kinds else None
        return cls(values, rows.lengths, hidden, rows.texts if PENALTIES in kinds else None)

    @property
    def temperature(self) -> torch.Tensor | None:
        """The temperature of every row, `[batch]` float32; None for none."""
        return self.values.get("temperature")

    @property
    def filters(self) -> bool:
        """Whether any token of a draft may be hidden."""
        return self._hidden is not None or any(name in self.values for name in (*BEFORE, *KERNEL_FILTERS, *AFTER))

    def for_walk(
        self, logits: torch.Tensor, topology: Topology, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        """
        Logits for a walk's kernel down a tree, and the warpers that it has to apply itself: as many as it can, since
        it looks at visited nodes alone.
        """
        looks_at_text = self._hidden is not None or self._texts is not None
        places = Places.of_tree(topology, tokens) if looks_at_text else None
        names = ("temperature",) if self._has_later else ("temperature", *KERNEL_FILTERS)
        found = self(logits, places) if self._has_later else self._before(logits, places)
        return found, {name: self.values.get(name) for name in names}

    def __call__(
        self, logits: torch.Tensor, places: Places | None = None, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        """
        Logits `[batch, nodes, vocab]` after penalties, with -inf for tokens that the rows' processors hide.

        Args:
            places (`Places`, *optional*): the nodes. Without them, as for a draft, nothing is done that depends on the
                text.
            columns (`torch.Tensor` of shape `[target vocab]`, *optional*): columns of the target's tokens in the
                logits, -1 for none; by default the tokens themselves.
        """
        logits = self._before(logits, places, columns)
        by_kernel = {name: self.values[name] for name in KERNEL_FILTERS if name in self.values}
        if by_kernel:
            from hf_specdec_kernels import filter_logits

            logits = logits if logits.dtype in DTYPES else logits.float()
            logits = filter_logits(logits, temperature=self.temperature, **by_kernel)
        return self._filtered(logits, AFTER) if self._has_later else logits

    def _before(
        self, logits: torch.Tensor, places: Places | None, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The logits after the processors that come before top-k."""
        if self._texts is not None and places is not None:
            logits = self._penalised(logits, self._texts, places)
        if self._hidden is not None:
            depths = None if places is None else places.depths
            logits = self._without_hidden(logits, self._hidden, depths, columns)
        return self._filtered(logits, BEFORE) if any(name in self.values for name in BEFORE) else logits

    def _penalised(self, logits: torch.Tensor, texts: torch.Tensor, places: Places) -> torch.Tensor:
        """The logits after the penalties, float32."""
        (batch, nodes, vocab), found = logits.shape, torch.empty_like(logits, dtype=torch.float32)
        numbers = torch.arange(texts.shape[1], device=texts.device)
        assert self._lengths is not None
        is_text = (numbers < self._lengths[:, None]) & (texts < vocab)
        counts = [
            torch.zeros(batch, vocab + 1, device=texts.device).scatter_add_(
                1, torch.where(counted, texts, vocab), torch.ones_like(texts, dtype=torch.float32)
            )[:, None, :vocab]
            for counted in (is_text, is_text & (numbers >= self.values["counts_from"][:, None]))
        ]
        step = max(1, MOST_SCORES // (batch * vocab))
        for first in range(0, nodes, step):
            part, tokens = logits[:, first : first + step].float(), places.paths[:, first : first + step]
            scores = self._lowered(part, *counts)
            # Those of the path count beside the text.
            is_token = (tokens >= 0) & (tokens < vocab)
            index = torch.where(is_token, tokens, 0)
            again = (tokens[..., None] == tokens[..., None, :]).sum(dim=-1)
            own = (count.expand(-1, index.shape[1], -1).gather(2, index) + again for count in counts)
            of_path = self._lowered(part.gather(2, index), *own)
            padded = torch.nn.functional.pad(scores, (0, 1))
            padded.scatter_(2, torch.where(is_token, tokens, vocab), of_path)
            found[:, first : first + step] = padded[..., :vocab]
        return found

    def _lowered(self, scores: torch.Tensor, seen: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Scores of tokens that the text has so often, and after the prompt so often."""
        repetition, presence, frequency = (self.values[name][:, None, None] for name in PENALTY_VALUES[:3])
        scores = torch.where(seen > 0, repeated(scores, repetition), scores)
        return lowered(scores, counts, presence, frequency)

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
