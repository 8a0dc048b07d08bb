"""A whole step of requests in flight, captured once for a size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ...kernels import Compaction
from ...trees import DynamicTree, TokenTree
from ...verification import DraftTemperature
from .captured import CapturedStep
from .drafts import InFlightPart, NoPart
from .rows import Kind, Size
from .walks import Walks


if TYPE_CHECKING:
    from ...drafters import DraftRequest
    from ..drafting import Drafting
    from ..target import InFlightTarget


@dataclass(frozen=True)
class StepKind:
    """
    What of a step is the same for all requests that it can serve.

    Args:
        tree (`TokenTree` or `DynamicTree`, *optional*): what the draft grows; None: nothing.
        kinds (`frozenset[Kind]`): how rows find their tokens.
        draws (`bool`): whether children are drawn.
        is_filtered (`bool`): whether they are drawn from what the top-k and top-p of rows leave.
        reads (`bool`): whether a head reads what waits, without a tree.
        compiles (`bool`): whether forwards are compiled first.
    """

    tree: TokenTree | DynamicTree | None
    kinds: frozenset[Kind]
    draws: bool = False
    is_filtered: bool = False
    reads: bool = False
    compiles: bool = False

    @property
    def done_by(self) -> tuple[StepKind, ...]:
        """Kinds whose steps can serve its rows: also the one that filters, which does nothing to rows without."""
        return (self, replace(self, is_filtered=True)) if self.draws and not self.is_filtered else (self,)


class InFlightStep(CapturedStep):
    """
    A whole step: the draft, the target's forward, the walk, and the commit.

    Args:
        target (`InFlightTarget`), drafting (`Drafting`): those of the engine.
        kind (`StepKind`): what the step does.
        size (`Size`): what it has room for.
        request (`DraftRequest`, *optional*): what the draft is asked; None without a tree.
    """

    def __init__(
        self, target: InFlightTarget, drafting: Drafting, kind: StepKind, size: Size, request: DraftRequest | None
    ):
        super().__init__(target, size)
        self.kind, device = kind, target.device
        part = drafting.part if kind.reads or kind.tree is not None else NoPart
        assert part is not None  # nobody asks for the trees of a draft without one
        self.part: InFlightPart = part(drafting, kind.tree, self.rows, request)
        self._walks = Walks(self.rows, kind.kinds, self.part.drafter if kind.draws else None, kind.is_filtered)
        self._drawing = self._walks.drawing
        self._compactions = Compaction.of(target.cache.layers) if size.depth > 0 else []  # roots are where they belong
        width = 3 + 2 * (size.depth + 1) + (0 if self._drawing is None else len(DraftTemperature.GRID))
        self._report = torch.zeros(size.rows, width, dtype=torch.long, device=device)
        self._on_host = torch.zeros(self._report.shape, dtype=torch.long, pin_memory=device.type == "cuda")
        self._store = drafting.features
        self.features: torch.Tensor | None = None
        """
        What is watched of the target, of the root and the accepted nodes, `[rows, depth + 1, size]`; None if nothing
        is, or it goes to where the rows' features wait, behind those that are left there.
        """

    @property
    def compiles(self) -> bool:  # type: ignore[override]
        return self.kind.compiles

    def _run(self) -> list[torch.Tensor]:
        forward, cache = self._forward, self._cache
        if self.part.drafter is not None:
            self._compile(self.part.drafter.forward)
        rows, depth = self.rows, self.rows.size.depth
        draft = self.part.propose(None if self._drawing is None else self._drawing.warp)
        topology = draft.topology
        counts = topology.depths <= rows.room[:, None]
        if draft.valid is not None:
            counts = counts & torch.nn.functional.pad(draft.valid, (1, 0), value=True)
        # Nodes that do not count are the root again: what was drafted there may be any token.
        tokens = torch.where(counts, torch.cat([rows.roots, draft.tokens], dim=1), rows.roots)
        cache.at(rows.lengths - 1)
        features = None
        with self._target.recorded_features() as watched:
            # Nodes that do not count may lie past the last position that the model knows.
            depths = topology.depths * counts
            logits = forward(tokens, topology.ancestors, topology.depths, position_depths=depths).logits
            if watched is not None:
                features = watched.take(rows.device, logits.dtype)
        path, accepted, next_tokens = self._walks.walk(logits, draft, tokens.masked_fill(~counts, -1))
        for compaction in self._compactions:
            compaction(rows.lengths - 1, path, accepted, rows.tables)
        places = torch.arange(depth + 1, device=rows.device)
        if features is not None:
            kept = features.gather(1, path[:, :, None].expand(-1, -1, features.shape[2])) if depth > 0 else features
            if self._store is not None:
                held = self._store.held.flatten(0, 1)
                held.index_copy_(0, (rows.slots[:, None] + places).flatten(), kept.flatten(0, 1).to(held))
            else:
                if self.features is None:
                    self.features = torch.empty_like(kept)
                self.features.copy_(kept)
        new = next_tokens[:, None]
        if depth > 0:
            on_path = torch.nn.functional.pad(tokens.gather(1, path)[:, 1:], (0, 1), value=-1)
            on_path = torch.where(places < accepted[:, None], on_path, -1)
            new = torch.where(places == accepted[:, None], new, on_path)
        is_nan = logits.amax(dim=-1).isnan().any(dim=1)
        drafted = counts[:, 1:].expand(len(path), -1).sum(dim=1)
        accepted = self._walks.checked(logits, path, accepted)
        report = [torch.stack([accepted, drafted, is_nan], dim=1), path, new]
        if self._drawing is not None:
            report.append(self._drawing.reported_overlaps(logits[:, 0], draft))
        self._report.copy_(torch.cat(report, dim=1))
        return [self._report]

    def launch(self) -> None:
        """Lets the device begin with the rows that were loaded."""
        self._replay()
        self._on_host.copy_(self._report, non_blocking=True)

    def report(self) -> list[list[int]]:
        """
        What came of them, once the device is done. For each row: accepted nodes (-1 if it rested, or
        `NOTHING_TO_DRAW`), draft tokens that counted, whether there is NaN among its logits; the nodes of the path,
        the root's first, and the new tokens, with -1 behind them, `depth + 1` each; where children were drawn,
        `Drawing.reported_overlaps`.
        """
        if self._report.device.type == "cuda":
            torch.cuda.current_stream(self._report.device).synchronize()
        return self._on_host.tolist()
