"""A step that the host runs phase by phase: propose → score → accept → commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from transformers.utils import ModelOutput

from ..metrics import SpeculationMetrics
from ..ranks import Ranks
from ..trees import DraftTree
from ..trees.forced import forced_chain, with_forced
from ..trees.joining import join_drafts
from ..verification import Walk
from .captured import DraftGroup
from .request import Request


if TYPE_CHECKING:
    from .engine import Engine


class HostStep(Protocol):
    """The phases of a step, for the rows of a call or for requests in flight."""

    metrics: SpeculationMetrics
    ranks: Ranks

    def propose(self) -> DraftTree:
        """The tree of every row; without nodes if none is drafted for."""

    def score(self, draft: DraftTree) -> tuple[DraftTree, ModelOutput]:
        """The output of the target's forward over roots and nodes, and the tree that was forwarded."""

    def accept(self, draft: DraftTree, outputs: ModelOutput) -> Walk:
        """Walks down the trees of all rows."""

    def commit(self, draft: DraftTree, walk: Walk, outputs: ModelOutput) -> None:
        """Commits tokens and K/V of the accepted nodes."""

    def learn(self, draft: DraftTree, walk: Walk, propose: float, rest: float) -> None:
        """Lets the choice of trees learn from the step, and from the seconds that it took."""


def run(step: HostStep, before: Mapping[str, float] | None = None) -> None:
    """Runs a step. `before`: the seconds of all phases before it, if some of it has run already."""
    phase, seconds = step.metrics.phase, step.metrics.seconds
    before = dict(seconds) if before is None else before
    with phase("propose"):
        draft = step.propose()
    with phase("score"):
        draft, outputs = step.score(draft)
    with phase("accept"):
        walk = step.accept(draft, outputs)
    with phase("commit"):
        step.commit(draft, walk, outputs)
    spent = {name: total - before.get(name, 0.0) for name, total in seconds.items() if name != "steps"}
    propose = spent.pop("propose")
    step.learn(draft, walk, propose, sum(spent.values()))


class RequestStep:
    """
    A step of requests in flight.

    Args:
        engine (`Engine`): runs the requests.
        requests (`list[Request]`): the rows.
        groups (`list[DraftGroup]`): the rows that are drafted for.
    """

    def __init__(self, engine: Engine, requests: list[Request], groups: list[DraftGroup]):
        self._engine, self._requests, self._groups = engine, requests, groups
        self.metrics, self.ranks = engine.metrics, engine.ranks

    def propose(self) -> DraftTree:
        engine, requests, parts = self._engine, self._requests, []
        for group in self._groups:
            draft_request = group.draft_request
            noises = [noise for row in group.rows if (noise := requests[row].noise) is not None]
            if len(noises) == len(group.rows):
                draft_request = replace(draft_request, noises=noises)
            grammars = [requests[row].options.grammar for row in group.rows]
            if any(grammars):
                draft_request = replace(draft_request, grammars=grammars)
            draft = engine.drafting.propose([requests[row] for row in group.rows], draft_request)
            if draft is not None:
                parts.append((group.rows, draft))
        device = engine.target.device
        draft = join_drafts(parts, len(requests), device) if parts else DraftTree.empty(len(requests), device)
        return self._with_forced(self.ranks.agree_on_draft(draft) if parts else draft)

    def _with_forced(self, draft: DraftTree) -> DraftTree:
        """The trees with the tokens that grammars ask for, in rows that have blocks for them."""
        engine, missing = self._engine, {}
        for row, request in enumerate(self._requests if engine.speculates else ()):
            mask, options = request.options.grammar, request.options
            if mask is None or options.plan is None or request.is_over or request.draft_backoff.left:
                continue
            node, chain = forced_chain(draft, row, partial(mask.forced, request.new_tokens), request.room)
            if chain and engine.pool.reserve(request.table, request.length + draft.num_nodes + len(chain)):
                missing[row] = node, chain
        return with_forced(draft, missing) if missing else draft

    def score(self, draft: DraftTree) -> tuple[DraftTree, ModelOutput]:
        return self._engine.target.score(self._requests, draft)

    def accept(self, draft: DraftTree, outputs: ModelOutput) -> Walk:
        return self._engine.acceptance.accept(self._requests, draft, self._groups, outputs.logits)

    def commit(self, draft: DraftTree, walk: Walk, outputs: ModelOutput) -> None:
        engine, requests, bookkeeping = self._engine, self._requests, self._engine.bookkeeping
        drafted = {row for group in self._groups for row in group.rows}
        drafted |= {row for row, request in enumerate(requests) if request.options.grammar and draft.num_valid(row)}
        bookkeeping.append_last(requests, walk)
        for row, (request, path) in enumerate(zip(requests, walk.paths, strict=True)):
            if path is not None:
                bookkeeping.count(request, len(path), draft.num_valid(row) if row in drafted else None)
        engine.target.cache.keep(walk.paths)
        engine.drafting.observe(requests, [[] if path is None else [0, *path] for path in walk.paths])
        bookkeeping.mark_nan_of_failed(requests)

    def learn(self, draft: DraftTree, walk: Walk, propose: float, rest: float) -> None:
        if self._engine.speculates:
            drafted, paths = draft.within_drafted(walk.paths)
            self._engine.choices.end_step(drafted, paths, *self.ranks.agree_on(propose, rest))
