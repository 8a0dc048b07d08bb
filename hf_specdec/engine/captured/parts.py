"""The parts of a captured step: rows that share a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...trees import DynamicTree, TokenTree


if TYPE_CHECKING:
    from ...drafters import DraftRequest
    from ..request import Request
    from .keys import StepKey
    from .step import InFlightStep


@dataclass(eq=False)
class DraftGroup:
    """Rows of a step whose drafts are proposed together, with one `DraftRequest`."""

    draft_request: DraftRequest
    rows: list[int] = field(default_factory=list)


@dataclass
class StepPart:
    """
    Rows of a step that share a forward.

    Args:
        requests (`list[Request]`): the requests of the whole step; a row is a place in this list.
        tree (`TokenTree` or `DynamicTree`, *optional*): the tree of the rows in groups; None without groups.
        draws (`bool`): whether children are drawn.
        by_position (`bool`): whether they are drawn by the noise of their positions.
        groups (`list[DraftGroup]`): the rows that are drafted for.
        plain (`list[int]`): the rows without drafts.
        reading (`list[int]`): plain rows whose pending features an EAGLE head reads in this step.
        was_deferred (`bool`): whether rows lost their trees in this step because the head must read first.
        shapes (`bool`): whether the tree's nodes are chosen by the draft's confidence.
        reports_ranks (`bool`): whether the step reports what was offered on the accepted path; see `DraftRequest`.
        wanted (`StepKey`, *optional*): kind and size of the step for these rows; a larger one may stand in for it.
        step (`InFlightStep`, *optional*): the captured step that was launched for them.
    """

    requests: list[Request]
    tree: TokenTree | DynamicTree | None = None
    draws: bool = False
    by_position: bool = False
    groups: list[DraftGroup] = field(default_factory=list)
    plain: list[int] = field(default_factory=list)
    reading: list[int] = field(default_factory=list)
    was_deferred: bool = False
    shapes: bool = False
    reports_ranks: bool = False
    wanted: StepKey | None = None
    step: InFlightStep | None = None

    def load_calibration(self) -> None:
        """Loads how the step that runs the part reads the draft's confidence."""
        calibration = self.groups[0].draft_request.calibration if self.shapes else None
        if calibration is not None and self.step is not None:
            self.step.draft.load_calibration(calibration())

    def of(self, rows: list[int]) -> list[Request]:
        """The requests of some of its rows."""
        return [self.requests[row] for row in rows]

    @cached_property
    def own(self) -> list[Request]:
        """The requests of all its rows, which stay the same once the part is complete: `defer` keeps their order."""
        return self.of(self.rows)

    @property
    def depth(self) -> int:
        """Levels of the tree."""
        return 0 if self.tree is None else self.tree.depth

    @property
    def drafted(self) -> list[int]:
        """The rows of the groups, one group after the other."""
        return [row for group in self.groups for row in group.rows]

    @property
    def draft_temperature(self) -> list[float]:
        """The draft temperature of every row at present; 1 in rows without drafts."""
        values = [group.draft_request.temperature.value for group in self.groups for _ in group.rows]
        return values + [1.0] * len(self.plain)

    @property
    def rows(self) -> list[int]:
        """All rows, beginning with the rows that are drafted for."""
        return self.drafted + self.plain

    def defer(self, reading: list[int]) -> None:
        """Takes all rows' trees away in this step, so that an EAGLE head can read the pending features of some."""
        self.was_deferred = bool(self.groups)
        self.plain, self.groups, self.tree, self.draws, self.shapes = self.rows, [], None, False, False
        self.reports_ranks = self.by_position = False
        self.reading = reading


def parts_of(requests: list[Request], groups: Sequence[DraftGroup]) -> list[StepPart]:
    """
    Groups the rows of a step by their trees, and how these are drafted. Rows without drafts join the first part, or
    make a part of their own if they outnumber its drafted rows.
    """
    parts: dict[Any, StepPart] = {}
    for group in groups:
        wanted = group.draft_request
        plan: Any = wanted.plan
        part = StepPart(
            requests,
            plan.tree,
            plan.draws_children,
            by_position=plan.draws_children and plan.draws_by_position,
            shapes=wanted.calibration is not None,
            reports_ranks=wanted.reports_ranks,
        )
        key = part.tree, part.draws, part.by_position, part.shapes, part.reports_ranks
        parts.setdefault(key, part).groups.append(group)
    drafted = {row for group in groups for row in group.rows}
    plain = [row for row in range(len(requests)) if row not in drafted]
    found = list(parts.values())
    if plain and found and len(plain) <= len(found[0].drafted):
        found[0].plain = plain
    elif plain:
        found.append(StepPart(requests, plain=plain))
    return found
