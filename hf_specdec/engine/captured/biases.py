"""Biases of rows in captured steps: as the host loads them, and as they apply at nodes."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from ...verification.biases import (
    BIASES,
    ENDINGS,
    FOR_EVER,
    HIDDEN_TOKENS,
    MOST_BEFORE,
    MOST_BIASES,
    MOST_HIDDEN,
    Bias,
)
from .nodes import Places, by_nodes
from .row_buffer import RowBuffer


_PLAIN = ("token", "value", "first", "end")


class RowBiases:
    """
    The biases of rows, see `Bias`, with one column for each; unused columns apply to no text.

    Args:
        rows (`int`), most (`int`), most_before (`int`): number of rows, of biases per row, and of tokens before each.
        device (`torch.device`): device of the step.
    """

    def __init__(self, rows: int, most: int, most_before: int, device: torch.device):
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_PLAIN, (rows, most))
        shapes["before"] = rows, most, most_before
        self._buffer = RowBuffer({}, shapes, {"value": torch.float32}, device)
        self._buffer.host["before"][:] = -1
        self._buffer.copy()
        self._loaded: list[tuple[Bias, ...]] = [()] * rows
        on_device = self._buffer.device
        self.token: torch.Tensor = on_device["token"]
        """Their tokens, `[rows, most]` int64."""
        self.value: torch.Tensor = on_device["value"]
        """What they add, `[rows, most]` float32."""
        self.first: torch.Tensor = on_device["first"]
        self.end: torch.Tensor = on_device["end"]
        """Biases apply to texts of `first` tokens or more, and fewer than `end`, `[rows, most]` int64 each."""
        self.before: torch.Tensor = on_device["before"]
        """The tokens that a text must end with, the last one first, -1 for any, `[rows, most, most_before]` int64."""

    @classmethod
    def for_kinds(cls, rows: int, kinds: Collection[str], device: torch.device) -> RowBiases:
        """Room for the rows of steps that do this for them; see `Warpers.kinds`."""
        most = MOST_BIASES if BIASES in kinds else MOST_HIDDEN if HIDDEN_TOKENS in kinds else 0
        return cls(rows, most, MOST_BEFORE if ENDINGS in kinds else 0, device)

    def load(self, biases: list[tuple[Bias, ...]]) -> None:
        """Copies the biases of the first rows to the device, if any have changed; the other rows have none."""
        if self.token.shape[1] == 0:
            return
        wanted = biases + [()] * (len(self._loaded) - len(biases))
        pairs = enumerate(zip(wanted, self._loaded, strict=True))
        changed = [row for row, (new, old) in pairs if new is not old and new != old]  # mostly those of the last step
        if not changed:
            return
        self._buffer.wait()
        for row in changed:
            self._stage(row, wanted[row])
        self._loaded = wanted
        self._buffer.copy()

    def _stage(self, row: int, biases: tuple[Bias, ...]) -> None:
        host, number = self._buffer.host, len(biases)
        for name in _PLAIN:
            host[name][row, :number] = [getattr(one, name) for one in biases]
            host[name][row, number:] = 0
        if self.before.shape[2] > 0:
            host["before"][row] = -1
            for place, one in enumerate(biases):
                host["before"][row, place, : len(one.before)] = one.before


_PADDING = 16
"""Columns beside a vocabulary, of which one takes what does not apply: so many that rows stay aligned."""


class NodeBiases(NamedTuple):
    """
    Biases of rows at nodes.

    Args:
        column (`torch.Tensor` of shape `[batch, 1, most]`, int64): their column in the logits; `vocab` for none.
        value (`torch.Tensor` of shape `[batch, 1, most]`, float32): what they add.
        applies (`torch.Tensor` of shape `[batch, 1 or nodes, most]`, bool): which of them apply.
    """

    column: torch.Tensor
    value: torch.Tensor
    applies: torch.Tensor

    @classmethod
    def of(
        cls,
        biases: RowBiases,
        vocab: int,
        lengths: torch.Tensor | None = None,
        places: Places | None = None,
        last_tokens: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
    ) -> NodeBiases:
        """
        Biases of rows at places; without places those that apply to all texts.

        Args:
            vocab (`int`): number of columns of the logits.
            lengths (`torch.Tensor` of shape `[batch]`, int64): tokens of every row, root included.
            last_tokens (`torch.Tensor` of shape `[batch, nodes, most_before or more]`, int64, *optional*): see
                `Places.last_tokens`; needed where biases depend on them.
            columns (`torch.Tensor` of shape `[target vocab]`, *optional*): columns of the target's tokens in the
                logits, -1 for none; by default the tokens themselves.
        """
        tokens, first, end, before = biases.token, biases.first, biases.end, biases.before
        if columns is not None:
            tokens = columns[tokens.clamp(max=len(columns) - 1)].long()
        if places is None or lengths is None:
            applies = ((first == 0) & (end == FOR_EVER) & (before < 0).all(dim=2))[:, None]
        else:
            texts = (lengths[:, None] + places.depths)[:, :, None]
            applies = (first[:, None] <= texts) & (texts < end[:, None])
            if last_tokens is not None:
                for place in range(before.shape[2]):
                    wanted = before[:, None, :, place]
                    applies &= (wanted < 0) | (wanted == last_tokens[:, :, place, None])
        column = torch.where((tokens >= 0) & (tokens < vocab), tokens, vocab)
        return cls(column[:, None], biases.value[:, None], applies)

    def add(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits `[batch, nodes, vocab]` with finite biases, float32. Those of a token are added up first."""
        values = torch.where(self.applies & self.value.isfinite(), self.value, 0.0)

        def added(part: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            sums = torch.zeros(*part.shape[:2], part.shape[2] + _PADDING, device=part.device)
            sums.scatter_add_(2, self.column.expand_as(values), values)
            return part.float() + sums[..., : part.shape[2]]

        return by_nodes(added, logits, values.expand(-1, logits.shape[1], -1), dtype=torch.float32)

    def force(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits with 0 for tokens that are forced, and -inf for others in their places."""
        is_forced = (self.applies & (self.value == torch.inf)).expand(-1, logits.shape[1], -1)
        kept = torch.zeros(*logits.shape[:2], logits.shape[2] + 1, dtype=torch.bool, device=logits.device)
        kept.scatter_(2, torch.where(is_forced, self.column, logits.shape[2]), True)
        forced = torch.zeros_like(logits).masked_fill(~kept[..., :-1], -torch.inf)
        return torch.where(is_forced.any(dim=2, keepdim=True), forced, logits)

    def hide(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits with -inf for tokens that are hidden."""
        vocab = logits.shape[2]
        is_hidden = (self.applies & (self.value == -torch.inf)).expand(-1, logits.shape[1], -1)
        column = torch.where(is_hidden, self.column, vocab)
        return torch.nn.functional.pad(logits, (0, _PADDING)).scatter_(2, column, -torch.inf)[..., :vocab]
