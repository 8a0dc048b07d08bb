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
from ..models.asked_once import asking_once
from ..ranks import Ranks
from . import grouping, host_step, prompt_reading
from .accepting import Acceptance
from .bookkeeping import Bookkeeping
from .captured import DeviceSteps, StepRunner
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
        self.lets_rows_rest = False
        """
        Whether rows of requests that are over may rest in steps of the others: in a call, for whose places and blocks
        no request waits.
        """
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
            with asking_once():
                self._renew(stack)
            self._num_runs += 1
            self.present_run = self._num_runs
            stack.callback(setattr, self, "present_run", None)
            yield

    def _renew(self, stack: ExitStack) -> None:
        """Enters the contexts of models that run steps, and takes over what has changed since the last one."""
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
        """A context of runs in which requests that end keep their blocks: the one on its way may write to them."""
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
                    outcome.give(self, requests, groups)
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
        of them takes another tree, and none has left, or its row may rest.
        """
        scheduler = self.scheduler
        left = [request for request in requests if not request.is_over]
        return not (
            (self.ranks.are_several and self.choices.are_learning)  # of times, on which ranks agree after each step
            or not self.runs_ahead
            or self.has_news()
            or any(request.draft_backoff.left for request in left)
            or not left
            or (len(left) < len(requests) and not self._may_rest(requests, left))
            or len(scheduler.active) > len(requests)
            or (scheduler.waiting and scheduler.num_admissible(scheduler.waiting))
            or self.choices.are_given
            or (self.speculates and not self.choices.begin_next(requests))
        )

    def _may_rest(self, requests: list[Request], left: list[Request]) -> bool:
        """
        Whether the rows of those requests that are over may rest in the steps of the ones that are `left`, where steps
        get no smaller: of half of them at most, over whose text attention still runs, and of none that has failed.
        """
        return (
            self.lets_rows_rest
            and 2 * len(left) >= len(requests)
            and all(request.error is None for request in requests)
            and self.policy.speculates(len(left), 0) == self.speculates
        )
