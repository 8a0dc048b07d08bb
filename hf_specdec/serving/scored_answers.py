"""Answers with log-probabilities: mixins for transformers' handlers, which have no place for them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse
from transformers.cli.serving.utils import ReasoningText

from .answer_logprobs import AnswerLogprobs, ScoredToken, of_chat, of_completion
from .response_streams import PieceResponses
from .stream_ends import event


class ScoredText(str):
    """A piece of text with tokens."""

    tokens: list[ScoredToken]


class ScoredReasoning(ReasoningText):
    """A piece of reasoning with tokens."""

    tokens: list[ScoredToken]


class ScoredQueue:
    """
    A queue of pieces, each with the tokens that were known when it was read; a last one without text has the rest.

    Args:
        pieces: the source of pieces: text, reasoning and other objects, of which None is the last.
        logprobs (`AnswerLogprobs`): gives the tokens.
    """

    def __init__(self, pieces: Any, logprobs: AnswerLogprobs):
        self._pieces, self._logprobs, self._owes_end = pieces, logprobs, False
        self.of_text: deque[list[ScoredToken]] = deque()
        """The tokens of the pieces of text that have been read; those of reasoning are with the text after it."""
        self.left: list[ScoredToken] = []
        """Tokens of reasoning that no text has followed yet."""

    async def get(self) -> Any:
        """Waits for the next piece and returns it."""
        return self._end() if self._owes_end else self._scored(await self._pieces.get())

    def get_nowait(self) -> Any:
        """Returns the next piece without waiting; raises `asyncio.QueueEmpty` if there is none."""
        return self._end() if self._owes_end else self._scored(self._pieces.get_nowait())

    def _end(self) -> None:
        self._owes_end = False

    def _scored(self, piece: Any) -> Any:
        if piece is not None and not isinstance(piece, str):
            return piece
        tokens = self._logprobs.take()
        if piece is None and not tokens:
            return None
        self._owes_end = piece is None
        found: Any = ScoredReasoning(piece) if isinstance(piece, ReasoningText) else ScoredText(piece or "")
        found.tokens = tokens
        if isinstance(piece, ReasoningText):
            self.left += tokens
        else:
            self.of_text.append(self.left + tokens)
            self.left = []
        return found


class ScoredChoices:
    """A mixin for handlers of chats and completions."""

    _is_chat = True

    def _build_chunk_sse(self, request_id: str = "", *args: Any, **options: Any) -> str:
        build: Any = super()._build_chunk_sse  # type: ignore[misc]  # of the handler with this mixin
        chunk: str = build(request_id, *args, **options)
        for piece in options.values():
            if isinstance(piece, (ScoredText, ScoredReasoning)):
                return event(self._with_logprobs(json.loads(chunk.removeprefix("data: ")), piece.tokens))
        return chunk

    def _with_logprobs(self, answer: dict[str, Any], tokens: list[ScoredToken]) -> dict[str, Any]:
        """An answer of one choice, or a chunk of it, with log-probabilities."""
        of_choice = {"content": of_chat(tokens), "refusal": None} if self._is_chat else of_completion(tokens)
        answer["choices"][0]["logprobs"] = of_choice
        return answer


class ScoredResponses(PieceResponses):
    """Handles responses."""

    def _streaming(self, *args: Any, **options: Any) -> StreamingResponse:
        response = super()._streaming(*args, **options)
        queue = next((one.scored for one in (*args, *options.values()) if hasattr(one, "scored")), None)
        if queue is not None:
            response.body_iterator = _scored_events(response.body_iterator, queue)
        return response

    def _with_logprobs(self, answer: dict[str, Any], tokens: list[ScoredToken]) -> dict[str, Any]:
        """A response with log-probabilities."""
        for item in answer["output"]:
            _add_to_item(item, of_chat(tokens))
        return answer


def _add_to_item(item: dict[str, Any], found: list[dict[str, Any]]) -> None:
    if item["type"] == "message":
        for part in item["content"]:
            part["logprobs"] = found


async def _scored_events(events: Any, queue: ScoredQueue) -> AsyncGenerator[str, None]:
    """The events of a streamed response, those of its text with log-probabilities."""
    said: list[dict[str, Any]] = []
    async with aclosing(events):
        async for text in events:
            yield "".join(_scored_event(one + "\n\n", queue, said) for one in text.split("\n\n") if one)


def _scored_event(text: str, queue: ScoredQueue, said: list[dict[str, Any]]) -> str:
    """An event with log-probabilities; `said` are those of all tokens so far."""
    found = json.loads(text.removeprefix("data: "))
    match found["type"]:
        case "response.output_text.delta":
            found["logprobs"] = of_chat(queue.of_text.popleft())
            said += found["logprobs"]
        case "response.output_text.done":
            said += of_chat(queue.left)  # where there is no text after the reasoning
            queue.left = []
            found["logprobs"] = said
        case "response.content_part.done":
            found["part"]["logprobs"] = said
        case "response.output_item.done":
            _add_to_item(found["item"], said)
        case "response.completed":
            for item in found["response"]["output"]:
                _add_to_item(item, said)
        case _:
            return text
    return f"data: {json.dumps(found, separators=(',', ':'))}\n\n"
