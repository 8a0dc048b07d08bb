"""Answers with several texts: more than one prompt, or more than one choice for each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any

from fastapi.responses import JSONResponse

from .generation import OneRequest, asked_for
from .stream_ends import event
from .tokenising import Later
from .usage import IN_TEXT, summed_usage


def begin_all(prompts: list[tuple[Later, list[Any]]], per_prompt: int) -> list[Any]:
    """
    Begins all answers: responses of streams, or coroutines of whole answers. If one cannot begin, none does.

    Args:
        prompts (`list`): what answers each prompt, with its arguments.
        per_prompt (`int`): answers to each prompt.
    """
    begun: list[Any] = []
    try:
        for later, arguments in prompts:
            for number in range(per_prompt):
                begun.append(later.another(number, arguments))
    except BaseException:
        cancel_all()
        raise
    return begun


async def all_of(waiting: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """What all of these return. If one fails, the requests of all are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in waiting]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        cancel_all()
        raise


async def one_begun(requests: list[OneRequest]) -> None:
    """
    Waits until the engine has admitted all of these requests and one has a token: others may wait for its place.

    Raises:
        the error of a request that is refused, or of one that fails before any has a token. All are cancelled then.
    """
    await all_of([request.admitted() for request in requests])
    waiting = [asyncio.ensure_future(request.begun()) for request in requests]
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for error in [one.exception() for one in done]:  # all of them are looked at: asyncio logs others
            if error is not None:
                raise error
    except BaseException:
        cancel_all()
        raise
    finally:
        for one in waiting:
            one.cancel()


def cancel_all() -> None:
    """Cancels the requests to the engine on behalf of this connection."""
    for request in asked_for.get() or ():
        request.cancel()


def one_answer(answers: list[JSONResponse], per_prompt: int) -> JSONResponse:
    """
    The answer with the choices of all.

    Args:
        answers (`list[JSONResponse]`): answers with a choice each, prompt by prompt.
        per_prompt (`int`): choices of each prompt.
    """
    found = [json.loads(bytes(answer.body)) for answer in answers]
    choices = [one["choices"][0] | {"index": number} for number, one in enumerate(found)]
    usage = summed_usage([one["usage"] for one in found], per_prompt)
    return JSONResponse(found[0] | {"choices": choices, "usage": usage})


async def one_stream(
    streams: list[Any], per_prompt: int, include_usage: bool | None = None
) -> AsyncGenerator[str, None]:
    """
    The chunks of all streams as they come, with their choices' indices and the name of the first.

    Args:
        streams (`list`): events of streams with a choice each, prompt by prompt.
        per_prompt (`int`): choices of each prompt.
        include_usage (`bool`, *optional*): whether a last chunk without choices has the usage. None: the last chunk of
            the last choice has it.
    """
    usages: list[dict[str, Any]] = [{}] * len(streams)
    first: dict[str, Any] = {}
    async with aclosing(_as_they_come(streams)) as texts:
        async for number, text in texts:
            if len(streams) == 1 and IN_TEXT not in text and (first or not include_usage):
                yield text
                continue
            if not text:
                continue
            chunks = [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part]
            first = first or chunks[0]
            for chunk in chunks:
                chunk["id"], chunk["choices"][0]["index"] = first["id"], number
                usages[number] = chunk.pop("usage", None) or usages[number]
            if include_usage is None and all(usages):
                chunks[-1]["usage"] = summed_usage(usages, per_prompt)
            yield "".join(map(event, chunks))
    if include_usage and first:
        kept = {name: value for name, value in first.items() if name not in ("choices", "usage")}
        yield event(kept | {"choices": [], "usage": summed_usage(usages, per_prompt)})


async def _as_they_come(streams: list[Any]) -> AsyncGenerator[tuple[int, str], None]:
    """The texts of all streams, each with the number of its stream. The first error of one ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as texts:
            async for text in texts:
                yield 0, text
        return
    queue: asyncio.Queue[tuple[int, str | BaseException | None]] = asyncio.Queue()

    async def read(number: int, stream: AsyncIterator[str]) -> None:
        try:
            async for text in stream:
                queue.put_nowait((number, text))
            queue.put_nowait((number, None))
        except Exception as error:
            queue.put_nowait((number, error))

    tasks = [asyncio.ensure_future(read(number, stream)) for number, stream in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            number, found = await queue.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                left -= 1
            else:
                yield number, found
    finally:
        for task in tasks:
            task.cancel()
        if left:
            cancel_all()
