"""`DraftRequest`: what a drafter is asked for, by a call or by requests in flight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from ..grammar import GrammarMask, GrowingMask
from ..models.encoders import EncoderInputs
from ..plan import SpeculationPlan
from ..sequences import Rows, Sequences
from ..trees import DynamicTree, TokenTree, TreeChoice
from ..trees.confidence import Calibration
from ..verification import BatchNoise, PositionNoise
from ..verification.draft_temperature import DraftTemperature


if TYPE_CHECKING:
    from ..graphs import GraphLoans, GraphStore
    from .growth import Noise, TokenLimits


@dataclass(frozen=True)
class DraftRequest:
    """
    Settings of a call that its drafter is started with, or of requests in flight that are drafted for together.

    Args:
        plan (`SpeculationPlan`): resolved settings: its tree, and whether children are drawn.
        vocab_size (`int`): size of the target's vocabulary.
        warpers (`LogitsProcessorList`): the call's logits processors that read the scores alone; a drafter that draws
            children applies them to its own scores, because the closer q is to p, the more is accepted.
        prefill_chunk_size (`int`, *optional*): tokens per chunk of a chunked prefill, as in the call.
        temperature (`DraftTemperature`, *optional*): temperature of q, besides the warpers.
        choice (`TreeChoice`, *optional*): says which tree a step takes; without it, every step takes the plan's.
        loans (`GraphLoans`, *optional*): lends K/V memory with captured CUDA graphs; without it, there are none.
        noises (`Sequence[PositionNoise]`, *optional*): random numbers of the rows by position, from which children
            are drawn; without them, they are drawn by torch's generator.
        refine (`Callable`, *optional*): chooses the tree again from the draft's confidence in the step at hand; see
            `TreeChoice.refine`.
        grammars (`Sequence[GrammarMask]`, *optional*): the grammar of every row, None for one without.
        encoder (`EncoderInputs`, *optional*): what the target's encoder has read, if it has one.
        calibration (`Callable`, *optional*): how captured steps read the draft's confidence, by which they shape the
            plan's tree anew, with as many nodes and levels.
        reports_ranks (`bool`): whether captured steps report which children were offered and accepted, as where "auto"
            has to learn this of a tree whose shape the draft has chosen.
    """

    plan: SpeculationPlan
    vocab_size: int
    warpers: LogitsProcessorList
    prefill_chunk_size: int | None = None
    temperature: DraftTemperature = field(default_factory=DraftTemperature)
    choice: TreeChoice | None = None
    loans: GraphLoans | None = None
    noises: Sequence[PositionNoise] | None = None
    refine: Callable[[Mapping[int, Sequence[float]]], TokenTree | DynamicTree | None] | None = None
    grammars: Sequence[GrammarMask | None] | None = None
    encoder: EncoderInputs | None = None
    calibration: Callable[[], Calibration] | None = None
    reports_ranks: bool = False

    def noise(self, lengths: Sequence[int], token_ids: torch.Tensor | None = None) -> Noise | None:
        """
        The noise by which children are drawn where random numbers belong to positions; else None.

        Args:
            lengths (`Sequence[int]`): tokens of every row, root included.
            token_ids (`torch.Tensor` of shape `[draft vocab]`, int64, *optional*): the target's token of each of the
                draft's.
        """
        if self.noises is None:
            return None
        return BatchNoise(self.noises, lengths, self.vocab_size, token_ids).at

    def limits(self, sequences: Rows, token_ids: torch.Tensor | None = None) -> TokenLimits | None:
        """
        What hides tokens that the rows' grammars do not allow; None without a grammar. See `noise` for `token_ids`.
        """
        if self.grammars is None:
            return None
        rows = [
            None if mask is None or sequences.room(row) <= 0 else (mask, sequences.new_tokens(row))
            for row, mask in enumerate(self.grammars)
        ]
        return GrowingMask(rows, self.vocab_size, token_ids)

    def storage(
        self, model: PreTrainedModel, sequences: Sequences, most_slots: int, tokens_ratio: float = 1.0
    ) -> GraphStore | None:
        """
        The `GraphStore` of a model that drafts for these sequences to their end, with up to `most_slots` slots after
        the root, and about `tokens_ratio` tokens for one of theirs; None without CUDA graphs.
        """
        if self.loans is None:
            return None
        length = math.ceil(tokens_ratio * sequences.expected_length)
        return self.loans.store(model, sequences.batch_size, length + most_slots + 1)

    @property
    def tree(self) -> TokenTree | DynamicTree:
        """The tree to fill in the present step."""
        return self.plan.tree if self.choice is None else self.choice.tree  # type: ignore[return-value]

    @property
    def warp_if_drawn(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Function from a draft's logits to the scores of q, if children are to be drawn; else None."""
        takes_best = self.choice is not None and self.choice.takes_best
        return self._warp if self.plan.draws_children and not takes_best else None

    def _warp(self, logits: torch.Tensor) -> torch.Tensor:
        """
        Scores of q, float32, from logits `[…, vocab]`, by the warpers and the draft temperature. NaN, from which
        nothing is drawn, where a warper refuses the logits.
        """
        rows = logits.reshape(-1, logits.shape[-1])
        try:
            scores = self._warped(rows)
        except ValueError:  # some warpers take no NaN and no infinity; drafts are not worth an error
            scores = torch.cat([self._warped_or_nan(row) for row in rows.split(1)])
        return self.temperature.apply(scores).view(logits.shape)

    def _warped(self, logits: torch.Tensor) -> torch.Tensor:
        return self.warpers(None, logits.to(torch.float32, copy=True))

    def _warped_or_nan(self, logits: torch.Tensor) -> torch.Tensor:
        try:
            return self._warped(logits)
        except ValueError:
            return torch.full_like(logits, torch.nan, dtype=torch.float32)
