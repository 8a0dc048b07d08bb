"""The rows of a call, as the target's distribution at the nodes of a tree is computed for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ..engine.request_options import RequestOptions
from ..grammar import GrammarMask
from ..sequences import Sequences
from ..trees import DraftTree
from ..trees.forced import forced_chain
from ..verification import NoiseSeed, PositionNoise, TargetDistribution, copies_per_row
from ..verification.choosing import NOTHING_TO_DRAW_FROM
from .recording import Recorder
from .stopping import ColumnJudge


class CallRows:
    """
    The rows of a call. A batch of one gets exactly the calls of plain `generate`. In larger batches a processor that
    reads more than the scores runs row by row (`copies_per_row`); if it may hold state, every row has a copy of its
    own.

    Args:
        options (`RequestOptions`): the decoding options of the call.
        sequences (`Sequences`): the rows' tokens, padding included.
        recorder (`Recorder`): gets scores and logits of every token chosen.
        judge (`ColumnJudge`, *optional*): the criteria and the streamer of the call.
        agree (`Callable`, *optional*): makes a tensor of drawn tokens equal on all ranks; see `Ranks.agree`.
    """

    def __init__(
        self,
        options: RequestOptions,
        sequences: Sequences,
        recorder: Recorder,
        judge: ColumnJudge | None = None,
        agree: Callable[[torch.Tensor], torch.Tensor] = lambda drawn: drawn,
    ):
        self.sequences, self.judge, self._agree = sequences, judge, agree
        of_rows = [options] * sequences.batch_size
        if len(of_rows) > 1 and not options.reads_scores_only:
            own = copies_per_row(options.processors, len(of_rows))
            of_rows = [replace(options, processors=processors) for processors in own]
        self._rows = [CallRow(self, row, options) for row, options in enumerate(of_rows)]
        self._record = recorder.add_scores if recorder.wanted & {"scores", "logits"} else None

    def draw_by_position(self, seed: NoiseSeed) -> list[PositionNoise]:
        """Lets tokens be drawn by the positions of every row; returns the noise of the rows."""
        visible, device = self.sequences.visible, self.sequences.device
        padding = [0] * len(self._rows) if visible is None else (~visible).sum(dim=1).tolist()
        noises = [PositionNoise(seed.of_row(row.row), device, padding[row.row]) for row in self._rows]
        for row, noise in zip(self._rows, noises, strict=True):
            row.noise = noise
        return noises

    @property
    def grammars(self) -> list[GrammarMask | None] | None:
        """The grammar of every row; None if the call has none."""
        found = [row.options.grammar for row in self._rows]
        return found if any(found) else None

    def forced(self, draft: DraftTree) -> dict[int, tuple[int, list[int]]]:
        """What the call's grammar asks for below a node of every tree, by row; rows without it are missing."""
        found = {}
        for row, mask in enumerate(self.grammars or ()):
            if mask is not None and not self.sequences.resting[row]:
                forced = partial(mask.forced, self.sequences.new_tokens(row))
                found[row] = forced_chain(draft, row, forced, self.sequences.room(row))
        return {row: (node, chain) for row, (node, chain) in found.items() if chain}

    def distribution(self, logits: torch.Tensor) -> TargetDistribution:
        """p in a step with these logits, `[batch, nodes + 1, vocab]`."""
        return TargetDistribution(
            self._rows, logits, self._agree, self._record, is_call=True, device=self.sequences.device
        )


class CallRow:
    """A row of a call; see `TextRow`."""

    is_over = False

    def __init__(self, call: CallRows, row: int, options: RequestOptions):
        self._call, self.row, self.options = call, row, options
        self.noise: PositionNoise | None = None

    @property
    def length(self) -> int:
        return self._call.sequences.lengths[self.row]

    def history(self, length: int, new: list[int]) -> torch.Tensor:
        if new:
            self._call.sequences.write(self.row, length - 1, new[-1:])
        return self._call.sequences.row(self.row, length)

    def append(self, token: int) -> bool:
        """
        Whether the row ends with this token: plain `generate` would run no processor after it. With one sequence, and
        processors that read more than the scores, criteria and streamer see the token at once, because processors may
        depend on them; else they see it when all rows have walked.
        """
        sequences, judge = self._call.sequences, self._call.judge
        if judge is None or sequences.batch_size > 1 or self.options.reads_scores_only:
            return token in sequences.end_tokens
        sequences.extend(self.row, [token])
        judge.advance()
        return judge.all_finished

    def fail(self, error: str | Exception, by_its_options: bool = False) -> None:
        raise error if isinstance(error, Exception) else RuntimeError(NOTHING_TO_DRAW_FROM)
