"""Accepting the draft tokens of a step that runs phase by phase: one walk over the trees of all requests."""

from __future__ import annotations

from typing import Any

import torch

from ..ranks import Ranks
from ..trees import DraftTree
from ..verification import NAN_LOGITS, TargetDistribution, Verifier, Walk, rows_with_nan
from .bookkeeping import Bookkeeping
from .captured import DraftGroup
from .log_probabilities import StepLogprobs
from .request import Request
from .temperatures import DraftTemperatures


class Acceptance:
    """
    Decides which nodes requests accept, and which token comes after them, by the verifiers of `generate`.

    Args:
        ranks (`Ranks`): the processes that make the same steps.
        bookkeeping (`Bookkeeping`): takes note of rows that a draft has spoiled.
        temperatures (`DraftTemperatures`): draft temperatures, which learn from what is accepted.
    """

    def __init__(self, ranks: Ranks, bookkeeping: Bookkeeping, temperatures: DraftTemperatures):
        self._ranks, self._bookkeeping, self._temperatures = ranks, bookkeeping, temperatures

    def accept(
        self, requests: list[Request], draft: DraftTree, groups: list[DraftGroup], logits: torch.Tensor
    ) -> Walk:
        """
        Walks from the root of each request's tree. Accepted tokens are appended to the requests, the last one is not.
        Requests with NaN, or whose processors or criteria raise, fail.

        Args:
            requests (`list[Request]`): the rows.
            draft (`DraftTree`): their trees.
            groups (`list[DraftGroup]`): the rows that were drafted for.
            logits (`torch.Tensor` of shape `[rows, nodes + 1, vocab]`): the target's logits.
        """
        logprobs = StepLogprobs(requests, logits)
        distribution = TargetDistribution(requests, logits, self._ranks.agree, logprobs.record)
        spoiled = _spoiled_rows(requests, draft, logits)
        self._bookkeeping.refuse_spoiled([(requests[row], draft.num_valid(row)) for row in spoiled])
        left = {row for row, request in enumerate(requests) if not request.is_over} - spoiled
        parts: list[tuple[Verifier, list[int], Any]] = []
        for group in groups if draft.num_nodes > 0 else ():
            is_drawn = group.draft_request.plan.draws_children
            drawn = [row for row in group.rows if requests[row].options.verifier(is_drawn) == Verifier.REJECTION]
            rows = [row for row in drawn if row in left]
            if rows:
                parts.append((Verifier.REJECTION, rows, self._temperatures.observer(group.draft_request.temperature)))
                left -= set(rows)
        for verifier in (Verifier.GREEDY, Verifier.FROM_TARGET, Verifier.BY_POSITION):
            rows = sorted(row for row in left if requests[row].options.verifier(False) == verifier)
            parts += [(verifier, rows, None)] if rows else []
        walk = Walk.start(len(requests), [])
        for verifier, rows, observe in parts:
            found = verifier.walk(draft, distribution, rows, observe)
            for row in rows:
                walk.paths[row], walk.tokens[row] = found.paths[row], found.tokens[row]
        self._temperatures.end_step()
        logprobs.give(walk)
        return walk


def _spoiled_rows(requests: list[Request], draft: DraftTree, logits: torch.Tensor) -> set[int]:
    """Rows that a draft token may have spoiled (`rows_with_nan`); requests with NaN and no draft tokens fail."""
    rows = {row for row, has_nan in enumerate(rows_with_nan(logits).tolist()) if has_nan}
    for row in [row for row in rows if draft.num_valid(row) == 0]:
        requests[row].fail(NAN_LOGITS)
        rows.remove(row)
    return rows
