"""Log-probabilities of the tokens of a captured step, at the nodes of the accepted path alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...verification.log_probabilities import MOST_BEST, TokenLogprob, log_probabilities, token_logprobs
from .nodes import Places
from .processing import Processing
from .reports import HostCopy, Reports


if TYPE_CHECKING:
    from ..request import Request
    from .rows import InFlightRows


class LogprobsOfRun:
    """
    What a run of a step has found, on the host.

    Args:
        found (`HostCopy` of `[rows, depth + 1, 1 + 2 * best]`, int32): the copy that is on its way.
        best (`int`): number of best tokens.
    """

    def __init__(self, found: HostCopy, best: int):
        self._found, self._best = found, best

    def of(self, request: Request, row: int) -> list[TokenLogprob]:
        """A row's log-probabilities, for each level of the step and one more; empty if it asks for none. Waits."""
        wanted = request.options.logprobs
        if wanted is None:
            return []
        found = self._found.read_tensor()[row]
        values, tokens = found[:, : 1 + self._best].contiguous().view(torch.float32), found[:, 1 + self._best :]
        return token_logprobs(values.tolist(), tokens.tolist(), wanted.best)


class CapturedLogprobs:
    """
    Finds the log-probabilities of a step's new tokens on the device and copies them to the host, beside the report.

    Args:
        rows (`InFlightRows`): the step's rows.
        best (`int`): number of best tokens in the place of every new one.
        processing (`Processing`, *optional*): what rows' processors do with the logits; None for nothing.
    """

    def __init__(self, rows: InFlightRows, best: int, processing: Processing | None):
        self._rows, self._best, self._processing = rows, best, processing
        shape = rows.size.rows, rows.size.depth + 1, 1 + 2 * best
        self._is_raw = torch.zeros(rows.size.rows, dtype=torch.bool, device=rows.device)
        self._found = torch.zeros(shape, dtype=torch.int32, device=rows.device)
        self._reports = Reports(self._found)

    def load(self, requests: list[Request]) -> None:
        """Copies to the device which rows ask for the log-probabilities of the model's own output."""
        wanted = [request.options.logprobs for request in requests]
        are_raw = [one is not None and one.mode == "raw" for one in wanted]
        self._is_raw[: len(requests)].copy_(torch.tensor(are_raw, device="cpu"))
        self._reports.forget()

    def note(self, logits: torch.Tensor, path: torch.Tensor, new: torch.Tensor) -> None:
        """
        Finds them, within the captured step. A token was chosen at the node before it on the path.

        Args:
            logits (`torch.Tensor` of shape `[rows, nodes + 1, vocab]`): the target's logits.
            path (`torch.Tensor` of shape `[rows, depth + 1]`, int64): the root and the accepted nodes, padded.
            new (`torch.Tensor` of shape `[rows, depth + 1]`, int64): the new tokens, padded with -1.
        """
        for level in range(path.shape[1]):  # one by one: the logits of all levels may be large
            node = path[:, level, None, None].expand(-1, 1, logits.shape[2])
            scores = self._chosen_from(logits.gather(1, node), Places.of_path(new, level))[:, 0]
            values, best = log_probabilities(scores, new[:, level].clamp(min=0), self._best)
            self._found[:, level].copy_(torch.cat([values.view(torch.int32), best.int()], dim=1))

    def _chosen_from(self, logits: torch.Tensor, places: Places) -> torch.Tensor:
        """Scores from which the rows' tokens were chosen, or the logits of raw rows, `[rows, 1, vocab]`."""
        if self._processing is None:
            return logits
        processed = self._processing(logits, places).float()
        processed = processed / self._rows.temperature[:, None, None]
        return torch.where(self._is_raw[:, None, None], logits.float(), processed)

    def fetch(self) -> None:
        """Starts a copy of what the last launched run finds. Does not wait."""
        self._reports.fetch()

    def next(self) -> LogprobsOfRun:
        """What the first run has found that has not been taken; to be read before the next but one is launched."""
        return LogprobsOfRun(self._reports.next(), self._best)

    def copy(self) -> LogprobsOfRun:
        """What the last launched run finds, in memory of its own: later runs do not overwrite it."""
        copy = HostCopy(self._found)
        copy.start()
        return LogprobsOfRun(copy, self._best)


def best_asked(requests: Sequence[Request]) -> int | None:
    """
    Number of best tokens for which a captured step of these requests has room: none or `MOST_BEST`, so that there are
    few graphs. None if no request asks for log-probabilities.
    """
    wanted = [request.options.logprobs for request in requests if request.options.logprobs is not None]
    if not wanted:
        return None
    return MOST_BEST if any(one.best for one in wanted) else 0
