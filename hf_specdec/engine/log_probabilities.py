"""The log-probabilities of the tokens that a step on the host gives to requests which ask for them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..verification import Walk
from ..verification.log_probabilities import log_probabilities, token_logprobs
from .request import Request


class StepLogprobs:
    """
    Finds the log-probabilities of a step's tokens. A token was chosen at the parent of the node that holds it: the
    scores of the model are those of that node, and p is recorded as the walk stands there.

    Args:
        requests (`list[Request]`): the rows.
        logits (`torch.Tensor` of shape `[rows, nodes + 1, vocab]`): the target's logits.
    """

    def __init__(self, requests: list[Request], logits: torch.Tensor):
        self._requests, self._logits = requests, logits
        self._asking = {
            row: request.options.logprobs
            for row, request in enumerate(requests)
            if request.options.logprobs is not None
        }
        self._scores: dict[int, list[torch.Tensor]] = {
            row: []
            for row, options in self._asking.items()
            if options.mode == "processed" and requests[row].options.processors
        }

    @property
    def record(self) -> Callable[[int, torch.Tensor, torch.Tensor], None] | None:
        """Takes the scores of every token chosen; see `TargetDistribution`. None if no row has need of it."""
        return self._note if self._scores else None

    def _note(self, row: int, logits: torch.Tensor, scores: torch.Tensor) -> None:
        if row in self._scores:
            self._scores[row].append(scores)

    def give(self, walk: Walk) -> None:
        """Gives requests the log-probabilities of the tokens that walks have given them."""
        if not self._asking:
            return
        most = max(options.best for options in self._asking.values())
        rows = [row for row in self._asking if walk.tokens[row] and self._requests[row].error is None]
        found = [log_probabilities(self._scores_of(row, walk), self._tokens_of(row, walk), most) for row in rows]
        if not rows:
            return
        values, best = torch.cat([one for one, _ in found]).tolist(), torch.cat([one for _, one in found]).tolist()
        start = 0
        for row in rows:
            own = slice(start, start := start + len(walk.tokens[row]))
            self._requests[row].logprobs += token_logprobs(values[own], best[own], self._asking[row].best)

    def _scores_of(self, row: int, walk: Walk) -> torch.Tensor:
        """The scores from which a row's tokens were chosen, `[tokens, vocab]`."""
        count = len(walk.tokens[row])
        if row in self._scores:
            return torch.cat(self._scores[row][:count])
        return self._logits[row, [0, *(walk.paths[row] or [])][:count]]

    def _tokens_of(self, row: int, walk: Walk) -> torch.Tensor:
        return torch.tensor(walk.tokens[row], device=self._logits.device)
