"""The load and the counts of a manager at a moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..metrics import SpeculationMetrics


if TYPE_CHECKING:
    from ..engine.engine import Engine


@dataclass(frozen=True)
class ManagerState:
    """
    A snapshot of a manager's load and counts.

    Args:
        num_running (`int`), num_waiting (`int`): requests in the batch, and requests waiting for a place in it.
        speculates (`bool`): whether the `LoadPolicy` lets requests speculate at the present load.
        num_free_blocks (`int`), num_blocks (`int`): K/V blocks that are free, and in all.
        num_preemptions (`int`): how often a request has lost its K/V to an older one.
        num_prompt_tokens (`int`), num_generation_tokens (`int`): prompt tokens read and tokens generated so far.
        num_prefix_queries (`int`), num_prefix_hits (`int`): tokens looked up in the prefix cache, and found there.
        speculation (`SpeculationMetrics`): speculation counts of all requests so far.
        num_graphs_left (`int`): CUDA graphs that a warm-up has yet to capture in spare time.
    """

    num_running: int
    num_waiting: int
    speculates: bool
    num_free_blocks: int
    num_blocks: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int
    speculation: SpeculationMetrics = field(repr=False)
    num_graphs_left: int = 0

    @classmethod
    def of(cls, engine: Engine, num_open: int, is_preparing: bool, num_graphs_left: int = 0) -> ManagerState:
        """The state of an engine with `num_open` requests; while it prepares, its dummy requests do not count."""
        if is_preparing:
            blocks, speculates = engine.pool.num_blocks, engine.policy.speculates(0, num_open)
            nothing = SpeculationMetrics()
            return cls(0, num_open, speculates, blocks, blocks, 0, 0, 0, 0, 0, nothing, num_graphs_left)
        num_running = len(engine.scheduler.active)
        num_waiting = max(num_open - num_running, 0)
        return cls(
            num_running=num_running,
            num_waiting=num_waiting,
            speculates=engine.policy.speculates(num_running, num_waiting),
            num_free_blocks=engine.pool.num_free,
            num_blocks=engine.pool.num_blocks,
            num_preemptions=engine.scheduler.num_preemptions,
            num_prompt_tokens=engine.num_tokens_read,
            num_generation_tokens=engine.num_tokens_generated,
            num_prefix_queries=engine.prefixes.num_queried,
            num_prefix_hits=engine.prefixes.num_hit,
            speculation=engine.metrics.copy(),
            num_graphs_left=num_graphs_left,
        )
