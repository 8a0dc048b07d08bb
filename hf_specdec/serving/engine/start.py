"""
The start of the engine's process, and its end. Imports little, so that both processes import torch and transformers at
the same time.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from .options import EngineOptions
from .parent import while_the_parent_lives


if TYPE_CHECKING:
    from .client import EngineClient


SECONDS_TO_STOP = 3.0
"""Seconds that the step that runs has to end when the engine is asked to; then the engine is killed."""
SECONDS_TO_END = 20.0
"""Seconds that the engine's process has to end when no step runs any more."""


class EngineProcess:
    """
    A context with a process that imports what an engine needs, and becomes one when it is told its options. It ends
    with the context, however that is left, or with the calling process (on Linux: with the calling thread), even if a
    step hangs.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA again
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs,), name="hf-specdec engine", daemon=True)
        self._theirs = theirs
        self._client: EngineClient | None = None

    def __enter__(self) -> EngineProcess:
        self._process.start()
        self._theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._client is not None and self._client.stop(SECONDS_TO_STOP):
                self._process.join(SECONDS_TO_END)
        finally:  # a step may hang, and another Ctrl-C may end the wait
            self._process.kill()
            self._process.join()

    def begin(self, options: EngineOptions, tell: Callable[[str], None] = lambda text: None) -> EngineClient:
        """
        Lets the engine load its models, and does not wait for them; see `EngineClient.wait_until_loaded`.

        Args:
            options (`EngineOptions`): of the engine.
            tell (`Callable`): called with a line about each stage of the start.
        """
        from .client import EngineClient

        try:
            self._connection.send(options)
        except OSError:
            pass  # it has ended, as the client will find
        self._client = EngineClient(self._connection, tell, self._process)
        return self._client


@contextmanager
def running_engine(options: EngineOptions, tell: Callable[[str], None] = lambda text: None) -> Iterator[EngineClient]:
    """
    A context with an engine. Waits until the models are loaded; the engine takes requests while it warms up.

    Args:
        options (`EngineOptions`), tell (`Callable`): see `EngineProcess.begin`.

    Raises:
        StartError: if the engine cannot start.
    """
    with EngineProcess() as process:
        client = process.begin(options, tell)
        client.wait_until_loaded()
        yield client


def _run(connection: Connection) -> None:
    """The main function of the engine's process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a terminal: the server ends the engine
        signal.signal(number, signal.SIG_IGN)
    with while_the_parent_lives():
        from .process import run

        try:
            options = connection.recv()
        except EOFError:
            return  # the server has found its own options wrong
        run(options, connection)
