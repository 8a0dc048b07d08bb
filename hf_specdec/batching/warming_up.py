"""Capturing what an engine is going to run, by requests of nobody, before others come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from ..trees import DynamicTree, TokenTree
from .graphs import SIZES
from .request import Request
from .scheduler import MOST_ROWS


if TYPE_CHECKING:
    from .engine import Engine

STEPS = 4
"""Of every kind: one is captured, the others are timed."""
MOST_NODES = 2048
"""Of all rows: steps with larger trees are not captured beforehand, except for the manager's own tree."""


@dataclass(frozen=True)
class Case:
    """
    Steps to be captured.

    Args:
        tree (`TokenTree` or `DynamicTree`, *optional*): what is drafted.
        number (`int`): how many requests.
        do_sample (`bool`): whether they are sampled.
        length (`int`, *optional*): of their prompts.
        reads (`bool`): whether a head reads in every step.
    """

    tree: TokenTree | DynamicTree | None
    number: int
    do_sample: bool = False
    length: int | None = None
    reads: bool = False


def warm_up(
    engine: Engine, new_requests: Callable[..., list[Request]], goes_on: Callable[[], bool] = lambda: True
) -> None:
    """
    Captures steps by requests of nobody, which leave nothing behind: not in the counts either. Numbers of rows are
    powers of two and the most there may be; for others the graph of the next larger one will do.

    Args:
        engine (`Engine`): what is to be warmed up, by the thread that runs it.
        new_requests (`Callable`): makes so many requests, sampled or not, that end after some steps; with prompts of
            so many tokens, if it is told.
        goes_on (`Callable`, *optional*): asked before every kind of step.
    """
    if not engine.device_steps.works:
        return
    try:
        with engine.device_steps.capturing_every_size():
            for case in chain(_steps(engine, new_requests), _prompts(engine)):
                if not goes_on():
                    break
                engine.device_steps.reads_always = case.reads
                with engine.choices.always(case.tree):
                    _run(engine, new_requests(case.number, case.do_sample, case.length))
    finally:
        engine.device_steps.reads_always = False
        engine.reset_counts()
        engine.choices.forget_texts()


def _steps(engine: Engine, new_requests: Callable[..., list[Request]]) -> Iterator[Case]:
    """Every kind of step."""
    most = engine.scheduler.max_requests
    for size in sorted({min(size, most) for size in SIZES if size & (size - 1) == 0}, reverse=True):
        for do_sample in (False, True):
            yield Case(None, size, do_sample)
            if engine.drafting.features is not None:
                yield Case(None, size, do_sample, reads=True)
            if not engine.policy.speculates(size, 0):
                continue
            trees = [tree for one in new_requests(1, do_sample) for tree in engine.choices.trees_of(one)]
            for tree in trees:
                if tree == trees[0] or size * (tree.num_nodes + 1) <= MOST_NODES:
                    yield Case(tree, size, do_sample)


def _prompts(engine: Engine) -> Iterator[Case]:
    """Every size of a piece, twice."""
    scheduler = engine.scheduler
    for width in engine.target.widths():
        number = 1
        while number <= min(scheduler.max_requests, scheduler.chunk_size // width, MOST_ROWS):
            if number * width < scheduler.busy_at:
                yield from [Case(None, number, length=width)] * 2  # captured when it comes again
            number *= 2


def _run(engine: Engine, requests: list[Request]) -> None:
    """Runs requests of nobody for a few steps."""
    scheduler, drafting = engine.scheduler, engine.drafting
    for request in requests:
        scheduler.add(request)
    first = engine.num_steps
    while scheduler.has_work and engine.num_steps < first + STEPS:
        for request in chain.from_iterable(engine.step()):
            if request.is_over:
                engine.end(request)
    if drafting.has_part and drafting.features is None:  # a draft model catches up by forwards from the host
        drafting.lags([one for one in scheduler.running if drafting.knows(one)], 1)
    for request in [*scheduler.active, *scheduler.waiting]:
        engine.end(request)
