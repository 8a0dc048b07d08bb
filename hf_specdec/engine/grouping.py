"""Which rows of a step are drafted for together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..drafters import DraftRequest
from ..plan import SpeculationPlan
from ..trees import DynamicTree, TokenTree
from ..verification import DraftTemperature
from .captured import DraftGroup
from .request import Request


if TYPE_CHECKING:
    from .engine import Engine
    from .tree_choice import TreeChoices


def groups_of(engine: Engine, requests: list[Request]) -> list[DraftGroup]:
    """Groups the rows that speculate in this step by their trees and by what their drafts are drawn from."""
    groups: dict[Any, DraftGroup] = {}
    for row, (request, tree) in enumerate(zip(requests, engine.choices.begin_step(requests), strict=True)):
        plan = request.options.plan
        if tree is None or plan is None or not engine.drafting.knows(request):
            continue
        if request.draft_backoff.takes_step():
            continue
        # A tree never takes blocks from other requests.
        if not engine.pool.reserve(request.table, request.length + engine.drafting.num_slots(tree)):
            continue
        _take_in(engine, engine.choices, groups, row, request, plan, tree)
    if not engine.ranks.are_several:  # which must take the same tree, and may differ by rounding
        _let_refine(engine, engine.choices, groups)
    return list(groups.values())


def group_with(engine: Engine, choices: TreeChoices, request: Request, tree: TokenTree | DynamicTree) -> DraftGroup:
    """
    The group of a request alone, row 0, in a step in which it has this tree, before any such step runs.

    Args:
        engine (`Engine`): an engine whose draft can be captured.
        choices (`TreeChoices`): choices of no other request, which learn nothing here.
        request (`Request`): the request, which speculates.
        tree (`TokenTree` or `DynamicTree`): the tree.
    """
    plan, groups = request.options.plan, dict[Any, DraftGroup]()
    assert plan is not None
    with choices.always(tree):
        choices.begin_step([request])
        _take_in(engine, choices, groups, 0, request, plan, tree)
        if not engine.ranks.are_several:
            _let_refine(engine, choices, groups)
    return next(iter(groups.values()))


def _take_in(
    engine: Engine,
    choices: TreeChoices,
    groups: dict[Any, DraftGroup],
    row: int,
    request: Request,
    plan: SpeculationPlan,
    tree: TokenTree | DynamicTree,
) -> None:
    """Puts a row that has this tree into its group."""
    options = request.options
    if choices.takes_best(row):
        plan = replace(plan, draws_children=False, uses_rejection=False)
    drawn_from = (options.warpers_key, plan.draft_temperature) if plan.draws_children else None
    auto = choices.auto_of(row) if engine.drafting.has_confidence else None
    learns = isinstance(tree, DynamicTree) and choices.is_auto(row)
    key = (tree, plan.draws_children, plan.draws_by_position, drawn_from, learns, auto)
    group = groups.get(key)
    if group is None:
        temperature = DraftTemperature(adapts=False) if drawn_from is None else engine.temperatures.of(*drawn_from)
        draft_request = DraftRequest(
            replace(plan, tree=tree),
            engine.vocab_size,
            options.warpers,
            temperature=temperature,
            reports_ranks=learns,
        )
        groups[key] = group = DraftGroup(draft_request)
    group.rows.append(row)


def _let_refine(engine: Engine, choices: TreeChoices, groups: dict[Any, DraftGroup]) -> None:
    """Lets "auto" choose again while a group is drafted for, within the blocks that its trees have."""
    autos = [key[-1] for key in groups]
    for (tree, *_, auto), group in groups.items():
        calibration = None if auto is None else choices.calibration_of(auto)
        if calibration is not None:
            if isinstance(tree, TokenTree):
                group.draft_request = replace(group.draft_request, calibration=calibration, reports_ranks=True)
        elif auto is not None and autos.count(auto) == 1:
            refine = choices.refiner(auto, group.rows, engine.drafting.num_slots(tree))
            group.draft_request = replace(group.draft_request, refine=refine)
