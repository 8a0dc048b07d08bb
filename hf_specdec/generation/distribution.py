"""The target's distribution in one call: logits processors, run with each node's own history."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import LogitsProcessorList

from ..sequences import Sequences
from ..verification import PositionNoise, Walk, choose, copies_per_row, draw_by_position
from ..verification.choosing import NOTHING_TO_DRAW_FROM
from ..verification.processor_kinds import READS_SCORES_ONLY
from .recording import Recorder
from .stopping import ColumnJudge


class TargetDistribution:
    """
    p, the target's next-token distribution after every processor of the call, at the nodes where walks stand.

    Processors run only there, in order, with the row's real history, padding included. A batch of one gets exactly the
    calls of plain `generate`. In larger batches a processor that reads more than the scores runs row by row
    (`copies_per_row`); if it may hold state, every row has a copy of its own.

    Args:
        processors (`LogitsProcessorList`): the processors of the call.
        sequences (`Sequences`): the rows, for their histories.
        recorder (`Recorder`): gets scores and logits of every token chosen.
        judge (`ColumnJudge`, *optional*): the criteria and the streamer of the call.
        agree (`Callable`, *optional*): makes a tensor of drawn tokens equal on all ranks; see `Ranks.agree`.
        noises (`list[PositionNoise]`, *optional*): random numbers of the rows, from which tokens are drawn; by default
            they are drawn by torch's generator.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        sequences: Sequences,
        recorder: Recorder,
        judge: ColumnJudge | None = None,
        agree: Callable[[torch.Tensor], torch.Tensor] = lambda drawn: drawn,
        noises: list[PositionNoise] | None = None,
    ):
        self.noises = noises
        self.sequences, self.recorder, self.judge, self.agree = sequences, recorder, judge, agree
        self.batch_size = sequences.batch_size
        self.processors = processors
        self.reads_scores_only = all(type(processor) in READS_SCORES_ONLY for processor in processors)
        self._by_row = None
        if self.batch_size > 1 and not self.reads_scores_only:
            self._by_row = copies_per_row(processors, self.batch_size)
        self._records = bool(recorder.wanted & {"scores", "logits"})
        self._logits: torch.Tensor | None = None
        self.lengths: list[int] = []
        """Length of every row, in tokens, when the step began."""

    def begin_step(self, logits: torch.Tensor) -> None:
        """Takes the logits of a step, `[batch, nodes + 1, vocab]`."""
        self._logits = logits
        self.lengths = list(self.sequences.lengths)

    def ends(self, row: int, token: int) -> bool:
        """
        Whether a row's text ends with a token that its walk has accepted: plain `generate` would run no processor
        after it. With one sequence, and processors that read more than the scores, criteria and streamer see the token
        at once, because processors may depend on them; else they see it when all rows have walked.
        """
        if self.judge is None or self.batch_size > 1 or self.reads_scores_only:
            return token in self.sequences.end_tokens
        self.sequences.extend(row, [token])
        self.judge.advance()
        return self.judge.all_finished

    @property
    def reads_ahead(self) -> bool:
        """Whether `all_scores` may be used, and is cheaper than `scores` at every node of a walk."""
        if self.noises is not None:
            return False
        return self.reads_scores_only and not self._records and self._logits.device.type != "cpu"

    @property
    def is_bare(self) -> bool:
        """Whether the scores are the unprocessed logits, and are not recorded."""
        return not self.processors and not self._records

    def all_scores(self) -> torch.Tensor:
        """
        Processed scores of all nodes, `[batch, nodes + 1, vocab]`; only if every processor reads the scores alone.
        """
        if not self.processors:
            return self._logits
        scores = self._logits.flatten(0, 1).float()
        return self.processors(None, scores).view(self._logits.shape)

    def scores(self, rows: list[int], walk: Walk) -> torch.Tensor:
        """Processed scores at the nodes where the walks of `rows` stand, `[rows, vocab]` float32."""
        at_nodes = [self._logits[row, walk.node(row)] for row in rows]
        # A copy, as plain `generate` makes: processors may write into it.
        logits = torch.stack(at_nodes).to(self.sequences.device, torch.float32)
        if self.reads_scores_only:
            scores = self.processors(None, logits)
        elif self._by_row is None:
            scores = self.processors(self._history(0, walk), logits)
        else:
            scores = torch.cat(
                [
                    self._by_row[row](self._history(row, walk), logits[place : place + 1])
                    for place, row in enumerate(rows)
                ]
            )
        if self._records:
            for place, row in enumerate(rows):
                self.recorder.add_token("logits", row, logits[place : place + 1])
                self.recorder.add_token("scores", row, scores[place : place + 1])
        return scores

    def choose(self, rows: list[int], walk: Walk, do_sample: bool) -> list[int]:
        """The next token of every row where its walk stands: the argmax, or drawn from p."""
        scores = self.scores(rows, walk)
        if not do_sample or self.noises is None:
            return self.agree(choose(scores, do_sample)).tolist()
        if not scores.amax(dim=-1).isfinite().all():
            raise RuntimeError(NOTHING_TO_DRAW_FROM)
        noise = [self.noises[row].take(self.lengths[row] + len(walk.tokens[row]), scores.shape[-1]) for row in rows]
        return self.agree(draw_by_position(scores, noise)).tolist()

    def _history(self, row: int, walk: Walk) -> torch.Tensor:
        """Prompt, generated tokens and path so far of a row, `[1, tokens]`."""
        length = self.lengths[row]
        tokens = walk.tokens[row]
        if tokens:
            self.sequences.write(row, length + len(tokens) - 1, tokens[-1:])
        return self.sequences.row(row, length + len(tokens))
