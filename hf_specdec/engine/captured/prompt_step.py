"""A captured prefill step: forwards of target and head, and the first new token of requests that end in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...forwards.node_inputs import causal_chain
from ...graphs import Branch
from ...trees import DraftTree, Topology
from ...verification import Verifier, Walk, rows_with_nan
from ..request import Request
from .captured import CapturedStep
from .keys import StepSize
from .log_probabilities import CapturedLogprobs, LogprobsOfRun
from .outcome import error_of
from .reports import HostCopy
from .staged_rows import RowValues
from .walks import RowWalks


if TYPE_CHECKING:
    from ...drafters import Drafting
    from ...drafters.captured import CapturedDraft
    from ...forwards.features import Features
    from ..target import InFlightTarget


class PromptStep(CapturedStep):
    """
    A captured prefill step, which forwards a chunk of each row. The rows' tails have the chunk's tokens and the next.

    Args:
        target (`InFlightTarget`), drafting (`Drafting`): the engine's target and draft.
        size (`StepSize`): number of rows, and of blocks and tokens per row; `size.lag` is the chunk width plus one.
        has_head (`bool`): whether an EAGLE head reads the chunk as well.
        compiles (`bool`): whether forwards are compiled before the capture.
        kinds (`frozenset[Verifier]`), best (`int`, *optional*), processing (`frozenset[str]`): see `StepKind`.
    """

    is_vital = False

    def __init__(
        self,
        target: InFlightTarget,
        drafting: Drafting,
        size: StepSize,
        has_head: bool,
        compiles: bool,
        kinds: frozenset[Verifier],
        best: int | None = None,
        processing: frozenset[str] = frozenset(),
    ):
        super().__init__(target, drafting, size, processing)
        self.compiles = compiles
        self._store = drafting.features
        self._walks = RowWalks(self.rows, kinds, is_filtered=True, processing=processing)
        self._head: CapturedDraft | None = None
        if has_head:
            assert drafting.captured_draft is not None  # only heads that can be captured read in a step
            self._head = drafting.captured_draft(drafting, None, self.rows, None)
        # Tensors cached elsewhere, and held here because the graph needs them as long as it lives.
        self._held: object = Topology.of_tree(None, target.device)
        self._report = torch.zeros(size.rows, 3, dtype=torch.long, device=target.device)
        self._logprobs = None if best is None else CapturedLogprobs(self.rows, best, self._walks.processing)

    @property
    def _purpose(self) -> str:
        return f"a prefill of {self.rows.size.lag - 1} tokens"

    def _let_models_go(self) -> None:
        super()._let_models_go()
        self._held = [self._held, None if self._head is None else self._head.without_drafter()]
        self._head = None

    def _run(self) -> list[torch.Tensor]:
        rows, width = self.rows, self.rows.size.lag - 1
        tokens, starts, last = rows.tail[:, :width], rows.lengths - rows.counts, rows.counts[:, None] - 1
        # Padding is at the position of a row's last token: the model may know no later position.
        depths = torch.arange(width, device=rows.device).minimum(last)
        self._cache.write_tables = self._cache.writable_tables()
        if self._head is not None:
            self._head.write_as(self._cache)
        self._cache.at(starts)
        branch = Branch(rows.device)
        with self._target.recorded_features(on_add=branch.begin) as watched:
            chain = causal_chain(width, rows.device)
            logits = self._forward(tokens, *chain, position_depths=depths, logits_to_keep=last[:, 0]).logits
            if watched is not None and self._head is not None:
                with branch.running():  # beside the target's last layers
                    self._read_by_head(self._head, starts, watched, depths, last)
        kept = torch.arange(len(logits), device=rows.device)[:, None]  # each row's own, of the rows' last tokens
        if logits.shape[1] == width != len(logits):  # some models always return all logits
            kept = last
        logits = logits.gather(1, kept[:, :, None].expand(-1, 1, logits.shape[2]))
        roots, draft = tokens.gather(1, last), DraftTree.empty(rows.size.rows, rows.device)
        path, accepted, next_tokens, chosen_from = self._walks.walk(logits, draft, roots)
        highest = logits.amax(dim=-1)
        is_nan = rows_with_nan(logits, highest)
        highest = highest if chosen_from is logits else chosen_from.amax(dim=-1)
        accepted = self._walks.checked(highest, path, accepted)
        self._report.copy_(self._ranks.agree(torch.stack([accepted, is_nan, next_tokens], dim=1)))
        if self._logprobs is not None:
            self._logprobs.note(logits, path, self._report[:, 2:])
        return [self._report]

    def _read_by_head(
        self,
        head: CapturedDraft,
        starts: torch.Tensor,
        watched: Features,
        depths: torch.Tensor,
        last: torch.Tensor,
    ) -> None:
        """
        Lets the head read the chunk, whose hidden states `watched` has recorded. The feature of a prompt's last token
        is put into the store, where it waits.
        """
        store = self._store
        assert store is not None  # `has_head`: its features wait there
        features = watched.take(store.held.device, store.held.dtype)
        if head.forward is not None:
            self._compile(head.forward)
        rows = self.rows
        ends = rows.kinds != Verifier.RESTS  # no token is after the last one of a text
        head.read(starts, rows.tail[:, 1:], features, rows.counts - ends.long(), depths)
        of_last = features.gather(1, last[:, :, None].expand(-1, 1, features.shape[2]))[:, 0]
        store.held.view(-1, store.held.shape[2]).index_copy_(0, self.rows.slots, of_last)

    def load(self, requests: list[Request], values: RowValues, starts: list[int] | None = None) -> None:
        super().load(requests, values, starts)
        if self._logprobs is not None:
            self._logprobs.load(requests)

    def launch(self) -> PromptReport:
        """
        Starts the step for the loaded rows and does not wait for it. Returns the copy of its report that is on its way
        to the host.
        """
        self._replay()
        report = HostCopy(self._report)  # the next launch may be before this one is read
        report.start()
        return PromptReport(report, None if self._logprobs is None else self._logprobs.copy())


class PromptReport(NamedTuple):
    """
    What a captured prefill step reports.

    Args:
        of_rows (`HostCopy` of `[rows, 3]`, int64): 0 (-1 for a resting row, or `NOTHING_TO_DRAW`), whether the logits
            have NaN, and the next token.
        logprobs (`LogprobsOfRun`, *optional*): those of the next tokens, if any request asks for them.
    """

    of_rows: HostCopy
    logprobs: LogprobsOfRun | None = None


@dataclass(frozen=True)
class LaunchedPrompts:
    """
    A launched prefill step in which the prefill of some requests ends.

    Args:
        requests (`list[Request]`): the requests whose prefill ends.
        rows (`list[int]`): the rows of these requests.
        report (`PromptReport`): the step's report.
    """

    requests: list[Request]
    rows: list[int]
    report: PromptReport

    def walk(self) -> Walk:
        """Waits for the device and returns the first new token of each request; requests with an error fail."""
        report, found = self.report.of_rows.read(), Walk.start(len(self.requests), list(range(len(self.requests))))
        for place, (request, row) in enumerate(zip(self.requests, self.rows, strict=True)):
            accepted, is_nan, token = report[row]
            error = error_of(accepted, is_nan)
            if error is not None:
                request.fail(error)
            else:
                found.tokens[place] = [token]
                if self.report.logprobs is not None:
                    request.logprobs += self.report.logprobs.of(request, row)
        return found
