"""Outputs that `return_dict_in_generate` returns besides the tokens, recorded column by column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput

from ..metrics import SpeculationMetrics


@dataclass
class SpeculativeGenerateOutput(GenerateDecoderOnlyOutput):
    """
    transformers' `GenerateDecoderOnlyOutput`, with the metrics of speculation. Where a row of a batch finished before
    others, its later `scores`, `logits`, `hidden_states` and `attentions` are zero: nothing was computed for its
    padding.

    Encoder-decoder models have the fields of `GenerateEncoderDecoderOutput`: `decoder_attentions` and the like. Their
    `cross_attentions` are those of plain `generate` in all columns, since Whisper reads timestamps of words off them.

    Args:
        speculation (`SpeculationMetrics`): the counts of this call.
    """

    speculation: SpeculationMetrics | None = None
    encoder_attentions: tuple | None = None
    encoder_hidden_states: tuple | None = None
    decoder_attentions: tuple | None = None
    cross_attentions: tuple | None = None
    decoder_hidden_states: tuple | None = None


_CROSS = "cross_attentions"


class Recorder:
    """
    Collects the outputs of the forward that chose each generated token, row by row, and joins the rows to columns (the
    t-th token of every row).

    Args:
        batch_size (`int`): number of rows.
        scores, logits, attentions, hidden_states (`bool`): which of these outputs the call returns.
        windows (`list`, *optional*): for every layer, the sliding window (`int`) outside of which plain `generate`'s
            cache drops keys, or None.
        has_encoder (`bool`, *optional*, defaults to `False`): whether the outputs are those of an encoder-decoder.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        scores: bool,
        logits: bool,
        attentions: bool,
        hidden_states: bool,
        windows: list[int | None] | None = None,
        has_encoder: bool = False,
    ):
        self._attentions, self._hidden_states = "attentions", "hidden_states"
        if has_encoder:
            self._attentions, self._hidden_states = "decoder_attentions", "decoder_hidden_states"
        choices = {"scores": scores, "logits": logits}
        choices |= {self._attentions: attentions, self._hidden_states: hidden_states}
        choices[_CROSS] = attentions and has_encoder
        self.wanted = {name for name, wants in choices.items() if wants}
        self._columns: dict[str, tuple] = dict.fromkeys(self.wanted, ())
        self._ended: list[list[bool]] = []
        self._rows: dict[str, list[list[Any]]] = {name: [[] for _ in range(batch_size)] for name in self.wanted}
        self._windows = windows or []

    @classmethod
    def of_call(
        cls, batch_size: int, generation_config: GenerationConfig, cache: Cache | None, has_encoder: bool = False
    ) -> Recorder:
        """A recorder of what a `generate` call returns; `cache` is the one that plain `generate` would use."""
        returns = bool(generation_config.return_dict_in_generate)
        return cls(
            batch_size,
            scores=returns and bool(generation_config.output_scores),
            logits=returns and bool(generation_config.output_logits),
            attentions=returns and bool(generation_config.output_attentions),
            hidden_states=returns and bool(generation_config.output_hidden_states),
            windows=[
                layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
                for layer in getattr(cache, "layers", ())
            ],
            has_encoder=has_encoder,
        )

    @property
    def reads_padding(self) -> bool:
        """Whether columns are those of plain `generate` even for the padding of rows that have ended."""
        return _CROSS in self.wanted

    def get(self, name: str) -> tuple | None:
        """The judged columns of `"scores"`, `"logits"`, `"attentions"` and the like; None unless asked for."""
        if name not in self.wanted:
            return None
        columns = self._columns[name]
        columns += tuple(self._join_column(name, index) for index in range(len(columns), len(self._ended)))
        self._columns[name] = columns
        return columns

    def add_prefill(self, outputs: ModelOutput) -> None:
        """Records `attentions` and `hidden_states` of the prefill (per layer, all rows) as the first column."""
        for name in self._of_forwards():
            values = getattr(outputs, name, None)
            if name == self._attentions:
                values = self._without_dropped_keys(values)
            for row, column in enumerate(self._rows[name]):
                column.append(None if values is None else tuple(_row_of(value, row) for value in values))

    def add_step(self, paths: list[list[int] | None], outputs: ModelOutput, lengths: list[int]) -> None:
        """
        Records `attentions` and `hidden_states` of the nodes that walks visited, one entry per token that the walk
        gave, as plain `generate` has them.

        Args:
            paths (`list`): the accepted nodes of every row (`list[int]`), or None for a row that did not walk.
            outputs (`ModelOutput`): output of the step's forward.
            lengths (`list[int]`): number of slots that each row had committed before the step.
        """
        if not self._of_forwards():
            return
        for row, path in enumerate(paths):
            nodes = [] if path is None else [0, *path]
            for depth, node in enumerate(nodes):
                for name in self._of_forwards() - {self._attentions}:
                    self.add_token(name, row, self._of_node(name, outputs, row, node))
                if self._attentions in self.wanted:
                    slots = [*range(lengths[row]), *(lengths[row] + above for above in nodes[: depth + 1])]
                    weights = tuple(
                        None if layer is None else layer[row : row + 1, :, node : node + 1, slots]
                        for layer in outputs[self._attentions]
                    )
                    self.add_token(self._attentions, row, self._without_dropped_keys(weights))

    def add_padding(self, outputs: ModelOutput, lengths: list[int], counts: list[int], first: int) -> None:
        """
        Records `cross_attentions` of the last token and the padding of rows that have ended, as `reads_padding` asks.

        Args:
            outputs (`ModelOutput`): output of a forward over these.
            lengths, counts (`list[int]`): slots of every row before them, and how many nodes of the forward are its.
            first (`int`): slots of the prompt, whose forward chose the first token.
        """
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            column = self._rows[_CROSS][row]
            del column[1 + length - first :]
            column += [self._of_node(_CROSS, outputs, row, node) for node in range(count)]

    def _of_forwards(self) -> set[str]:
        return self.wanted & {self._attentions, self._hidden_states, _CROSS}

    @staticmethod
    def _of_node(name: str, outputs: ModelOutput, row: int, node: int) -> tuple[torch.Tensor | None, ...] | None:
        """A node's part of what every layer has returned: the last dimension but one is that of nodes."""
        layers = outputs.get(name)
        if layers is None:
            return None
        part = (slice(row, row + 1), ..., slice(node, node + 1), slice(None))
        return tuple(None if layer is None else layer[part].clone() for layer in layers)

    def _without_dropped_keys(self, attentions: tuple[torch.Tensor | None, ...] | None) -> Any:
        """Attention weights (per layer) without the keys that plain `generate`'s cache drops outside of a window."""
        if attentions is None:
            return None
        kept = list(attentions)
        for layer, (weights, window) in enumerate(zip(attentions, self._windows, strict=False)):
            if weights is not None and window is not None:
                queries, keys = weights.shape[2:]
                kept[layer] = weights[..., -(min(keys - queries, window - 1) + queries) :]
        return tuple(kept)

    def add_token(self, name: str, row: int, value: Any) -> None:
        """Records a token's `[1, vocab]` tensor, or tuple of per-layer tensors with a batch of one."""
        if name in self.wanted:
            self._rows[name][row].append(value)

    def add_scores(self, row: int, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Records what a token was chosen from: its logits, and the processed scores."""
        self.add_token("logits", row, logits)
        self.add_token("scores", row, scores)

    def add_column(self, ended: list[bool]) -> None:
        """Adds the column of every row's next token, zero for rows that have `ended`; tokens may be recorded later."""
        self._ended.append(list(ended))

    def _join_column(self, name: str, index: int) -> Any:
        rows, ended = self._rows[name], self._ended[index]
        if name == _CROSS:
            ended = [False] * len(rows)
        values = [None if end or len(row) <= index else row[index] for row, end in zip(rows, ended, strict=True)]
        for row in rows:
            if index < len(row):
                row[index] = None  # the column holds it now
        return _join(values)


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
