"""What the logits processors of rows do within a captured step, apart from what the walks' kernels do themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch

from ...kernels import DTYPES
from ...trees import Topology
from ...verification.biases import BIASES, ENDINGS, FORCED, HIDDEN_TOKENS, MOST_BEFORE
from ...verification.device_warpers import NGRAMS, PENALTIES, TEXTS
from ...verification.filters import AFTER, BEFORE
from .biases import NodeBiases, RowBiases
from .nodes import Places, by_nodes
from .rows import InFlightRows
from .text_processors import PENALTY_VALUES, penalised, without_repeated


if TYPE_CHECKING:
    from ..request import Request

KERNEL_FILTERS = ("top_k", "top_p")
"""Filters that kernels apply."""
_BIASED = frozenset({HIDDEN_TOKENS, BIASES, FORCED, ENDINGS})


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
    The processors of rows, in transformers' order. What reads the result still divides it by the temperature.

    Args:
        values (`dict[str, torch.Tensor]`): by name, values of the processors to apply, `[batch]` each; see `NONE`.
        kinds (`Collection[str]`): see `Warpers.kinds`.
        lengths (`torch.Tensor` of shape `[batch]`, int64, *optional*): tokens of every row, root included.
        biases (`RowBiases`, *optional*): the rows' biases.
        texts (`torch.Tensor` of shape `[batch, most]`, int64, *optional*): the rows' tokens, for what looks at them.
    """

    def __init__(
        self,
        values: dict[str, torch.Tensor],
        kinds: Collection[str] = (),
        lengths: torch.Tensor | None = None,
        biases: RowBiases | None = None,
        texts: torch.Tensor | None = None,
    ):
        self.values, self._kinds, self._lengths, self._biases, self._texts = values, kinds, lengths, biases, texts
        self._has_later = any(name in values for name in AFTER)

    @classmethod
    def of(
        cls, rows: InFlightRows, kinds: Collection[str], by_kernels: Collection[str] = KERNEL_FILTERS
    ) -> Processing:
        """The processing of a step's rows: these `Warpers.kinds`, the temperature, and some `KERNEL_FILTERS`."""
        names = {"temperature", *by_kernels, *kinds, *(PENALTY_VALUES if PENALTIES in kinds else ())}
        names |= {"no_repeat_ngram_size"} if NGRAMS in kinds else set()
        values = {name: value for name, value in rows.warpers.items() if name in names}
        biases = None if _BIASED.isdisjoint(kinds) else rows.biases
        texts = None if TEXTS.isdisjoint(kinds) else rows.texts
        return cls(values, kinds, rows.lengths, biases, texts)

    @property
    def temperature(self) -> torch.Tensor | None:
        """The temperature of every row, `[batch]` float32; None for none."""
        return self.values.get("temperature")

    @property
    def filters(self) -> bool:
        """Whether any token of a draft may be hidden, or have a bias."""
        return self._biases is not None or any(name in self.values for name in (*BEFORE, *KERNEL_FILTERS, *AFTER))

    def for_walk(
        self, logits: torch.Tensor, topology: Topology, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        """
        Logits for a walk's kernel down a tree, and the warpers that it has to apply itself: as many as it can, since
        it looks at visited nodes alone.
        """
        looks_at_text = self._biases is not None or self._texts is not None
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
        biases = None if self._biases is None else self._node_biases(self._biases, logits.shape[2], places, columns)
        if biases is not None and BIASES in self._kinds:
            logits = biases.add(logits)
        if self._texts is not None and self._lengths is not None and places is not None:
            if PENALTIES in self._kinds:
                logits = penalised(logits, self.values, self._texts, self._lengths, places)
            if NGRAMS in self._kinds:
                sizes = self.values["no_repeat_ngram_size"]
                logits = without_repeated(logits, sizes, self._texts, self._lengths, places)
        if biases is not None:
            logits = biases.hide(biases.force(logits) if FORCED in self._kinds else logits)
        return self._filtered(logits, BEFORE) if any(name in self.values for name in BEFORE) else logits

    def _node_biases(
        self, biases: RowBiases, vocab: int, places: Places | None, columns: torch.Tensor | None
    ) -> NodeBiases:
        last_tokens = None
        if ENDINGS in self._kinds and places is not None:
            assert self._texts is not None and self._lengths is not None
            last_tokens = places.last_tokens(self._texts, self._lengths, MOST_BEFORE)
        return NodeBiases.of(biases, vocab, self._lengths, places, last_tokens, columns)

    def _filtered(self, logits: torch.Tensor, filters: Collection[str]) -> torch.Tensor:
        """The logits after some filters of `BEFORE` or `AFTER`."""
        own = [(BEFORE | AFTER)[name] for name in filters if name in self.values]
        values = [self.values[name] for name in filters if name in self.values]

        def filtered(part: torch.Tensor) -> torch.Tensor:
            scores = self._scores(part)
            for one, value in zip(own, values, strict=True):
                scores = scores.masked_fill(one(scores, value[:, None].expand(scores.shape[:2])), -torch.inf)
            return part.masked_fill(scores == -torch.inf, -torch.inf)

        return by_nodes(filtered, logits)

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits in float32, after the temperature."""
        return logits.float() if self.temperature is None else logits.float() / self.temperature[:, None, None]
