"""The engine's process: what it loads, and how it starts and ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...batching import Limits, SpeculativeBatchingManager
from ...benchmarking import loading
from ...config import SpeculativeConfig
from ...forward import execution_device
from .client import EngineClient
from .messages import NotServed
from .server import EngineServer


SWITCH_INTERVAL = 0.0005
"""
Seconds for which a Python thread may keep the others waiting. By default 0.005, in which a small model on a GPU does a
whole step: its thread would wait as long for the one that takes requests.
"""
SECONDS_TO_END = 20.0


@dataclass(frozen=True)
class EngineOptions:
    """
    What an engine loads and how it runs, in words that go from process to process.

    Args:
        target (`str`, *optional*), draft (`str`): see `hf-specdec serve`.
        speculative_config (`SpeculativeConfig`): how requests speculate.
        device (`str`), dtype (`str`): where the models are, and in what.
        device_map (`str`, *optional*): instead of the device, for the target.
        max_requests (`int`, *optional*), max_batch_tokens (`int`, *optional*), num_blocks (`int`, *optional*),
        max_queue_size (`int`): limits; by default those of a manager.
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


class StartError(Exception):
    """
    An engine cannot start.

    Args:
        option (`str`): the argument of the command line that stands against it.
        reason (`str`): what is wrong with it.
    """

    def __init__(self, option: str, reason: str):
        super().__init__(reason)
        self.option, self.reason = option, reason


@contextmanager
def running_engine(options: EngineOptions) -> Iterator[EngineClient]:
    """
    Starts an engine in a process of its own and waits until its models are loaded; it warms up while it is asked
    already. It ends when this is left, or when this process ends.

    Raises:
        StartError: if it cannot start.
    """
    context = multiprocessing.get_context("spawn")  # a fork would share what this one knows of a GPU
    connection, theirs = context.Pipe()
    process = context.Process(target=_run, args=(options, theirs), name="hf-specdec engine", daemon=True)
    process.start()
    theirs.close()
    client = None
    try:
        try:
            first = connection.recv()
        except EOFError:
            process.join()
            raise StartError("serve", f"the engine's process has ended with exit code {process.exitcode}.") from None
        if isinstance(first, NotServed):
            raise StartError(first.option, first.reason)
        client = EngineClient(connection, first)
        yield client
    finally:
        if client is None:
            process.kill()  # there is nothing yet that it would have to end well
        else:
            client.close()
        process.join(SECONDS_TO_END)
        if process.is_alive():
            process.kill()
            process.join()


def _run(options: EngineOptions, connection: Connection) -> None:
    """The process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a terminal: the server ends this one
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        # In a thread that ends, see `RequestLoop.run_here`.
        with _while_the_server_lives(), ThreadPoolExecutor(max_workers=1) as loader:
            manager, tokenizer = loader.submit(load, options).result()
    except StartError as error:
        connection.send(NotServed(error.option, error.reason))
        return
    manager.warmup()
    with manager:
        EngineServer(manager, tokenizer, connection).serve()
        manager.stop(hard_stop=True)


@contextmanager
def _while_the_server_lives() -> Iterator[None]:
    """Inside, the process ends when the server's does, for which nobody looks otherwise."""
    has_left, server = threading.Event(), multiprocessing.parent_process()
    assert server is not None

    def watch() -> None:
        server.join()
        if not has_left.is_set():
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        has_left.set()


def load(options: EngineOptions) -> tuple[SpeculativeBatchingManager, PreTrainedTokenizerBase]:
    """
    The manager with its models, not started, and the target's tokenizer.

    Raises:
        StartError: if something cannot be loaded, or does not go together.
    """
    dtype = loading.DTYPES[options.dtype]
    target = _loaded("TARGET", loading.load_target, options.target, dtype, options.device, options.device_map)
    tokenizer = _loaded("TARGET", loading.load_tokenizer, options.target)
    draft = _loaded("--draft", loading.load_draft, options.draft, dtype, str(execution_device(target)))
    defaults = Limits.of(None, target.device, target.num_parameters())
    limits = Limits(
        num_blocks=options.num_blocks,
        max_requests=options.max_requests or defaults.max_requests,
        chunk_size=options.max_batch_tokens or defaults.chunk_size,
        max_queue_size=options.max_queue_size,
    )

    def manager() -> SpeculativeBatchingManager:
        return SpeculativeBatchingManager(
            target,
            continuous_batching_config=limits,
            assistant_model=draft,
            speculative_config=options.speculative_config,
        )

    return _loaded("--draft", manager), tokenizer


def _loaded(option: str, load_it: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return load_it(*arguments)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise StartError(option, str(error)) from error
