"""What `return_dict_in_generate` returns besides the tokens, put together column by column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .metrics import SpeculationMetrics


@dataclass
class SpeculativeGenerateOutput(GenerateDecoderOnlyOutput):
    """
    transformers' `GenerateDecoderOnlyOutput`, and what speculation did. Where a row of a batch finished before others,
    its later `scores`, `logits`, `hidden_states` and `attentions` are zero: nothing was computed for its padding.

    Args:
        speculation (`SpeculationMetrics`): the counts of this call.
    """

    speculation: SpeculationMetrics | None = None


class Recorder:
    """
    Collects, for every generated token of every row, what the forward that chose it gave, and joins rows to columns.

    Args:
        batch_size (`int`): rows.
        scores, logits, attentions, hidden_states (`bool`): which of them the call returns.
    """

    def __init__(self, batch_size: int, *, scores: bool, logits: bool, attentions: bool, hidden_states: bool):
        choices = {"scores": scores, "logits": logits, "attentions": attentions, "hidden_states": hidden_states}
        self.wanted = {name for name, wants in choices.items() if wants}
        self._rows: dict[str, list[list[Any]]] = {name: [[] for _ in range(batch_size)] for name in self.wanted}
        self._columns: dict[str, tuple] = dict.fromkeys(self.wanted, ())

    @property
    def scores(self) -> tuple[torch.Tensor, ...] | None:
        """Processed scores of every judged column, `[batch, vocab]` float32 each; None unless asked for."""
        return self._columns.get("scores")

    def get(self, name: str) -> tuple | None:
        """The judged columns of `"scores"`, `"logits"`, `"attentions"` or `"hidden_states"`."""
        return self._columns.get(name)

    def add_prefill(self, name: str, values: tuple[torch.Tensor, ...] | None) -> None:
        """`attentions` or `hidden_states` of the prefill (per layer, all rows): the first column, as it is."""
        if name in self.wanted:
            for row, column in enumerate(self._rows[name]):
                column.append(None if values is None else tuple(_row_of(value, row) for value in values))

    def add_token(self, name: str, row: int, value: Any) -> None:
        """One token's `[1, vocab]` tensor, or tuple of per-layer tensors with a batch of one."""
        if name in self.wanted:
            self._rows[name][row].append(value)

    def add_column(self, index: int, ended: list[bool]) -> None:
        """Joins the rows' `index`-th tokens; rows that have `ended` get zeros."""
        for name in self.wanted:
            rows = self._rows[name]
            values = [None if end or len(row) <= index else row[index] for row, end in zip(rows, ended, strict=True)]
            self._columns[name] += (_join(values),)
            for row in rows:
                if index < len(row):
                    row[index] = None  # the column holds it now


def _row_of(value: torch.Tensor | None, row: int) -> torch.Tensor | None:
    return None if value is None else value[row : row + 1]


def _join(values: list[Any]) -> Any:
    present = next((value for value in values if value is not None), None)
    if present is None:
        return None
    if isinstance(present, tuple):
        return tuple(
            _join([None if value is None else value[layer] for value in values]) for layer in range(len(present))
        )
    if len(values) == 1:
        return present
    return torch.cat([torch.zeros_like(present) if value is None else value for value in values])
