"""transformers' handlers of chats, completions and responses, with our requests."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse
from openai.types.chat.chat_completion_chunk import ChoiceDeltaToolCall, ChoiceDeltaToolCallFunction
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler

from .answers import is_cut
from .calls import CallPiece
from .one_model import OneModel
from .own_requests import OwnRequests, config_in
from .requests import BODIES, normal_items, normal_messages, prompts_of
from .scored_answers import ScoredChoices, ScoredResponses
from .stream_ends import event, until_failed
from .streams import QuickChunks
from .tokenising import TokenisedElsewhere
from .work_pool import WorkPool


class _CallChunks(ChatCompletionHandler):
    """Chunks with calls as OpenAI's: the first of a call has its id and its name, further ones pieces of arguments."""

    def _build_chunk_sse(self, request_id: str = "", **options: Any) -> str:
        piece, calls = options.get("content"), options.get("tool_calls")
        if isinstance(piece, CallPiece):
            name = f"{request_id}_tool_call_{piece.index}"
            return super()._build_chunk_sse(request_id, model=options["model"], tool_calls=[_delta(piece, name)])
        if not calls:
            return super()._build_chunk_sse(request_id, **options)
        (call,) = calls
        if call.function.name is None:  # all is told
            return ""
        begins = _delta(CallPiece(call.index, call.function.name, ""), call.id)
        deltas = [begins, _delta(CallPiece(call.index, None, call.function.arguments))]
        build = super()._build_chunk_sse
        return "".join(build(request_id, **options | {"tool_calls": [one]}) for one in deltas)


def _delta(piece: CallPiece, name: str | None = None) -> ChoiceDeltaToolCall:
    function = ChoiceDeltaToolCallFunction(name=piece.name, arguments=piece.arguments)
    is_first = piece.name is not None
    return ChoiceDeltaToolCall(
        index=piece.index, id=name if is_first else None, type="function" if is_first else None, function=function
    )


class Chats(TokenisedElsewhere, OwnRequests, ScoredChoices, QuickChunks, _CallChunks):
    _body = BODIES["/v1/chat/completions"]

    def _mark_demanded(self, answer: dict[str, Any], is_cut: bool) -> None:
        answer["choices"][0]["finish_reason"] = "length" if is_cut else "stop"

    def _checked(self, body: dict[str, Any]) -> dict[str, Any]:
        body = super()._checked(body)
        return body | {"messages": normal_messages(body["messages"])}


class Completions(TokenisedElsewhere, OwnRequests, ScoredChoices, QuickChunks, CompletionHandler):
    _body = BODIES["/v1/completions"]
    _is_chat = _has_parts = False

    def _prompts_in(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        return [body | {"prompt": prompt} for prompt in prompts_of(body["prompt"])]


class _Incomplete(ScoredResponses):
    """Answers responses as incomplete if they are as long as they may be (transformers' handler completes all)."""

    model_manager: OneModel

    async def _non_streaming(self, *args: Any, **options: Any) -> JSONResponse:
        response = await super()._non_streaming(*args, **options)
        return JSONResponse(_incomplete(json.loads(response.body))) if is_cut(config_in(args)) else response

    def _streaming(self, *args: Any, **options: Any) -> StreamingResponse:
        response = super()._streaming(*args, **options)
        response.body_iterator = _told_if_incomplete(response.body_iterator, config_in(args), self.model_manager.work)
        return response


class Responses(TokenisedElsewhere, OwnRequests, _Incomplete):
    """Handles responses, which are streamed only if that is asked for (transformers' handler does so by default)."""

    _body = BODIES["/v1/responses"]
    _ended = staticmethod(until_failed)

    def _one_stream(self, streams: list[Any], number: int, include_usage: bool | None) -> Any:
        return streams[0]  # its last event has the usage

    def _checked(self, body: dict[str, Any]) -> dict[str, Any]:
        body = super()._checked(body)
        return body | {"input": normal_items(body["input"]), "stream": body.get("stream") or False}


async def _told_if_incomplete(events: Any, config: GenerationConfig, work: WorkPool) -> AsyncGenerator[str, None]:
    """The events of a streamed response, whose last one says so if the text is as long as it may be."""
    async with aclosing(events):
        async for text in events:
            if is_cut(config) and '"type":"response.completed"' in text:
                text = await work.run(_as_incomplete, text, num_tokens=len(text) // 4)
            yield text


def _as_incomplete(completed: str) -> str:
    """The event at the end of a response as that of one whose text is as long as it may be."""
    last = json.loads(completed.removeprefix("data: "))
    return event(last | {"type": "response.incomplete", "response": _incomplete(last["response"])})


def _incomplete(response: dict[str, Any]) -> dict[str, Any]:
    """A completed response as one whose text is as long as it may be."""
    return response | {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
