"""A whole step of requests in flight, captured once for a size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...device_steps.drawing import Drawing
from ...device_steps.verdicts import Verdict
from ...forward import TreeForward
from ...graphs import Record
from ...kernels import Compaction
from ...trees import DraftTree, DynamicTree, TokenTree
from ...verification import DraftTemperature
from ..paged_cache import DevicePagedCache
from ..request import Request
from ..waiting_features import WaitingFeatures
from .drafts import InFlightPart, NoPart
from .rows import InFlightRows, Kind, Size


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
        is_filtered (`bool`): whether any row that draws has a top-k or top-p.
        draws (`bool`): whether children are drawn.
        compiles (`bool`): whether forwards are compiled first.
    """

    tree: TokenTree | DynamicTree | None
    kinds: frozenset[Kind]
    is_filtered: bool
    draws: bool
    compiles: bool = False


class InFlightStep:
    """
    Args:
        target (`InFlightTarget`), drafting (`Drafting`): those of the engine.
        kind (`StepKind`): what the step does.
        size (`Size`): what it has room for.
        request (`DraftRequest`, *optional*): what the draft is asked; None without a tree.
    """

    def __init__(
        self, target: InFlightTarget, drafting: Drafting, kind: StepKind, size: Size, request: DraftRequest | None
    ):
        device, self._target, self.kind = target.device, target, kind
        self.rows = InFlightRows(size, device)
        part = NoPart if kind.tree is None else drafting.part
        assert part is not None  # nobody asks for the trees of a draft without one
        self.part: InFlightPart = part(drafting, kind.tree, self.rows, request)
        self._drawing = None
        rows = self.rows
        filters = {"top_k": rows.top_k, "top_p": rows.top_p} if kind.is_filtered else {}
        self._warpers: dict[str, torch.Tensor] = {"temperature": rows.temperature} | filters
        if kind.draws:
            self._drawing = Drawing(self.part.drafter, rows.sharpness, **self._warpers)
        self._first_slots = torch.zeros(size.rows, dtype=torch.long, device=device)
        self._compactions = Compaction.of(target.cache.layers)
        width = 3 + 2 * (size.depth + 1) + (0 if self._drawing is None else len(DraftTemperature.GRID))
        self._report = torch.zeros(size.rows, width, dtype=torch.long, device=device)
        self._on_host = torch.zeros(self._report.shape, dtype=torch.long, pin_memory=device.type == "cuda")
        self.features: torch.Tensor | None = None
        """What is watched of the target, of the root and the accepted nodes, `[rows, depth + 1, size]`."""
        self._slots: torch.Tensor | None = None

    def capture(self, record: Record, pool: Any) -> None:
        """
        Captures the step. It runs for the rows that are loaded now, which may be done twice.

        Raises:
            RuntimeError: if it cannot be captured.
        """
        target, rows = self._target, self.rows
        cache = DevicePagedCache(target.cache, rows.tables)
        forward = target.forward.over(cache, self._first_slots, None, self._first_slots)
        forward.compiles = self.kind.compiles
        if self.part.drafter is not None:
            self.part.drafter.forward.compiles = self.kind.compiles

        def run() -> list[torch.Tensor]:
            return self._run(forward, cache)

        state = torch.cuda.get_rng_state(rows.device) if rows.device.type == "cuda" else torch.get_rng_state()
        try:
            self._replay, _ = record(run, rows.device, pool=pool)
        finally:
            if rows.device.type == "cuda":
                torch.cuda.set_rng_state(state, rows.device)
            else:
                torch.set_rng_state(state)

    def _run(self, forward: TreeForward, cache: DevicePagedCache) -> list[torch.Tensor]:
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
        with self._target.recorded_features(self.kind.compiles) as watched:
            # Nodes that do not count may lie past the last position that the model knows.
            depths = topology.depths * counts
            logits = forward(tokens, topology.ancestors, topology.depths, position_depths=depths).logits
            if watched is not None:
                features = watched.take(rows.device, logits.dtype)
        path, accepted, next_tokens = self._walk(logits, draft, tokens.masked_fill(~counts, -1))
        for compaction in self._compactions:
            compaction(rows.lengths - 1, path, accepted, rows.tables)
        if features is not None:
            kept = features.gather(1, path[:, :, None].expand(-1, -1, features.shape[2]))
            slots = (rows.slots[:, None] + torch.arange(depth + 1, device=rows.device)).flatten()
            if self.features is None or self._slots is None:
                self.features, self._slots = torch.empty_like(kept), torch.empty_like(slots)
            self.features.copy_(kept)
            self._slots.copy_(slots)
        places = torch.arange(depth + 1, device=rows.device)
        new = torch.nn.functional.pad(tokens.gather(1, path)[:, 1:], (0, 1), value=-1)
        new = torch.where(places < accepted[:, None], new, -1)
        new = torch.where(places == accepted[:, None], next_tokens[:, None], new)
        is_nan = logits.amax(dim=-1).isnan().any(dim=1)
        drafted = counts[:, 1:].expand(len(path), -1).sum(dim=1)
        accepted = self._checked(logits, path, accepted)
        report = [torch.stack([accepted, drafted, is_nan], dim=1), path, new]
        if self._drawing is not None:
            report.append(self._drawing.reported_overlaps(logits[:, 0], draft))
        self._report.copy_(torch.cat(report, dim=1))
        return [self._report]

    def _walk(self, logits: torch.Tensor, draft: DraftTree, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The walks of all rows, each of its own kind."""
        rows, found = self.rows, None
        for kind in sorted(self.kind.kinds):
            verdict = self._verdict(kind)
            is_own = rows.kinds == kind
            walks = verdict.walk(
                logits, tokens, draft, by_depth=rows.uniforms, max_depth=rows.size.depth, active=is_own
            )
            if found is None:
                found = tuple(walks)
            else:
                own = is_own[:, None]
                found = (
                    torch.where(own, walks.path, found[0]),
                    torch.where(is_own, walks.accepted, found[1]),
                    torch.where(is_own, walks.next_tokens, found[2]),
                )
        assert found is not None
        return found

    def _verdict(self, kind: Kind) -> Verdict:
        if kind == Kind.GREEDY:
            return Verdict("greedy")
        values: Any = {name: value if name == "top_k" else value.float() for name, value in self._warpers.items()}
        if kind == Kind.TARGET:
            return Verdict("target", **values)
        return Verdict("rejection", drawing=self._drawing, **values)

    def _checked(self, logits: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        draws = self.rows.kinds >= Kind.TARGET
        return torch.where(draws, Verdict("target").checked(logits, path, accepted), accepted)

    def keep_features(self, store: WaitingFeatures) -> None:
        """Puts the features of this step's tokens where its rows' wait, behind those that are left there."""
        assert self.features is not None and self._slots is not None
        flat = store.held.view(-1, store.held.shape[2])
        flat.index_copy_(0, self._slots.to(flat.device), self.features.flatten(0, 1).to(flat))

    def load(self, requests: list[Request], *values: Any) -> None:
        """Takes the rows of a step; see `InFlightRows.load`."""
        self.rows.load(requests, *values)

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
