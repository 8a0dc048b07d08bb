"""A manager of requests with the interface of transformers' `ContinuousBatchingManager`, which speculates."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ..config import SpeculativeConfig
from ..drafters import as_drafter
from ..metrics import SpeculationMetrics
from .admission import Admission
from .blocks import BlockPool
from .engine import Engine
from .limits import Limits
from .policy import LoadPolicy
from .request import Request
from .request import SpeculativeGenerationOutput as Output
from .results import Results


logger = logging.get_logger(__name__)

_ABOUT_REQUESTS = ("tree", "speculate", "seed", "generation_config")


@dataclass
class BackgroundThreadStatus:
    """How the thread of a manager fares; `fatal_error` is what ended it, if anything did."""

    fatal_error: BaseException | None = None


@dataclass(frozen=True)
class ManagerState:
    """
    What a manager is doing.

    Args:
        num_running (`int`), num_waiting (`int`): requests.
        speculates (`bool`): whether the load lets requests speculate.
        num_free_blocks (`int`), num_blocks (`int`): memory for K/V.
        num_preemptions (`int`): how often a request has lost its K/V to an older one.
        num_prompt_tokens (`int`), num_generation_tokens (`int`): tokens read and written so far.
        speculation (`SpeculationMetrics`): the counts of all requests so far.
    """

    num_running: int
    num_waiting: int
    speculates: bool
    num_free_blocks: int
    num_blocks: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generation_tokens: int
    speculation: SpeculationMetrics = field(repr=False)


class SpeculativeBatchingManager:
    """
    Runs requests that come and go, in a thread of its own. Made by
    `model.init_continuous_batching(assistant_model=…, tree=…)`; also a context manager, which starts and stops it.

    Args:
        model (`PreTrainedModel`): the target.
        generation_config (`GenerationConfig`, *optional*): the options of requests that give none.
        continuous_batching_config (`ContinuousBatchingConfig` or `Limits`, *optional*): how much runs at once.
        assistant_model: what drafts, as in `generate`.
        speculative_config (`SpeculativeConfig`, *optional*): how requests speculate.

    Raises:
        ValueError, TypeError: for a target, draft or option that cannot be served.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | Limits | None = None,
        *,
        assistant_model: Any,
        speculative_config: SpeculativeConfig | None = None,
    ):
        config = SpeculativeConfig() if speculative_config is None else speculative_config
        self.model, self.background_thread_status = model, BackgroundThreadStatus()
        drafter, self._limits = as_drafter(assistant_model), Limits.of(continuous_batching_config, model.device)
        self._admission = Admission(model, assistant_model, drafter, generation_config, config)
        num_blocks = self._limits.blocks([model, *drafter.models], model.device)
        pool = self._admission.pool = BlockPool(num_blocks, self._limits.block_size)
        self.engine = Engine(
            model,
            drafter,
            pool,
            LoadPolicy(
                disable_by_batch_size=config.disable_by_batch_size, counts_waiting=config.disable_counts_waiting
            ),
            max_requests=self._limits.max_requests,
            chunk_size=self._limits.chunk_size,
            max_step_nodes=config.max_step_nodes,
        )
        self._results = Results()
        self._inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._cancelled: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._requests: dict[str, Request] = {}
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_requests = 0
        self._stops: str | None = None

    # ------------------------------------------------------------------------------------------------- start and stop

    def is_running(self) -> bool:
        """Whether the thread has been started and is alive."""
        return self._thread is not None and self._thread.is_alive()

    def warmup(self) -> None:
        """Nothing to warm up: steps run eagerly."""

    def start(self) -> None:
        """Starts the thread."""
        if self.is_running():
            logger.warning("The manager is already running.")
            return
        self.background_thread_status.fatal_error = None
        self._stops = None
        self._results.open()
        self._thread = threading.Thread(target=self._run, name="hf-specdec-manager", daemon=True)
        self._thread.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """
        Stops the thread when all requests are done, or with `hard_stop` at once: those that are left fail.

        Args:
            block (`bool`): whether to wait for it, at most `timeout` seconds.
            keep_for_next_session (`bool`): must be False: a manager can be started again as it is.
        """
        if keep_for_next_session:
            raise ValueError("`keep_for_next_session=True`: keep the manager yourself, and `start` it again.")
        if self._thread is None:
            return
        self._stops = "hard" if hard_stop else self._stops or "flush"
        self._news.set()
        if block:
            self.join(timeout=timeout)

    def join(self, stop_trigger_time: float | None = None, timeout: float | None = None) -> None:
        """Waits for the thread to end."""
        if self._thread is None:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning(f"The manager's thread did not end within {timeout} seconds.")
        else:
            self._thread = None

    def destroy(self) -> None:
        """Stops at once and forgets all requests."""
        self.stop(hard_stop=True)

    def __enter__(self) -> SpeculativeBatchingManager:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self.stop(hard_stop=kind is not None)

    # -------------------------------------------------------------------------------------------------------- requests

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        *,
        tree: Any = None,
        speculate: bool = True,
        seed: int | None = None,
        generation_config: GenerationConfig | None = None,
        **options: Any,
    ) -> str:
        """
        Adds a request; it joins the others as soon as there is room.

        Args:
            input_ids (`list[int]`): the prompt.
            request_id (`str`, *optional*): its name; made up if there is none.
            max_new_tokens (`int`, *optional*): most tokens to generate.
            streaming (`bool`): whether there is a result at every step, and not at the end alone.
            record_timestamps (`bool`): whether the time of every token is kept.
            eos_token_id (`int` or `list[int]`, *optional*): tokens that end the text; -1 for none.
            tree (*optional*): the request's own tree, as in `generate`; by default the manager's.
            speculate (`bool`): False for a request that is to do without.
            seed (`int`, *optional*): makes what is sampled the same whatever else runs. (It is then drawn from the
                target at every place by that place's own number, so that drafts have no part in it.)
            generation_config (`GenerationConfig`, *optional*): instead of the manager's.
            options: generation options of this request (`do_sample`, `temperature`, `stop_strings`, …), and
                `logits_processor`, `stopping_criteria`, `prefix_allowed_tokens_fn` and `tokenizer`, as in `generate`.

        Returns:
            `str`: the request's name.

        Raises:
            ValueError, TypeError: for what cannot be served: it can never fit, an option is unknown, …
            queue.Full: if as many requests wait as may.
        """
        self._check_open()
        self._check_queue(1)
        options = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id} | options
        with self._lock:
            number, self._num_requests = self._num_requests, self._num_requests + 1
        request = self._admission.request(
            f"req_{number}" if request_id is None else request_id,
            input_ids,
            options,
            tree=tree,
            speculate=speculate,
            seed=seed,
            generation_config=generation_config,
            streaming=streaming,
            record_timestamps=record_timestamps,
        )
        self._submit([request])
        return request.request_id

    def add_requests(
        self,
        inputs: list[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **options: Any,
    ) -> list[str]:
        """
        Adds several requests with the same options; all of them or, if one cannot be served, none. See `add_request`.
        """
        self._check_open()
        self._check_queue(len(inputs))
        arguments = {name: options.pop(name) for name in _ABOUT_REQUESTS if name in options}
        with self._lock:
            first, self._num_requests = self._num_requests, self._num_requests + len(inputs)
        requests = [
            self._admission.request(
                f"req_{number}",
                input_ids,
                {"max_new_tokens": max_new_tokens} | options,
                streaming=streaming,
                record_timestamps=record_timestamps,
                **arguments,
            )
            for number, input_ids in enumerate(inputs, start=first)
        ]
        self._submit(requests)
        return [request.request_id for request in requests]

    def cancel_request(self, request_id: str) -> None:
        """Ends a request; its result so far comes with the error "cancelled". Nothing happens if it is over."""
        self._cancelled.put(request_id)
        self._news.set()

    def _submit(self, requests: list[Request]) -> None:
        with self._lock:
            for request in requests:
                if request.request_id in self._requests:
                    raise ValueError(f"`request_id={request.request_id!r}` is running already. Give another.")
            for request in requests:
                self._requests[request.request_id] = request
                self._inbox.put(request)
        self._news.set()

    def _check_open(self) -> None:
        if self.background_thread_status.fatal_error is not None:
            raise RuntimeError("The manager has ended with an error.") from self.background_thread_status.fatal_error
        if self._stops is not None and self.is_running():
            raise RuntimeError("The manager is stopping and takes no more requests.")

    def _check_queue(self, count: int) -> None:
        most = self._limits.max_queue_size
        waiting = len(self._requests) - len(self.engine.scheduler.active)
        if most and waiting + count > most:
            raise queue.Full(f"`max_queue_size={most}`: {waiting} requests are waiting. Come back later.")

    # --------------------------------------------------------------------------------------------------------- results

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> Output | None:
        """
        The next result, of one request if it is named. None after `timeout` seconds, or if the manager has ended and
        nothing is left.
        """
        return self._results.get(request_id, timeout if self.is_running() else 0)

    def __iter__(self) -> Iterator[Output]:
        """Results as they come, while the manager runs."""
        while self.is_running():
            result = self.get_result(timeout=0.1)
            if result is not None:
                yield result

    def request_id_iter(self, request_id: str) -> Iterator[Output]:
        """Results of one request as they come, up to its last."""
        while (result := self.get_result(request_id, timeout=0.1)) is not None or self.is_running():
            if result is not None:
                yield result
                if result.is_finished():
                    return

    def register_result_handler(self, request_id: str, callback: Callable[[Output], None]) -> None:
        """Lets `callback` be called in the running event loop with every result of a request."""
        self._results.register(request_id, callback, asyncio.get_running_loop())

    @property
    def state(self) -> ManagerState:
        """What the manager is doing now."""
        engine, scheduler = self.engine, self.engine.scheduler
        num_running = len(scheduler.active)
        return ManagerState(
            num_running=num_running,
            num_waiting=max(len(self._requests) - num_running, 0),
            speculates=engine.speculates,
            num_free_blocks=engine.pool.num_free,
            num_blocks=engine.pool.num_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=engine.num_tokens_read,
            num_generation_tokens=engine.num_tokens_generated,
            speculation=engine.metrics,
        )

    # ------------------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            if self.model.device.type == "cuda" and self.model.device.index is not None:
                torch.cuda.set_device(self.model.device)
            with self.engine.running():
                while self._go_on():
                    pass
            self._end_all("The manager was stopped before the request was done.")
        except BaseException as error:
            logger.error("The manager has ended with an error.", exc_info=True)
            self.background_thread_status.fatal_error = error
            self._end_all(f"The manager has ended with an error: {type(error).__name__}: {error}")
        finally:
            self._results.close()

    def _go_on(self) -> bool:
        """One step, or a wait for news. False if the thread is to end."""
        self._news.clear()
        self._take_in()
        if self._stops == "hard":
            return False
        if self.engine.scheduler.has_work:
            for request in self.engine.step():
                if request.is_over:
                    self._end(request)
                elif request.streaming:
                    self._results.deliver(request.to_generation_output())
        elif self._stops is not None:
            return False
        else:
            self._news.wait()
        return True

    def _take_in(self) -> None:
        while not self._inbox.empty():
            self.engine.scheduler.add(self._inbox.get())
        while not self._cancelled.empty():
            request = self._requests.get(self._cancelled.get())
            if request is not None:
                request.fail("cancelled")
                self._end(request)

    def _end(self, request: Request) -> None:
        self.engine.end(request)
        with self._lock:
            self._requests.pop(request.request_id, None)
        self._results.deliver(request.to_generation_output())

    def _end_all(self, error: str) -> None:
        while not self._inbox.empty():
            self._inbox.get()
        for request in list(self._requests.values()):
            request.fail(error)
            self._end(request)
