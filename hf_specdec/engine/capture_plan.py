"""What an engine captures before requests come: first what serves any load at once, then what serves it better."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from ..graphs.sizes import next_power_of_two, next_size
from ..models.positions import num_positions
from ..states.kernel import MOST_NODES as MOST_STATE_NODES
from ..trees import AutoTree, DynamicTree, TokenTree, TreeSchedule
from .captured.ahead import Ahead, PromptsAhead, StepAhead
from .captured.keys import PromptKey, StepSize
from .captured.log_probabilities import best_asked
from .captured.parts import StepPart, parts_of
from .captured.processing import processing_of
from .captured.prompts import kinds_for
from .grouping import group_with
from .request import Request
from .scheduler import MOST_ROWS
from .tree_choice import TreeChoices
from .wanted_trees import wanted_tree, within


if TYPE_CHECKING:
    from .engine import Engine

Tree = TokenTree | DynamicTree

FACTOR = 4
"""Most times the rows of a step that the graphs captured first have."""
MOST_NODES = 2048
"""Most nodes of all rows for which a tree is captured ahead; the only tree always is."""
MOST_FIRST_TOKENS = 4096
"""Most tokens of the prefill steps that are captured first."""


class CapturePlan:
    """
    Names the steps to capture ahead for an engine whose K/V memory there is.

    Args:
        engine (`Engine`): the engine.
        new_requests (`Callable`): makes dummy requests; takes their number and `do_sample`.
    """

    def __init__(self, engine: Engine, new_requests: Callable[[int, bool], list[Request]]):
        self._engine = engine
        self._requests = [request for draws in (True, False) for request in new_requests(1, draws)]
        self._choices = TreeChoices(engine.model, engine.choices.autos.draft, None, lambda: True)
        self.ladder = ladder_of(engine.scheduler.max_requests)
        """Numbers of rows of the first graphs, falling."""

    def main_tree(self, rows: int) -> Tree | None:
        """The tree with which steps of so many rows can begin; None if they begin without."""
        trees = [tree for request in self._requests[:1] for tree in self._main_trees(request, rows)]
        return trees[0] if trees and self._engine.policy.speculates(rows, 0) else None

    def first(self) -> Iterator[Ahead]:
        """The steps with which any number of requests can be served: those of the largest batches first."""
        for rows, fewest in _with_fewest(self.ladder):
            yield from self._plain(self._requests[:1], rows, fewest)
            for request in self._requests:
                yield from self._trees(request, self._main_trees(request, rows), rows, fewest)
        for request in self._requests:
            yield from self._trees(request, _scheduled(request), self.ladder[0], 1)
        for rows in self.ladder[::2]:
            yield from self._reads(self._requests[:1], rows, self._widths_of_head[-1:])
        yield from self._prompts(FACTOR, MOST_FIRST_TOKENS)

    def later(self) -> Iterator[Ahead]:
        """
        Further steps: first numbers of rows by powers of two, then the other trees of "auto", then longer texts; small
        batches first.
        """
        most = self.ladder[0]
        doubled = [1 << power for power in range((most - 1).bit_length())] + [most]
        pairs = list(reversed(list(_with_fewest(doubled[::-1]))))
        for rows, fewest in pairs:
            yield from self._plain(self._requests, rows, fewest)
            for request in self._requests:
                yield from self._trees(request, self._main_trees(request, rows), rows, fewest)
        yield from self._prompts(2)
        coarse = list(reversed(list(_with_fewest(self.ladder))))
        for rows, fewest in chain(coarse, pairs):
            for request in self._requests:
                yield from self._trees(request, self._trees_of(request), rows, fewest)
        for rows, _ in pairs:
            yield from self._reads(self._requests, rows, self._widths_of_head)
        blocks = self._fewest_blocks
        while self._requests and blocks < self._most_blocks:
            blocks = min(FACTOR * blocks, self._most_blocks)
            for rows, fewest in coarse:
                yield from self._plain(self._requests[:1], rows, fewest, blocks)
                for request in self._requests:
                    yield from self._trees(request, self._main_trees(request, rows), rows, fewest, blocks)
            yield from self._prompts(FACTOR, MOST_FIRST_TOKENS, blocks)

    # ------------------------------------------------------------------------------------------------- kinds of steps

    def _plain(self, requests: list[Request], rows: int, fewest: int, blocks: int = 0) -> Iterator[StepAhead]:
        """Steps without a tree. Those of sampled rows serve greedy ones, too."""
        for request in requests:
            yield self._step(request, StepPart([request], plain=[0]), rows, fewest, blocks)

    def _trees(
        self, request: Request, trees: list[Tree], rows: int, fewest: int, blocks: int = 0
    ) -> Iterator[StepAhead]:
        """Steps with the trees of a request; none where steps with so many rows carry no trees."""
        engine, drafting = self._engine, self._engine.drafting
        if request.options.plan is None or not (drafting.can_be_captured and engine.policy.speculates(fewest, 0)):
            return
        share, only = engine.choices.max_step_nodes, len(self._trees_of(request)) == 1
        for whole in trees:
            tree = whole if share is None else within(whole, share // min(rows, engine.scheduler.max_requests))
            if tree is None or not drafting.can_grow(tree):
                continue
            if engine.target.cache.state_layers and tree.num_nodes >= MOST_STATE_NODES:
                continue
            if rows * (tree.num_nodes + 1) > MOST_NODES and not only:
                continue
            (part,) = parts_of([request], [group_with(engine, self._choices, request, tree)])
            yield self._step(request, part, rows, fewest, blocks)

    def _reads(self, requests: list[Request], rows: int, widths: list[int]) -> Iterator[StepAhead]:
        """Steps in which a head reads the features that wait, at these widths."""
        if self._engine.drafting.can_be_captured:
            for request in requests:
                for width in widths:
                    part = StepPart([request], plain=[0], reading=[0])
                    yield self._step(request, part, rows, rows, 0, width)

    def _step(
        self, request: Request, part: StepPart, rows: int, fewest: int, blocks: int, read_width: int = 0
    ) -> StepAhead:
        key = self._engine.device_steps.key_for(part, rows, fewest, blocks or self._fewest_blocks, read_width)
        draft_request = part.groups[0].draft_request if part.groups else None
        return StepAhead(key, draft_request, fewest, is_timed=_is_auto(request) and not read_width)

    def _prompts(self, factor: int, most_tokens: int | None = None, blocks: int = 0) -> Iterator[PromptsAhead]:
        """Prefill steps of every width, by factors of the number of rows, of at most so many tokens."""
        scheduler, steps = self._engine.scheduler, self._engine.device_steps
        for request in self._requests[:1]:
            for width in self._engine.target.widths() if steps.prompts.can_read(request) else ():
                number = 1
                while number <= min(scheduler.max_requests, scheduler.chunk_size // width, MOST_ROWS):
                    if number * width < min(scheduler.busy_at, (most_tokens or scheduler.busy_at) + 1):
                        size = StepSize(number, blocks or self._fewest_blocks, 0, width + 1)
                        asked = best_asked([request]), processing_of([request])
                        yield PromptsAhead(PromptKey(size, kinds_for([request])[0], *asked))
                    number *= factor

    # -------------------------------------------------------------------------------------------- what requests want

    def _main_trees(self, request: Request, rows: int) -> list[Tree]:
        """The tree with which steps of so many rows can begin: of a schedule the first, of "auto" a middling one."""
        trees = self._trees_of(request)
        if not trees or not _is_auto(request):
            return trees[:1]
        auto: AutoTree = wanted_tree(request)
        fitting = [tree for tree in trees if rows * (tree.num_nodes + 1) <= MOST_NODES]
        if auto.first in fitting:
            return [auto.first] if auto.first is not None else []
        most = max(8, auto.first.num_nodes if auto.first in trees and auto.first is not None else 0)
        return sorted(fitting, key=lambda tree: abs(tree.num_nodes - most))[:1]

    def _trees_of(self, request: Request) -> list[Tree]:
        return self._engine.choices.trees_of(request)

    @property
    def _widths_of_head(self) -> list[int]:
        features = self._engine.drafting.features
        return [] if features is None else features.widths

    @property
    def _fewest_blocks(self) -> int:
        return self._engine.device_steps.fewest_blocks

    @property
    def _most_blocks(self) -> int:
        """Blocks of a row with the longest text that the target knows and there is memory for."""
        pool, known = self._engine.pool, num_positions(self._engine.model)
        most = pool.num_blocks if known is None else min(pool.num_blocks, pool.blocks_for(known))
        return next_power_of_two(most + 1)


def ladder_of(most: int) -> list[int]:
    """Numbers of rows, falling by `FACTOR` from the captured size of `most` to 1."""
    found = [next_size(most)]
    while found[-1] > 1:
        found.append(next_size(-(-found[-1] // FACTOR)))
    return found


def _with_fewest(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Falling numbers of rows, each with the fewest that no smaller one has room for."""
    for rows, smaller in pairwise([*sizes, 0]):
        yield rows, smaller + 1


def _scheduled(request: Request) -> list[Tree]:
    """The trees of a request's schedule, if it has one, beside those of "auto"."""
    tree = None if request.options.plan is None else request.options.plan.tree
    entries = [entry for _, entry in tree.entries] if isinstance(tree, TreeSchedule) else []
    return [entry for entry in entries if isinstance(entry, TokenTree | DynamicTree)]


def _is_auto(request: Request) -> bool:
    return isinstance(wanted_tree(request), AutoTree)
