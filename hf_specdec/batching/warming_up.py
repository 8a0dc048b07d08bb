"""Warm-up: capturing an engine's CUDA graphs with dummy requests before real ones arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from ..engine.request import Request
from ..engine.scheduler import MOST_ROWS
from ..graphs.paged import SIZES
from ..trees import DynamicTree, TokenTree


if TYPE_CHECKING:
    from ..engine.engine import Engine

STEPS = 4
"""Steps run per `Case`: the first is captured, the others are timed."""
MOST_NODES = 2048
"""Most nodes of all rows for which a tree is captured beforehand; the first of a manager's trees always is."""


@dataclass(frozen=True)
class Case:
    """
    A kind of step to capture.

    Args:
        tree (`TokenTree` or `DynamicTree`, *optional*): the tree to draft; None for steps without drafts.
        number (`int`): number of requests.
        do_sample (`bool`): whether the requests are sampled.
        length (`int`, *optional*): prompt length in tokens; by default a few tokens.
        read_width (`int`): width at which an EAGLE head reads its pending features in every step; 0: it need not read.
    """

    tree: TokenTree | DynamicTree | None
    number: int
    do_sample: bool = False
    length: int | None = None
    read_width: int = 0


def warm_up(
    engine: Engine, new_requests: Callable[..., list[Request]], goes_on: Callable[[], bool] = lambda: True
) -> None:
    """
    Captures steps with dummy requests, of which nothing stays: the engine's counts are reset as well. Batch sizes are
    powers of two and `max_requests`; batches in between run in the next larger graph. To be called by the thread that
    runs the engine.

    Args:
        engine (`Engine`): the engine to warm up.
        new_requests (`Callable`): makes dummy requests that end after some steps; takes their number, `do_sample` and
            a prompt length (or None).
        goes_on (`Callable`, *optional*): called before every kind of step; the warm-up ends when it returns False.
    """
    if not engine.device_steps.works:
        return
    try:
        with engine.device_steps.capturing_every_size(), engine.prefixes.resting():
            for case in chain(_steps(engine, new_requests), _prompts(engine, new_requests)):
                if not goes_on():
                    break
                engine.device_steps.read_width = case.read_width
                with engine.choices.always(case.tree):
                    _run(engine, new_requests(case.number, case.do_sample, case.length))
            else:
                engine.choices.autos.end_warm_up()
    finally:
        engine.device_steps.read_width = 0
        engine.reset_counts()
        engine.forget_temperatures()
        engine.choices.forget_texts()


def _steps(engine: Engine, new_requests: Callable[..., list[Request]]) -> Iterator[Case]:
    """Yields every kind of decoding step, for the largest batch first."""
    most = engine.scheduler.max_requests
    for size in sorted({min(size, most) for size in SIZES if size & (size - 1) == 0}, reverse=True):
        for do_sample in (False, True):
            yield Case(None, size, do_sample)
            if engine.drafting.features is not None:
                for width in engine.drafting.features.widths:
                    yield Case(None, size, do_sample, read_width=width)
            if not engine.policy.speculates(size, 0):
                continue
            trees = [tree for one in new_requests(1, do_sample) for tree in engine.choices.trees_of(one)]
            for tree in trees:
                if tree == trees[0] or size * (tree.num_nodes + 1) <= MOST_NODES:
                    yield Case(tree, size, do_sample)


def _prompts(engine: Engine, new_requests: Callable[..., list[Request]]) -> Iterator[Case]:
    """Yields every size of a captured prompt chunk, twice; sampled where that serves greedy requests, too."""
    scheduler, do_sample = engine.scheduler, new_requests(1, True)[0].options.draws_by_position
    for width in engine.target.widths():
        number = 1
        while number <= min(scheduler.max_requests, scheduler.chunk_size // width, MOST_ROWS):
            if number * width < scheduler.busy_at:
                yield from [Case(None, number, do_sample, width)] * 2  # captured the second time
            number *= 2


def _run(engine: Engine, requests: list[Request]) -> None:
    """Runs dummy requests for at most `STEPS` steps and removes them."""
    scheduler, drafting = engine.scheduler, engine.drafting
    for request in requests:
        scheduler.add(request)
    first = engine.num_steps
    while scheduler.has_work and engine.num_steps < first + STEPS:
        for request in chain.from_iterable(engine.step()):
            if request.is_over:
                engine.end(request)
    if drafting.can_be_captured and drafting.features is None:  # a draft model catches up by forwards from the host
        drafting.catch_up([one for one in scheduler.decoding if drafting.knows(one)], 1)
    for request in requests:
        if not request.is_over:
            engine.end(request)
