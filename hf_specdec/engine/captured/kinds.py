"""Which kind of captured step rows need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...trees import AutoTree, DynamicTree, TokenTree
from ...verification import Verifier
from .grammars import has_grammar
from .keys import StepKind
from .log_probabilities import best_asked
from .parts import StepPart
from .processing import filters_by_kernels, processing_of
from .walks import kinds_among


if TYPE_CHECKING:
    from ..request import Request


def kind_of(
    part: StepPart, verifiers: list[Verifier], mixes_rows: bool, compiles: bool, compiles_whole: bool
) -> StepKind:
    """
    The kind of a part's step.

    Args:
        part (`StepPart`): the rows.
        verifiers (`list[Verifier]`): how each of them is verified.
        mixes_rows (`bool`): whether rows of the step may be verified in different ways, and have seeds.
        compiles (`bool`), compiles_whole (`bool`): see `StepKind`.
    """
    tests = part.draws and not part.by_position
    found = kinds_among(verifiers, tests) if mixes_rows else frozenset(verifiers)
    filtered = part.own if Verifier.BY_POSITION in found else part.of(part.drafted) if part.draws else []
    return StepKind(
        tree=part.tree,
        kinds=found,
        has_seeds=mixes_rows,
        draws=part.draws,
        is_filtered=filters_by_kernels(filtered),
        by_position=part.by_position,
        processing=processing_of(part.own),
        shapes=part.shapes,
        reports_ranks=part.reports_ranks,
        has_grammars=has_grammar(part.own),
        reads=bool(part.reading),
        compiles=compiles,
        compiles_whole=compiles_whole,
        best=best_asked(part.own),
    )


def has_own_tree(part: StepPart) -> bool:
    """
    Whether a part's tree, and how it is filled, is that of all its requests: the one they name, or under "auto" the
    draft's own.
    """
    plans = [request.options.plan for request in part.own]
    trees = [None if plan is None else plan.tree for plan in plans]
    firsts = [tree.first if isinstance(tree, AutoTree) else tree for tree in trees]
    is_filled_so = all(plan is None or plan.draws_children == part.draws for plan in plans)
    return part.tree is not None and is_filled_so and all(part.tree == first for first in firsts)


def part_under_auto(
    requests: list[Request], tree: TokenTree | DynamicTree | None, reads: bool, may_shape: bool
) -> StepPart:
    """
    The part of a step of requests that all have a tree which "auto" has chosen; see `grouping`.

    Args:
        reads (`bool`): whether a head reads their pending features in it.
        may_shape (`bool`): whether the draft's confidence may choose the nodes of a static tree.
    """
    plans = [request.options.plan for request in requests] if tree is not None else []
    draws = any(plan is not None and plan.draws_children for plan in plans)
    by_position = draws and any(plan is not None and plan.draws_by_position for plan in plans)
    part = StepPart(requests, tree, draws, by_position, plain=list(range(len(requests))))
    part.shapes = may_shape and isinstance(tree, TokenTree)
    part.reports_ranks = part.shapes or isinstance(tree, DynamicTree)
    part.reading = part.plain if reads else []
    return part
