"""An engine, and the server's application in front of it, for records in place of HTTP requests."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import loading
from ..serving.app import build_app
from ..serving.defaults import MOST_IMAGE_BYTES, MOST_IMAGE_PIXELS
from ..serving.engine import EngineOptions, running_engine
from ..serving.engine.client import EngineClient
from ..serving.errors import RequestRefused
from ..serving.images import image_reader
from ..serving.in_process import App, answer_to
from ..serving.requests import parsed


ROUTES = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
MOST_BYTES = 64 * 2**20
"""Most bytes of a record."""
REFUSED = range(400, 500)
SECONDS_TO_RETRY = 1.0


class EngineFailed(RuntimeError):
    """Raised for a record without an answer for which it is not to blame."""


class RecordFailed(EngineFailed):
    """Raised for a record whose answer has failed, while the engine goes on with others."""


class Answering:
    """
    Answers records as the server answers requests, with its names, defaults and checks of options.

    Args:
        app (`App`): the server's application, of `build_app`.
        engine (`EngineClient`): its engine.
    """

    def __init__(self, app: App, engine: EngineClient):
        self.app, self.engine = app, engine

    async def answer(self, record: bytes) -> dict[str, Any]:
        """
        The answer to a record: `choices` and `usage` as of a server's answer, and the record's `id`, if it has one.

        Args:
            record (`bytes`): a JSON object, which has `messages` or `prompt`.

        Raises:
            RequestRefused: if the record is wrong; the message says what is.
            RecordFailed: if its answer fails in another way, and the engine goes on.
            EngineFailed: if the engine has ended.
        """
        body = parsed(record)
        name = {"id": body.pop("id")} if "id" in body else {}
        path = _path_of(body)
        content = json.dumps(body).encode()
        while True:
            status, answered = await answer_to(self.app, path, content)
            found = json.loads(answered)
            if status == 200:
                return name | {"choices": found["choices"], "usage": found["usage"]}
            reason = found["error"]["message"]
            if status in REFUSED:
                raise RequestRefused(reason)
            if self.engine.fatal_error is not None:
                raise EngineFailed(reason)
            if status != 503:
                raise RecordFailed(reason)
            await asyncio.sleep(SECONDS_TO_RETRY)


def _path_of(body: dict[str, Any]) -> str:
    """The route that answers a record."""
    named = [name for name in ROUTES if body.get(name) is not None]
    if len(named) != 1:
        given = "both" if named else "neither"
        raise RequestRefused(f"A record has `messages` or `prompt`, but this has {given}.")
    if body.get("stream"):
        raise RequestRefused("`stream` is not for records, whose answers come whole. Leave it out.")
    return ROUTES[named[0]]


@contextmanager
def answering(
    options: EngineOptions,
    *,
    model_name: str | None = None,
    image_hosts: frozenset[str] = frozenset(),
    tell: Callable[[str], None] = lambda text: None,
    **app: Any,
) -> Iterator[Answering]:
    """
    A context with an engine that answers records, in a process of its own; see `running_engine`.

    Args:
        options (`EngineOptions`): of the engine.
        model_name (`str`, *optional*): what records call the model; by default its name in `options`.
        image_hosts (`frozenset[str]`): hosts from which images are fetched.
        tell (`Callable`): called with a line about each stage of the start.
        app: further options of `build_app`, such as `logprobs_mode`.

    Raises:
        OSError, ValueError: if the tokenizer cannot be read.
        StartError: if the engine cannot start.
    """
    tokenizer = loading.load_tokenizer(options.target)
    images = image_reader(options.target, image_hosts, MOST_IMAGE_BYTES, MOST_IMAGE_PIXELS)
    logging.getLogger("transformers.cli.serving").setLevel(logging.ERROR)  # else it tells of every record
    with running_engine(options, tell) as engine:
        name = model_name or options.target or loading.SMOLLM2
        about: dict[str, Any] = {"images": images, "max_body_bytes": MOST_BYTES} | app
        yield Answering(build_app(engine, tokenizer, name, **about), engine)
