"""The engine's process: loading, start and end."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from transformers import PreTrainedTokenizerBase

from ... import loading
from ...batching import Limits, SpeculativeBatchingManager
from ...config import SpeculativeConfig
from ...models.modules import num_parameters_of
from ...models.structure import execution_device
from ..interpreter import let_go_at_the_end, let_steps_go_first
from .client import EngineClient
from .messages import NotServed, Stage
from .parent import while_the_parent_lives
from .server import EngineServer


SECONDS_TO_STOP = 3.0
"""Seconds that the step that runs has to end when the engine is asked to; then the engine is killed."""
SECONDS_TO_END = 20.0
"""Seconds that the engine's process has to end when no step runs any more."""


@dataclass(frozen=True)
class EngineOptions:
    """
    Options of an engine, which can be pickled for its process.

    Args:
        target (`str`, *optional*), draft (`str`): target and draft, as in `hf-specdec serve`.
        speculative_config (`SpeculativeConfig`): how requests speculate.
        device (`str`): device of the models.
        dtype (`str`): name of the models' dtype, a key of `loading.DTYPES`.
        device_map (`str`, *optional*): accelerate's device map for the target, in place of `device`.
        max_requests (`int`, *optional*), max_batch_tokens (`int`, *optional*), num_blocks (`int`, *optional*),
            max_queue_size (`int`): limits of the manager (`max_batch_tokens` is `Limits.chunk_size`); by default those
            of `Limits.of`.
        with_images (`bool`): whether the target is loaded with what reads images.
        adapters (`dict[str, str]`): Hub id or folder of each LoRA adapter that requests can choose, by name.
        shares_prefixes (`bool`): whether requests whose texts begin alike share K/V blocks.
    """

    target: str | None
    draft: str
    speculative_config: SpeculativeConfig
    device: str
    dtype: str
    device_map: str | None = None
    max_requests: int | None = None
    max_batch_tokens: int | None = None
    num_blocks: int | None = None
    max_queue_size: int = 0
    with_images: bool = False
    adapters: dict[str, str] = field(default_factory=dict)
    shares_prefixes: bool = True


class StartError(Exception):
    """
    Raised when an engine cannot start.

    Args:
        option (`str`): the command-line argument at fault.
        reason (`str`): what is wrong with the argument.
    """

    def __init__(self, option: str, reason: str):
        super().__init__(reason)
        self.option, self.reason = option, reason


@contextmanager
def running_engine(options: EngineOptions, tell: Callable[[str], None] = lambda text: None) -> Iterator[EngineClient]:
    """
    A context with an engine in a process of its own. Waits until the models are loaded; the engine takes requests
    while it warms up. The engine ends with the context, however that is left, or with the calling process (on Linux:
    with the calling thread), even if a step hangs.

    Args:
        options (`EngineOptions`): of the engine.
        tell (`Callable`): called with a line about each stage of the start.

    Raises:
        StartError: if the engine cannot start.
    """
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA again
    connection, theirs = context.Pipe()
    process = context.Process(target=_run, args=(options, theirs), name="hf-specdec engine", daemon=True)
    process.start()
    theirs.close()
    client = None
    try:
        try:
            while isinstance(first := connection.recv(), Stage):
                tell(first.text)
        except EOFError:
            process.join()
            raise StartError("serve", f"the engine's process has ended with exit code {process.exitcode}.") from None
        if isinstance(first, NotServed):
            raise StartError(first.option, first.reason)
        tell("Ready." if first.is_warm else "Warming up: requests are taken now, and served after it.")
        client = EngineClient(connection, first)
        client.tell = tell
        yield client
    finally:
        try:
            if client is not None and client.stop(SECONDS_TO_STOP):
                process.join(SECONDS_TO_END)
        finally:  # a step may hang, and another Ctrl-C may end the wait
            process.kill()
            process.join()


def _run(options: EngineOptions, connection: Connection) -> None:
    """The main function of the engine's process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a terminal: the server ends the engine
        signal.signal(number, signal.SIG_IGN)
    with while_the_parent_lives():
        try:
            # Loads in a thread that ends, so that its worker threads do too; see `RequestLoop.run_here`.
            with ThreadPoolExecutor(max_workers=1) as loader:
                tell = lambda text: connection.send(Stage(text))  # noqa: E731
                manager, tokenizer = loader.submit(load, options, tell).result()
        except StartError as error:
            connection.send(NotServed(error.option, error.reason))
            return
        let_steps_go_first()
        manager.warmup()
        with manager:
            EngineServer(manager, tokenizer, connection).serve()
            manager.stop(hard_stop=True)
        connection.close()  # tells the server that no step runs
    let_go_at_the_end()


def load(
    options: EngineOptions, tell: Callable[[str], None] = lambda text: None
) -> tuple[SpeculativeBatchingManager, PreTrainedTokenizerBase]:
    """
    Loads the models. Returns the manager, not started, and the target's tokenizer. `tell` is called with a line about
    each stage.

    Raises:
        StartError: if a model or the tokenizer cannot be loaded, or the models do not fit together.
    """
    dtype = loading.DTYPES[options.dtype]
    place = dtype, options.device, options.device_map
    tell(f"Loading the model {options.target or loading.SMOLLM2}.")
    target = _loaded("TARGET", loading.load_target, options.target, *place, options.with_images)
    _loaded("--lora", loading.load_adapters, target, options.adapters)
    tokenizer = _loaded("TARGET", loading.load_tokenizer, options.target)
    tell(f"Loading the draft {options.draft}.")
    place_of_draft = str(execution_device(target))
    draft = _loaded("--draft", loading.load_draft_to, options.draft, dtype, place_of_draft, target, tokenizer)
    defaults = Limits.of(None, target.device, num_parameters_of(target))
    limits = Limits(
        num_blocks=options.num_blocks,
        max_requests=options.max_requests or defaults.max_requests,
        chunk_size=options.max_batch_tokens or defaults.chunk_size,
        max_queue_size=options.max_queue_size,
        shares_prefixes=options.shares_prefixes,
    )

    def manager() -> SpeculativeBatchingManager:
        made = SpeculativeBatchingManager(
            target,
            continuous_batching_config=limits,
            assistant_model=draft,
            speculative_config=options.speculative_config,
        )
        for name in options.adapters:  # so that a warm-up is one for requests that choose
            made.engine.target.adapters.check(name)
        return made

    tell("Taking memory for keys and values.")
    return _loaded("--draft", manager), tokenizer


def _loaded(option: str, load_it: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return load_it(*arguments)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise StartError(option, str(error)) from error
