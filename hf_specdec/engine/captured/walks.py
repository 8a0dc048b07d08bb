"""Verification in captured steps: the walks of rows that are greedy, sampled, or verified by rejection."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ...trees import DraftTree
from ...verification import DeviceNoise, Verifier
from .drawing import Drawing
from .processing import KERNEL_FILTERS, Processing
from .rows import InFlightRows
from .verdicts import Verdict, checked


if TYPE_CHECKING:
    from ...drafters import Drafter


DRAWN_BY_NUMBERS = frozenset({Verifier.FROM_TARGET, Verifier.REJECTION})
"""Kinds of walks that draw by uniform random numbers, those of a row's seed or of torch's generator."""


class RowWalks:
    """
    Walks the rows of a captured step down their trees, each by its own kind of verification.

    Args:
        rows (`InFlightRows`): the step's rows.
        kinds (`frozenset[Verifier]`): kinds of verification among the rows.
        drawn_by (`Drafter`, *optional*): the drafter, if its children are drawn.
        is_filtered (`bool`): whether children, and tokens by the noise of their positions, are drawn with the rows'
            top-k and top-p, which takes time. (Other walks always apply them: a row without them costs a comparison.)
        has_seeds (`bool`): whether rows may have a seed of their own.
        processing (`frozenset[str]`): see `StepKind`.
        draws_by_position (`bool`): whether children are drawn by the noise of their positions.
    """

    def __init__(
        self,
        rows: InFlightRows,
        kinds: frozenset[Verifier],
        drawn_by: Drafter | None = None,
        is_filtered: bool = False,
        has_seeds: bool = True,
        processing: frozenset[str] = frozenset(),
        draws_by_position: bool = False,
    ):
        self._rows, self._kinds, self._has_seeds, self._is_filtered = rows, kinds, has_seeds, is_filtered
        self._noise = DeviceNoise(rows.noise_keys, rows.lengths)
        self.processing = Processing.of(rows, processing)
        """What makes the scores of p from the target's logits."""
        self.drawing = None
        """The distribution from which children are drawn; None if they are not drawn."""
        if drawn_by is not None:
            of_draft = Processing.of(rows, processing, KERNEL_FILTERS if is_filtered else ())
            noise = self._noise if draws_by_position else None
            self.drawing = Drawing(drawn_by, rows.draft_temperature, of_draft, noise)

    def walk(
        self, logits: torch.Tensor, draft: DraftTree, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Paths, numbers of accepted nodes and next tokens of all rows, see `Verdict.walk`; and the logits that have
        walked, those of hidden tokens -inf.
        """
        rows, found = self._rows, None
        uniforms = rows.uniforms if self._has_seeds and not self._kinds.isdisjoint(DRAWN_BY_NUMBERS) else None
        logits, warpers = self.processing.for_walk(logits, draft.topology, tokens)
        for kind in sorted(self._kinds):
            verdict = Verdict(kind, self.drawing if kind == Verifier.REJECTION else None, self._noise)
            is_own, most = rows.kinds == kind, rows.size.depth
            own_warpers = warpers
            if kind == Verifier.BY_POSITION and not self._is_filtered:
                own_warpers = {"temperature": warpers.get("temperature")}
            walks = verdict.walk(logits, tokens, draft, uniforms, own_warpers, max_depth=most, active=is_own)
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
        return *found, logits

    def checked(
        self,
        highest: torch.Tensor,
        path: torch.Tensor,
        accepted: torch.Tensor,
        compiled: Callable[[Callable], Callable] = lambda function: function,
    ) -> torch.Tensor:
        """
        Numbers of accepted nodes, with `NOTHING_TO_DRAW` in sampled rows that cannot be drawn; see `verdicts.checked`.
        `compiled` compiles that function of tensors, or leaves it.
        """
        if self._kinds == {Verifier.GREEDY}:
            return accepted
        return compiled(checked)(self._rows.kinds >= Verifier.FROM_TARGET, highest, path, accepted)


def kinds_among(kinds: list[Verifier], draws_children: bool) -> frozenset[Verifier]:
    """
    Kinds of walks in a step with rows of these kinds. If any row is sampled, all possible kinds are included: another
    walk costs less than another graph for every mix of rows. Those that take numbers from torch's generator are left
    out where all sampled rows draw by position: the generator must not depend on the number of steps.
    """
    found = {Verifier.GREEDY} | {Verifier.BY_POSITION} & set(kinds)
    if not DRAWN_BY_NUMBERS.isdisjoint(kinds):
        found |= {Verifier.FROM_TARGET} | ({Verifier.REJECTION} if draws_children else set())
    return frozenset(found)
