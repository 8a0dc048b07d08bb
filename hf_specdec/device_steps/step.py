"""A whole step, captured once and replayed for the steps of other calls."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..cache import DeviceCache
from ..cache.compaction import Compaction
from ..graphs import Record
from ..random_generators import draws_undone
from ..trees import DynamicTree, TokenTree
from ..verification import DraftTemperature, rows_with_nan
from .drafts import PARTS, Padding
from .drawing import Drawing
from .rows import DeviceRows
from .verdicts import SPOILED, Verdict, Warpers


if TYPE_CHECKING:
    from ..drafters import Drafter
    from ..engine.sequences import Sequences
    from ..forwards.tree_forward import TreeForward
    from ..generation.target import Target


class DeviceStep:
    """
    A captured step. All that it reads lies at fixed addresses, to which `load` copies the state of a call.

    Args:
        target (`Target`), drafter (`Drafter`), sequences (`Sequences`), warpers (`Warpers`): state of a call after its
            prefill.
        kind (`str`): kind of the `Verdict`.
        draws (`bool`): whether children are drawn.
        tree (`TokenTree` or `DynamicTree`): tree of every step.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        sequences: Sequences,
        warpers: Warpers,
        kind: Literal["greedy", "target", "rejection"],
        draws: bool,
        tree: TokenTree | DynamicTree,
    ):
        device, batch_size = target.forward.device, sequences.batch_size
        width = 2 + tree.depth + 1 + (len(DraftTemperature.GRID) if draws else 0)
        self.rows = DeviceRows.of(batch_size, target.cache.capacity, sorted(sequences.end_tokens), width, device)
        values = warpers.tensors(batch_size, device)
        self.tree, self.drawing, self.is_compiled = tree, None, False
        self.of_draft = weakref.ref(drafter.cache.storage)
        """The store of the draft's K/V; the step itself is kept by that of the target's."""
        if draws:
            self.drawing = Drawing(drafter, torch.ones(batch_size, device=device), **values)
        self.verdict = Verdict(kind, drawing=self.drawing, **values)
        self.padding = Padding(target.cache, target.forward)
        self.part = PARTS[type(drafter)](drafter, tree)
        self.compactions = Compaction.of(target.cache.layers)
        self.load(target, drafter, sequences, warpers)

    def capture(self, target: Target, drafter: Drafter, compiles: bool, record: Record) -> None:
        """
        Captures the step, over the state of the call with which it was made; `replay` then runs it.

        Args:
            target (`Target`), drafter (`Drafter`): of that call; not kept.
            compiles (`bool`): whether forwards are compiled first.
            record (`Callable`): function that captures another one, see `record_cuda_graph`.

        Raises:
            RuntimeError: if the step cannot be captured.
        """
        cache, bound = DeviceCache(target.cache), self.part.bind(drafter)
        forward = self.padding.of(target.forward, cache)
        forward.compiles = bound.forward.compiles = compiles
        device = target.forward.device
        with draws_undone(device):  # capturing runs a step first, whose K/V lies after the committed slots
            self.replay, _ = record(lambda: self._run(target, bound, forward, cache), device)
        self.is_compiled = compiles

    def _run(self, target: Target, bound: Any, forward: TreeForward, cache: DeviceCache) -> list[torch.Tensor]:
        """
        The function that is captured: draft, forward, walk, commit, and the draft's catching up. Returns the report.

        Args:
            target (`Target`): records hidden states.
            bound (`Drafter`), forward (`TreeForward`), cache (`DeviceCache`): the draft, and the target's forward and
                its cache, whose lengths only the device knows.
        """
        rows, part = self.rows, self.part
        lengths = rows.lengths.clone()
        draft = part.grow(bound, rows, None if self.drawing is None else self.drawing.warp)
        topology = draft.topology
        tokens = torch.cat([rows.roots(), draft.tokens], dim=1)
        usable = draft.usable(part.room(bound, rows))
        depths = topology.depths * usable
        cache.at(lengths - 1)
        features = None
        with target.recorded_features(forward.compiles) as watched:
            logits = forward(tokens, topology.ancestors, topology.depths, position_depths=depths).logits
            if watched is not None:
                features = watched.take(forward.device, logits.dtype)
        path, accepted, next_tokens = self.verdict.walk(
            logits,
            tokens.masked_fill(~usable, -1),
            draft,
            max_depth=self.tree.depth,
            end_tokens=rows.end_tokens if len(rows.end_tokens) else None,
            active=rows.active,
        )
        highest = logits.amax(dim=-1)
        is_spoiled = rows_with_nan(logits, highest) & rows.active
        accepted = torch.where(is_spoiled, -1, accepted)
        for compaction in self.compactions:
            compaction(lengths - 1, path, accepted)
        drafted = usable[:, 1:].expand(len(lengths), -1).sum(dim=1)
        new = rows.commit(tokens.gather(1, path), accepted, next_tokens)
        if features is not None:
            features = features.gather(1, path[:, :, None].expand(-1, -1, features.shape[2]))
        part.catch_up(bound, rows, lengths, features)
        accepted = torch.where(is_spoiled, SPOILED, self.verdict.checked(highest, path, accepted))
        report = [accepted[:, None], drafted[:, None], new]
        if self.drawing is not None:
            report.append(self.drawing.reported_overlaps(logits[:, 0], draft))
        rows.report.copy_(torch.cat(report, dim=1))
        return [rows.report]

    def load(self, target: Target, drafter: Any, sequences: Sequences, warpers: Warpers) -> None:
        """Copies the state of a call that has done its prefill and whose drafter has caught up."""
        device = self.rows.text.device
        ids = sequences.columns(max(sequences.lengths))
        lengths = torch.tensor(sequences.lengths, device=device)
        active = ~torch.tensor(sequences.resting, device=device)
        self.rows.load(ids, lengths, sequences.limit or 0, active)
        self.verdict.load(warpers)
        if self.drawing is not None:
            self.drawing.draft_temperature.fill_(drafter.request.temperature.value)
        self.padding.load(target.forward)
        self.part.load(drafter)
