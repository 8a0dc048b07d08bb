"""Streamed responses, with calls whose arguments come in pieces: those of transformers have each call at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi.responses import StreamingResponse
from openai.types.responses import (
    ResponseFunctionCallArgumentsDeltaEvent,
    ResponseFunctionCallArgumentsDoneEvent,
    ResponseFunctionToolCall,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
)
from transformers import GenerationConfig
from transformers.cli.serving.response import ResponseHandler, _ResponseStreamBuilder, compute_usage
from transformers.cli.serving.utils import ReasoningText, ToolCall, build_response_parser

from .answers import is_cut
from .calls import CallPiece


class _Events(_ResponseStreamBuilder):
    """The events of a response. The message is there in any case, and before the calls, as in a whole response."""

    def __init__(self, request_id: str, about: dict[str, Any]):
        super().__init__(request_id=request_id, response_defaults=about)
        self._request_id = request_id
        self._call: ResponseFunctionToolCall | None = None
        """The call whose arguments are told."""

    def of(self, part: Any) -> list[str]:
        """The events of a part of the answer."""
        if isinstance(part, ToolCall):
            return self._whole_call(part)
        if isinstance(part, CallPiece):
            return self._call_goes_on(part.arguments) if part.name is None else self._call_begins(part.name)
        if isinstance(part, ReasoningText):
            return ([] if self.reasoning_open else self.start_reasoning()) + self.reasoning_delta(part)
        before = self.finish_reasoning() if self.reasoning_open else []
        return before + ([] if self.message_open else self.start_message()) + self.text_delta(part)

    def end(self, config: GenerationConfig, usage: Any) -> list[str]:
        """The last events."""
        events = self._call_ends("incomplete" if is_cut(config) else "completed")
        events += self._message_ends()
        return events + self.completed(usage)

    def _message_ends(self) -> list[str]:
        events = self.finish_reasoning() if self.reasoning_open else []
        if not self.message_open and self.message_item is None:
            events += self.start_message()
        return events + (self.finish_message() if self.message_open else [])

    def _whole_call(self, call: ToolCall) -> list[str]:
        if call.name is None:  # all is told
            return []
        return self._call_begins(call.name) + self._call_goes_on(call.arguments) + self._call_ends("completed")

    def _call_begins(self, name: str) -> list[str]:
        events = self._call_ends("completed") + self._message_ends()
        self.output_index += 1
        named = f"{self._request_id}_tool_call_{len(self.tool_calls)}"
        self._call = ResponseFunctionToolCall(
            id=named, call_id=named, type="function_call", name=name, arguments="", status="in_progress"
        )
        self.tool_calls.append(self._call)
        added = self._event(ResponseOutputItemAddedEvent, type="response.output_item.added", item=self._call)
        return [*events, added]

    def _call_goes_on(self, text: str) -> list[str]:
        if self._call is None or not text:
            return []
        self._call.arguments += text
        about = {"type": "response.function_call_arguments.delta", "item_id": self._call.id, "delta": text}
        return [self._event(ResponseFunctionCallArgumentsDeltaEvent, **about)]

    def _call_ends(self, status: Any) -> list[str]:
        call, self._call = self._call, None
        if call is None:
            return []
        call.status = status
        about = {"item_id": call.id, "arguments": call.arguments, "name": call.name}
        done = self._event(
            ResponseFunctionCallArgumentsDoneEvent, type="response.function_call_arguments.done", **about
        )
        return [done, self._event(ResponseOutputItemDoneEvent, type="response.output_item.done", item=call)]

    def _event(self, kind: Any, **about: Any) -> str:
        event: str = self._emit(kind(sequence_number=self.seq, output_index=self.output_index, **about))
        return event


class PieceResponses(ResponseHandler):
    """Handles responses."""

    def _streaming(
        self,
        request_id: str,
        model: Any,
        processor: Any,
        model_id: str,
        body: dict[str, Any],
        inputs: Any,
        gen_config: GenerationConfig,
        gen_manager: Any,
        tools: Any = None,
    ) -> StreamingResponse:
        prompt = inputs["input_ids"]
        parser = build_response_parser(processor, model, prompt)
        queue, stream = gen_manager.generate_streaming(
            model, processor, inputs, gen_config, request_id=request_id, response_parser=parser
        )
        about = {"id": f"resp_{request_id}", "created_at": time.time(), "model": model_id, "object": "response"}
        about |= {"tools": [], "tool_choice": "auto", "parallel_tool_calls": bool(body.get("parallel_tool_calls"))}

        async def events() -> AsyncGenerator[str, None]:
            told = _Events(request_id, about)
            try:
                yield "".join(told.start_response())
                part: Any = ...
                while part is not None:
                    parts = [await queue.get()]
                    while parts[-1] is not None:
                        try:
                            parts.append(queue.get_nowait())
                        except asyncio.QueueEmpty:
                            break
                    part = parts[-1]
                    if text := "".join(event for one in parts if one is not None for event in told.of(one)):
                        yield text
                *others, last = told.end(gen_config, compute_usage(len(prompt), stream.total_tokens))
                yield "".join(others)
                yield last
            except (GeneratorExit, asyncio.CancelledError):
                stream.cancel()  # the client has gone
                raise

        return StreamingResponse(events(), media_type="text/event-stream")
