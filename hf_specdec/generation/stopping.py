"""When a call ends: stopping criteria see every accepted token in order, as in plain `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import StoppingCriteriaList


if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

    from ..sequences import Sequences
    from .recording import Recorder


class ColumnJudge:
    """
    Replays the tokens of a call column by column. Rows may run ahead of each other, but a column (the t-th token of
    every row) is judged only once all unfinished rows have it: then the criteria and the streamer get the very calls
    that plain `generate` would make, whatever state they hold. Tokens of a row beyond the column that finished it are
    dropped.

    Args:
        criteria (`StoppingCriteriaList`): the criteria of the call.
        sequences (`Sequences`): the rows.
        recorder (`Recorder`): holds the scores that criteria may read.
        pad_token (`int`, *optional*): the token that pads finished rows; None for a single row, which needs none.
        streamer (`BaseStreamer`, *optional*): gets every column.
    """

    def __init__(
        self,
        criteria: StoppingCriteriaList,
        sequences: Sequences,
        recorder: Recorder,
        pad_token: int | None,
        streamer: BaseStreamer | None,
    ):
        self.criteria, self.sequences, self.recorder, self.streamer = criteria, sequences, recorder, streamer
        # Plain `generate` pads finished rows only if there is an end token; without one they go on until all are done.
        self.pads_finished_rows = have_end_tokens(criteria)
        self.pad_token = pad_token
        self.judged = sequences.prompt_length
        self.finished = [False] * sequences.batch_size

    @property
    def all_finished(self) -> bool:
        return all(self.finished)

    def advance(self) -> None:
        """Judges all columns that are complete, and streams them."""
        sequences = self.sequences
        while not self.all_finished and all(
            done or length > self.judged for done, length in zip(self.ended(), sequences.lengths, strict=True)
        ):
            self.judged += 1
            for row, ended in enumerate(self.ended()):
                if ended and self.pad_token is not None:
                    sequences.fill(row, self.judged - 1, self.pad_token)
            ids = sequences.columns(self.judged).contiguous()  # criteria may flatten them
            self.recorder.add_column(self.ended())
            stops = self.criteria(ids, self.recorder.get("scores"))
            if self.streamer is not None:
                self.streamer.put(ids[:, -1].to("cpu", copy=True))  # the streamer may write into it
            stops = torch.as_tensor(stops, device="cpu").expand(sequences.batch_size).tolist()
            for row, stop in enumerate(stops):
                if stop and not self.finished[row]:
                    self.finished[row] = True
                    if self.pads_finished_rows:
                        sequences.finish(row, self.judged)

    def ended(self) -> list[bool]:
        """Whether each row gets padding from now on."""
        return self.finished if self.pads_finished_rows else [False] * len(self.finished)


def have_end_tokens(criteria: StoppingCriteriaList) -> bool:
    """Whether plain `generate` takes one of the criteria for one of end tokens, and so pads rows that have ended."""
    return any(hasattr(criterion, "eos_token_id") for criterion in criteria)
