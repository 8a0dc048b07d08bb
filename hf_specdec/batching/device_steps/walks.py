"""How the rows of a step find their next tokens, each in its own way."""

from __future__ import annotations

from typing import Any

import torch

from ...device_steps.drawing import Drawing
from ...device_steps.verdicts import NOTHING_TO_DRAW, Verdict
from ...trees import DraftTree
from ..distribution import NAN_LOGITS, NOTHING_TO_CHOOSE
from ..request import Request
from .rows import InFlightRows, Kind


class Walks:
    """
    Args:
        rows (`InFlightRows`): the step's.
        kinds (`frozenset[Kind]`): how they find their tokens.
        drawn_by (`Drafter`, *optional*): the drafter whose children are drawn.
        draft_is_filtered (`bool`): whether they are drawn from what top-k and top-p leave, which takes time. (Of the
            target's tokens these leave all for a row that has neither, at the price of a comparison.)
    """

    def __init__(
        self, rows: InFlightRows, kinds: frozenset[Kind], drawn_by: Any = None, draft_is_filtered: bool = False
    ):
        self._rows, self._kinds = rows, kinds
        temperature, filters = {"temperature": rows.temperature}, {"top_k": rows.top_k, "top_p": rows.top_p}
        self._warpers: dict[str, torch.Tensor] = temperature | filters
        of_draft = self._warpers if draft_is_filtered else temperature
        self.drawing = None if drawn_by is None else Drawing(drawn_by, rows.sharpness, **of_draft)
        """What children are drawn from."""

    def walk(self, logits: torch.Tensor, draft: DraftTree, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Paths, numbers of accepted nodes and next tokens of all rows, see `Verdict.walk`."""
        rows, found = self._rows, None
        for kind in sorted(self._kinds):
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
        return Verdict("rejection", drawing=self.drawing, **values)

    def checked(self, logits: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        """See `Verdict.checked`."""
        draws = self._rows.kinds >= Kind.TARGET
        return torch.where(draws, Verdict("target").checked(logits, path, accepted), accepted)


def kind_of(request: Request, draws_children: bool) -> Kind:
    """How a request finds its tokens, in a tree whose children are drawn or not."""
    if not request.options.do_sample:
        return Kind.GREEDY
    plan = request.options.plan
    return Kind.REJECTION if draws_children and plan is not None and plan.uses_rejection else Kind.TARGET


def kinds_among(kinds: list[Kind], draws_children: bool) -> frozenset[Kind]:
    """
    The walks of a step with such rows. Where any draws, all that could come: another walk costs less than another
    graph for every mix of rows.
    """
    if set(kinds) == {Kind.GREEDY}:
        return frozenset({Kind.GREEDY})
    return frozenset({Kind.GREEDY, Kind.TARGET} | ({Kind.REJECTION} if draws_children else set()))


def error_of(accepted: int, is_nan: int) -> str | None:
    """
    What is wrong with a row that the device reports so: with so many accepted nodes, and with NaN or not.

    Raises:
        RuntimeError: if it should not have rested.
    """
    if is_nan:
        return NAN_LOGITS
    if accepted == NOTHING_TO_DRAW:
        return NOTHING_TO_CHOOSE
    if accepted < 0:
        raise RuntimeError("A step on the device has passed by a request. Use `cuda_graphs=False`.")
    return None
