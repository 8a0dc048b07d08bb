"""A captured decoding step of requests in flight."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...cache.compaction import Compaction
from ...cache.last_features import LastFeatures
from ...compiling.layers import compiled_function
from ...drafters.captured import CapturedDraft, NoDraft
from ...trees import DraftTree
from ...verification import DraftTemperature, Verifier, new_tokens, rows_with_nan
from .captured import CapturedStep
from .grammars import force
from .keys import StepKey
from .log_probabilities import CapturedLogprobs, LogprobsOfRun
from .reports import Reports
from .reshaping import confidence_columns, num_columns, offered_columns
from .staged_rows import RowValues
from .walks import RowWalks


if TYPE_CHECKING:
    from ...drafters import Drafting, DraftRequest
    from ..request import Request
    from ..target import InFlightTarget


class _Nodes(NamedTuple):
    """
    The nodes of a step's forward, `[rows, nodes + 1]` each.

    Args:
        tokens (`torch.Tensor`, int64): their tokens; the root's in place of those that are not usable.
        walked (`torch.Tensor`, int64): their tokens as walks see them, -1 for those that are not usable.
        depths (`torch.Tensor`, int64): their depths, which say their positions; 0 for those that are not usable.
        usable (`torch.Tensor`, bool, *optional*): which of them count; None for roots alone.
        drafted (`torch.Tensor` of shape `[rows]`, int64): number of each row's draft tokens.
    """

    tokens: torch.Tensor
    walked: torch.Tensor
    depths: torch.Tensor
    usable: torch.Tensor | None
    drafted: torch.Tensor


class InFlightStep(CapturedStep):
    """
    A captured decoding step: the draft, the target's forward, the walk, and the commit.

    Args:
        target (`InFlightTarget`), drafting (`Drafting`): the engine's target and draft.
        key (`StepKey`): tree and kinds of verification of the step, and its size: the number of rows, and of blocks,
            levels and tokens per row, for which it has room.
        draft_request (`DraftRequest`, *optional*): options of the draft; None without a tree.
    """

    def __init__(self, target: InFlightTarget, drafting: Drafting, key: StepKey, draft_request: DraftRequest | None):
        kind, size = key
        super().__init__(target, drafting, size, kind.processing)
        self.kind, device = kind, target.device
        self.rows.has_grammars = kind.has_grammars
        self.draft: CapturedDraft = NoDraft(self.rows)
        if kind.reads or kind.tree is not None:
            assert drafting.captured_draft is not None  # only drafts that can be captured are asked for trees
            self.draft = drafting.captured_draft(drafting, kind.tree, self.rows, draft_request)
        drawn_by = self.draft.drafter if kind.draws else None
        self._walks = RowWalks(
            self.rows, kind.kinds, drawn_by, kind.is_filtered, kind.has_seeds, kind.processing, kind.by_position
        )
        self._drawing = self._walks.drawing
        self._learns = self._drawing is not None and not kind.by_position
        self._compactions = Compaction.of(target.cache.layers) if size.depth > 0 else []  # a root is in place
        width = 3 + 2 * (size.depth + 1) + (num_columns(size.depth, kind.shapes) if kind.reports_ranks else 0)
        width += len(DraftTemperature.GRID) if self._learns else 0
        self._report = torch.zeros(size.rows, width, dtype=torch.long, device=device)
        self._reports = Reports(self._report)
        self._logprobs: CapturedLogprobs | None = None
        if kind.best is not None:
            is_bare = kind.kinds == {Verifier.GREEDY} and not kind.processing
            self._logprobs = CapturedLogprobs(self.rows, kind.best, None if is_bare else self._walks.processing)
        self.launched_at = 0.0
        """When the last run was launched (`time.perf_counter`)."""
        self._store = drafting.features
        self._features: list[torch.Tensor] = []
        self._features_of_path: list[torch.Tensor] = []
        """Where rows have grammars, and the store holds the newest features alone: those of the accepted path."""
        self._logits: list[torch.Tensor] = []

    @property
    def features(self) -> torch.Tensor | None:
        """
        Recorded features of the target at the root and the accepted nodes, `[rows, depth + 1, size]`; None if none are
        recorded, or if they go to the draft's `PendingFeatures`, after the features that wait there.
        """
        return self._features[0] if self._features else None

    def logits_at(self, row: int, place: int) -> torch.Tensor:
        """Logits of the last run at a place of a row's accepted path, the root's first, `[vocab]`."""
        return self._logits[0][row, place]

    def keep_until(self, row: int, place: int, request: Request) -> None:
        """
        Takes note that a request takes the nodes of its row's accepted path in the last run only up to a place: a
        store of the newest features alone has that of this node, and not that of the last one which the run accepted.
        """
        if self._features_of_path:
            assert isinstance(self._store, LastFeatures)
            self._store.put_last([request], self._features_of_path[0][row, place][None])

    @property
    def compiles(self) -> bool:  # type: ignore[override]
        return self.kind.compiles

    @property
    def compiles_whole(self) -> bool:  # type: ignore[override]
        return self.kind.compiles_whole

    @property
    def _purpose(self) -> str:
        kind = self.kind
        if kind.reads:
            return f"a step in which a head reads {self.rows.size.lag - 1} features"
        how = "drawn" if kind.draws else "chosen"
        return "a step without a tree" if kind.tree is None else f"a step with {kind.tree.num_nodes} {how} nodes"

    def _let_models_go(self) -> None:
        super()._let_models_go()
        self.draft = self.draft.without_drafter()

    def _run(self) -> list[torch.Tensor]:
        rows, cache = self.rows, self._cache
        cache.write_tables = cache.writable_tables()
        draft, nodes = self._propose()
        logits, features = self._score(draft, nodes)
        highest = logits.amax(dim=-1)
        is_nan = rows_with_nan(logits, highest)
        if self.kind.has_grammars:
            highest = force(logits, highest, rows.forced, nodes.walked, draft.topology)
        *found, chosen_from = self._walks.walk(logits, draft, nodes.walked)
        path, accepted, next_tokens = self._ranks.agree_on_parts(found)
        new = self._commit(logits, features, nodes, path, accepted, next_tokens, is_nan)
        is_compiled = self.compiles and self.compiles_whole
        compiled: Any = compiled_function if is_compiled else lambda function: function
        highest = highest if chosen_from is logits else chosen_from.amax(dim=-1)
        accepted = self._walks.checked(highest, path, accepted, compiled)
        self._write_report(draft, nodes, logits, path, accepted, new, is_nan)
        cache.keep_states(path, accepted, is_nan)
        self.draft.leave(is_nan)
        if self.can_repeat:
            rows.advance(accepted, new, compiled)
        return [self._report]

    def _propose(self) -> tuple[DraftTree, _Nodes]:
        """The rows' trees, and the nodes of the target's forward."""
        self.draft.write_as(self._cache)
        if self.draft.forward is not None:
            self._compile(self.draft.forward)
        rows = self.rows
        draft = self.draft.propose(None if self._drawing is None else self._drawing.warp)
        draft = self._ranks.agree_on_draft(draft)
        if rows.size.depth == 0:
            tokens = rows.roots.contiguous()
            return draft, _Nodes(tokens, tokens, draft.topology.depths, None, torch.zeros_like(rows.lengths))
        usable = draft.usable(rows.room)
        # Nodes without room and invalid ones get the root's token: the drafted one may be any token.
        tokens = torch.where(usable, torch.cat([rows.roots, draft.tokens], dim=1), rows.roots)
        drafted = usable[:, 1:].expand(rows.size.rows, -1).sum(dim=1)
        return draft, _Nodes(tokens, tokens.masked_fill(~usable, -1), draft.topology.depths * usable, usable, drafted)

    def _score(self, draft: DraftTree, nodes: _Nodes) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The target's logits at the nodes, and its features, if these are recorded."""
        cache, topology, features = self._cache, draft.topology, None
        cache.at(self.rows.lengths - 1)
        if topology.is_static:
            cache.note_static(topology.ancestors)
        cache.max_depth = self.rows.size.depth
        with self._target.recorded_features(for_compiler=self.compiles_whole) as watched:
            logits = self._forward(
                nodes.tokens, topology.ancestors, topology.depths, position_depths=nodes.depths
            ).logits
            if watched is not None:
                features = watched.take(self.rows.device, logits.dtype)
        return logits, features

    def _commit(
        self,
        logits: torch.Tensor,
        features: torch.Tensor | None,
        nodes: _Nodes,
        path: torch.Tensor,
        accepted: torch.Tensor,
        next_tokens: torch.Tensor,
        is_nan: torch.Tensor,
    ) -> torch.Tensor:
        """Keeps what belongs to the accepted paths, and returns the rows' new tokens, `[rows, depth + 1]`."""
        rows, depth = self.rows, self.rows.size.depth
        for compaction in self._compactions:
            compaction(rows.lengths - 1, path, accepted, rows.tables)
        if self.kind.has_grammars:
            _keep(self._logits, _on_path(logits, path))
        new = new_tokens(nodes.tokens.gather(1, path), accepted, next_tokens) if depth > 0 else next_tokens[:, None]
        if self._logprobs is not None:
            self._logprobs.note(logits, path, new)
        if features is not None:
            kept = _on_path(features, path)
            if self._store is None:
                _keep(self._features, kept)
            else:
                if self.kind.has_grammars and not self._store.slot_step:
                    _keep(self._features_of_path, kept)
                self._store.write(rows.slots, kept, accepted.masked_fill(is_nan, -1))
        return new

    def _write_report(
        self,
        draft: DraftTree,
        nodes: _Nodes,
        logits: torch.Tensor,
        path: torch.Tensor,
        accepted: torch.Tensor,
        new: torch.Tensor,
        is_nan: torch.Tensor,
    ) -> None:
        """Writes what `report` reads."""
        report = [torch.stack([accepted, nodes.drafted, is_nan], dim=1), path, new]
        if self.kind.reports_ranks:
            report += [] if self.draft.confidences is None else [confidence_columns(self.draft.confidences)]
            assert nodes.usable is not None  # a step without a tree offers nothing
            report.append(offered_columns(path, draft.topology.parents, nodes.usable))
        if self._drawing is not None and self._learns:
            report.append(self._drawing.reported_overlaps(logits[:, 0], draft))
        self._report.copy_(self._ranks.agree(torch.cat(report, dim=1)))

    @property
    def can_repeat(self) -> bool:
        """Whether the step can run again for rows that have moved on, with nothing but their block tables loaded."""
        return not self.kind.reads and self.features is None

    def load(self, requests: list[Request], values: RowValues, starts: list[int] | None = None) -> None:
        self._reports.forget()  # of steps that ended in an exception
        if self._logprobs is not None:
            self._logprobs.load(requests)
        super().load(requests, values, starts)

    def load_changes(self, requests: list[Request], draft_temperature: list[float]) -> None:
        """Copies what the host changes between two runs for the same rows; see `InFlightRows.load_changes`."""
        # Those that have ended are read no more, but may be handed back to a caller.
        tables = [request.table for request in requests if not request.is_over]
        for cache in self._caches:
            cache.clean(tables)
        self.rows.load_changes(requests, draft_temperature)

    def launch(self) -> None:
        """Starts the step for the loaded rows, or for rows that its last run has moved on. Does not wait for it."""
        self.launched_at = time.perf_counter()
        self._replay()
        self._reports.fetch()
        if self._logprobs is not None:
            self._logprobs.fetch()

    def report(self) -> list[list[int]]:
        """
        Waits for the first run whose report has not been read, which is the last or the last but one, and returns the
        report of each row, a list of integers: the number of accepted nodes (-1
        for a resting row, or `NOTHING_TO_DRAW`), the number of valid draft tokens, whether the logits have NaN; the
        nodes of the path from the root on, and the new tokens, padded with -1, `depth + 1` each; where the step
        chose the tree's nodes, `confidence_columns` and `offered_columns`; and where children were drawn,
        `Drawing.reported_overlaps`.
        """
        return self._reports.next().read()

    def logprobs(self) -> LogprobsOfRun | None:
        """What the run has found whose report was read last; None if it finds nothing. To be called once a report."""
        return None if self._logprobs is None else self._logprobs.next()


def _on_path(values: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """Values of nodes, `[rows, nodes + 1, size]`, at the accepted nodes, `[rows, depth + 1, size]`."""
    return values.gather(1, path[:, :, None].expand(-1, -1, values.shape[2])) if path.shape[1] > 1 else values


def _keep(memory: list[torch.Tensor], values: torch.Tensor) -> None:
    """Copies values to an address that stays the same, of which there is memory from the first time on."""
    if not memory:
        memory.append(torch.empty_like(values))
    memory[0].copy_(values)
