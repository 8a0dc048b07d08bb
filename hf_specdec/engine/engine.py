"""A step of many requests: admit → read prompts → propose → score → accept → commit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
from transformers import PreTrainedModel

from ..cache.blocks import BlockPool
from ..drafters import Drafter, drafting_of
from ..forwards.outputs import over_trees
from ..graphs import GraphPool
from ..graphs.sizes import FEWEST_BLOCKS
from ..metrics import SpeculationMetrics
from ..ranks import Ranks
from . import grouping, host_step, prompt_reading
from .accepting import Acceptance
from .bookkeeping import Bookkeeping
from .captured import DeviceSteps, DraftGroup, Outcome, StepRunner
from .noises import Noises
from .policy import LoadPolicy
from .prefixes import PrefixCache
from .prompt_memory import PromptMemory
from .request import Request
from .scheduler import Scheduler
from .target import InFlightTarget
from .temperatures import DraftTemperatures
from .tree_choice import TreeChoices


class Engine:
    """
    Runs requests step by step. An engine is used by one thread only.

    Args:
        model (`PreTrainedModel`): the target.
        drafter (`Drafter`): proposes the trees.
        pool (`BlockPool`): the memory for K/V.
        policy (`LoadPolicy`): when to speculate.
        max_requests (`int`): most requests that run at once.
        chunk_size (`int`): most prompt tokens per step.
        busy_at (`int`, *optional*): prompt tokens per step from which prompts are read without CUDA graphs; see
            `Scheduler`.
        max_step_nodes (`int`, *optional*): most draft tokens per step.
        cuda_graphs (`bool` or `"auto"`, *optional*, defaults to `"auto"`): see `SpeculativeConfig`.
        compiles (`bool`, *optional*, defaults to `False`): `SpeculativeConfig.compile`.
        compiles_whole (`bool`, *optional*, defaults to `False`), fewest_blocks (`int`, *optional*): see `DeviceSteps`.
        shares_prefixes (`bool`, *optional*, defaults to `False`): whether texts that begin alike share blocks, as far
            as target and draft let them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        pool: BlockPool,
        policy: LoadPolicy,
        *,
        max_requests: int,
        chunk_size: int,
        busy_at: int = sys.maxsize,
        max_step_nodes: int | None = None,
        cuda_graphs: bool | Literal["auto"] = "auto",
        compiles: bool = False,
        compiles_whole: bool = False,
        fewest_blocks: int = FEWEST_BLOCKS,
        shares_prefixes: bool = False,
    ):
        self.model, self.pool, self.policy, self._chunk_size = model, pool, policy, chunk_size
        self.ranks = Ranks.of(model)
        self.prompt_memory = PromptMemory(model)
        graph_pool = GraphPool()
        self.target = InFlightTarget(model, pool, max_requests, cuda_graphs, graph_pool)
        self.drafting = drafting_of(drafter, model, pool, max_requests, cuda_graphs, graph_pool)
        self.device_steps = DeviceSteps(
            self.target, self.drafting, cuda_graphs, graph_pool, compiles, compiles_whole, fewest_blocks
        )
        self._runner = StepRunner(self.device_steps, self.target, self.drafting)
        self.bookkeeping = Bookkeeping(self.target.cache, self.drafting)
        """Tokens, counts and caches of the requests."""
        self.prefixes = PrefixCache(self.target.cache, self.drafting, self.ranks, shares_prefixes)
        """Blocks of texts that begin alike."""
        self.scheduler = Scheduler(
            pool,
            self.target.cache,
            self.prefixes,
            max_requests=max_requests,
            chunk_size=chunk_size,
            busy_at=busy_at,
            widths=self.target.widths,
            pads=self.device_steps.prompts.can_read,
            on_release=self.drafting.forget,
            on_nan=self.bookkeeping.mark_nan,
        )
        device_steps = self.device_steps
        self.choices = TreeChoices(
            model, drafter.times_key, max_step_nodes, lambda: device_steps.works, self.drafting.evidence, device_steps
        )
        self.num_steps = self.num_tokens_read = 0
        self.runs_ahead = True
        """Whether a captured step may be launched before the last one is read: a state cannot be taken back."""
        self.speculates = True
        """Whether the load lets requests speculate at present."""
        self.last_end: float | None = None
        """When the last captured step's report came (`time.perf_counter`); None if anything else has run since."""
        self.vocab_size = model.config.get_text_config().vocab_size
        self.temperatures, self.noises = DraftTemperatures(), Noises(self.target.device)
        self.acceptance = Acceptance(self.ranks, self.bookkeeping, self.temperatures)
        self._num_runs = 0
        self.present_run: int | None = None
        """Number of the present `running` context, inside which nobody changes the models; None outside."""
        self._leaving: list[Request] | None = None
        """Requests that have ended while they keep their blocks; see `_keeping_blocks`."""
        self.has_news: Callable[[], bool] = lambda: False
        """Asked whether anything waits for the present step to end, as a new request does."""
        self.check_models: Callable[[], None] = lambda: None
        """Called before every run of steps: the models may have changed since requests were checked."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """
        A context for the thread that calls `step`, or captures steps ahead: switches attention, records features,
        renews CUDA graphs, and records no gradients, for which layers would be neither fused nor compiled as in steps.
        """
        self.check_models()
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            self.drafting.refresh()
            self.target.adapters.renew()
            stack.enter_context(over_trees(self.model, *self.drafting.models))
            stack.enter_context(self.drafting.watching(self.target))
            for cache in (self.target.cache, self.drafting.cache):
                if cache is not None and cache.graphs is not None:
                    cache.graphs.renew(self.target.adapters.key if cache is self.target.cache else None)
            if self.device_steps.renew():
                self.choices.autos.forget_captures()
            self.last_end = None
            self.prefixes.renew((self.model, *self.drafting.models))
            self.ranks.share_random_state()
            self._num_runs += 1
            self.present_run = self._num_runs
            stack.callback(setattr, self, "present_run", None)
            yield

    def limit_prompt_tokens(self, most: int | None) -> None:
        """Lets a step read at most so many prompt tokens, and no more than the engine's own limit (None: that)."""
        self.scheduler.chunk_size = self._chunk_size if most is None else min(most, self._chunk_size)

    def let_drafter_go(self) -> None:
        """Drops the models of the draft while the engine does not run, so that these can be freed."""
        self.drafting.detach()
        self.choices.autos.draft = None

    def take_drafter(self, drafter: Drafter) -> None:
        """Takes a drafter of the same models as before, after `let_drafter_go`, and forgets earlier texts."""
        self.drafting.attach(drafter.for_call(self.model))
        self.choices.autos.draft = drafter.times_key
        self.choices.forget_texts()
        self.forget_temperatures()
        self.reset_counts()

    def forget_temperatures(self) -> None:
        """Lets draft temperatures be learnt from the start, and requests draw by a new seed."""
        self.temperatures, self.noises = DraftTemperatures(), Noises(self.target.device)
        self.acceptance = Acceptance(self.ranks, self.bookkeeping, self.temperatures)

    @property
    def metrics(self) -> SpeculationMetrics:
        """Speculation counts of all requests so far; see `Bookkeeping`."""
        return self.bookkeeping.metrics

    @property
    def num_tokens_generated(self) -> int:
        """Number of tokens generated for all requests so far."""
        return self.bookkeeping.num_tokens_generated

    def reset_counts(self) -> None:
        """Sets metrics, step, token and preemption counts to zero."""
        self.bookkeeping.reset()
        self.num_steps = self.num_tokens_read = self.scheduler.num_preemptions = 0
        self.prefixes.reset_counts()

    # -------------------------------------------------------------------------------------------------------- a step

    @torch.no_grad()
    def step(self) -> Iterator[list[Request]]:
        """
        Runs one step, or several for the same requests. Yields lists of requests that have new tokens or are over, as
        soon as they are known.
        """
        refused = self._refuse_adapters()
        if refused:
            yield refused
        self.prefixes.begin_step(self.scheduler.active)
        self.noises.give(self.scheduler.admit())
        yield from prompt_reading.run(self)
        yield from self._decode(self.scheduler.decoding)

    def _refuse_adapters(self) -> list[Request]:
        """Fails requests whose adapter is gone, or cannot be chosen any more, and returns them."""
        refused: list[Request] = []
        if not self.target.adapters.is_wanted:
            return refused  # a queue may be long
        for request in (*self.scheduler.active, *self.scheduler.waiting):
            error = self.target.adapters.error_of(request.adapter)
            if error is not None:
                request.fail(ValueError(error))
                refused.append(request)
        return refused

    def end(self, request: Request) -> None:
        """Removes a request from the batch and the queue; in decoding steps, at their end."""
        if self._leaving is None:
            self.scheduler.remove(request)
        else:
            self._leaving.append(request)

    @contextmanager
    def _keeping_blocks(self) -> Iterator[None]:
        """A context in which requests that end keep their blocks, because a step on the device may write to them."""
        self._leaving = []
        try:
            yield
        finally:
            leaving, self._leaving = self._leaving, None
            for request in leaving:
                self.scheduler.remove(request)

    def _decode(self, requests: list[Request]) -> Iterator[list[Request]]:
        """
        Runs a decoding step for all prefilled requests, each of which gets at least one token, and yields them. On a
        device further steps of the same requests may follow, until something changes.
        """
        phase = self.metrics.phase
        for request in requests:
            self.scheduler.make_room(request)
        requests = self.scheduler.decoding  # without those that were just preempted
        if not requests:
            return
        before = dict(self.metrics.seconds)
        self.speculates = self.policy.speculates(len(self.scheduler.active), len(self.scheduler.waiting))
        some_rest = any(request.draft_backoff.left for request in requests)
        with phase("propose"):
            groups = grouping.groups_of(self, requests) if self.speculates else []
        ran = False
        with self._keeping_blocks():
            outcomes = self._runner.run(requests, groups, lambda: not some_rest and self._may_repeat(requests))
            while True:
                with phase("steps"):
                    outcome = next(outcomes, None)
                    if outcome is None:
                        break
                    advanced = [request for request in requests if not request.is_over]
                    self._take_outcome(requests, groups, outcome)
                    ran = True
                yield advanced
        if not ran:
            self.num_steps += 1
            self.last_end = None
            self.device_steps.deliver_results()
            host_step.run(host_step.RequestStep(self, requests, groups), before)
            yield requests

    def _may_repeat(self, requests: list[Request]) -> bool:
        """
        Whether the step that was launched last may run again for the same requests: nobody waits for it to end, none
        of them has left, and none takes another tree.
        """
        scheduler = self.scheduler
        return not (
            (self.ranks.are_several and self.choices.are_learning)  # of times, on which ranks agree after each step
            or not self.runs_ahead
            or self.has_news()
            or any(request.is_over or request.draft_backoff.left for request in requests)
            or len(scheduler.active) > len(requests)
            or scheduler.num_admissible(scheduler.waiting)
            or self.choices.are_given
            or (self.speculates and not self.choices.begin_next(requests))
        )

    def _take_outcome(self, requests: list[Request], groups: list[DraftGroup], outcome: Outcome) -> None:
        """Gives requests the tokens of a step that ran on the device as a whole, and updates caches and counts."""
        walk = outcome.walk
        self.num_steps += 1
        for row, request in enumerate(requests):
            if row in outcome.left_out:
                continue
            tokens, path = walk.tokens[row], walk.paths[row] or []
            num_kept = self.bookkeeping.append(request, tokens)
            error = outcome.errors.get(row)
            if error is not None and not request.is_over:
                request.fail(error, by_its_options=isinstance(error, Exception))
            request.logprobs += outcome.logprobs.get(row, [])[:num_kept]
            if num_kept < len(tokens) and not self.runs_ahead:
                self.target.cache.limit_states(request.table, num_kept)
            if request.error is not None or row in outcome.spoiled:
                walk.paths[row] = None
                continue
            self.bookkeeping.num_tokens_generated += num_kept
            walk.paths[row] = path = path[:num_kept]
            self.target.cache.note_length(request.table, request.length - 1)
            self.bookkeeping.count(request, len(path), outcome.drafted.get(row))
        for rows, features in outcome.features:
            kept = [[] if (own := walk.paths[row]) is None else list(range(len(own) + 1)) for row in rows]
            self.drafting.observe([requests[row] for row in rows], kept, features)
        kept_of_all = [0 if path is None else len(path) + 1 for path in walk.paths]
        if self.drafting.features is not None:
            self.drafting.note_features(requests, kept_of_all)
        elif not outcome.features:
            self.drafting.observe(requests, [[] if path is None else [0, *path] for path in walk.paths])
        seconds = self._seconds_of_step(outcome)
        if self.speculates:
            ran = outcome.drafted.keys() | outcome.left_out | outcome.spoiled.keys()
            of_groups = {row: group.draft_request.plan.tree for group in groups for row in group.rows}
            trees = {row: tree for row, tree in of_groups.items() if row in ran}
            paths = [path if outcome.drafted.get(row) else None for row, path in enumerate(walk.paths)]
            flags = {"only_read": outcome.only_read, "was_deferred": outcome.was_deferred}
            self.choices.end_device_step(trees, paths, seconds, **flags, row_outcomes=outcome.row_outcomes)
        self.bookkeeping.mark_nan_of_failed(requests)
        # What goes on was wiped after this run had been launched.
        self.bookkeeping.mark_nan([requests[row] for row in outcome.left_with_nan if requests[row].is_over])
        if outcome.spoiled:
            self.bookkeeping.refuse_spoiled([(requests[row], drafted) for row, drafted in outcome.spoiled.items()])

    def _seconds_of_step(self, outcome: Outcome) -> float | None:
        """
        Seconds from the launch of a captured step, or from the report of the step before it if that came later, to its
        report. (What the host does with a report counts where it keeps the device waiting, as the next step is then
        launched late, and not in a step that was launched alone: else that would seem slower than one launched ahead.)
        None if that is no measure of a step, because prompts were read in between (as after every pause) or something
        was captured.
        """
        before, self.last_end = self.last_end, outcome.came_at
        if before is None or outcome.captured:
            return None
        seconds = outcome.came_at - max(before, outcome.launched_at)
        if self.choices.are_learning:
            seconds = self.ranks.agree_on(seconds)[0]
            self.device_steps.budget.time += seconds
        return seconds
