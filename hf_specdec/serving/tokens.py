"""`/tokenize` and `/detokenize`: the tokens of a prompt as a request would have them, and the text of tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from transformers import PreTrainedTokenizerBase

from .requests import DetokenizeBody, Facts, TokenizeBody, checked
from .routes import body_of, replace_route
from .tokenising import Later
from .work_pool import WorkPool


class TokenRoutes:
    """
    Answers to what is asked about tokens.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
        facts (`Facts`): what is known of the model.
        most_tokens (`int`): most tokens of a text.
        check_model (`Callable`): raises for a name that the model does not have.
        prompt_of_chat (`Callable`): returns the prompt of the body of a chat, which may have images.
        tokens_of_text (`Callable`): returns the tokens of a text; takes `add_special_tokens`.
        work (`WorkPool`): does the work on large bodies.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        facts: Facts,
        most_tokens: int,
        check_model: Callable[[dict[str, Any]], Any],
        prompt_of_chat: Callable[[dict[str, Any]], Later],
        tokens_of_text: Callable[..., list[int]],
        work: WorkPool,
    ):
        self._tokenizer, self._facts, self._most, self._work = tokenizer, facts, most_tokens, work
        self._check_model, self._prompt_of_chat, self._tokens_of_text = check_model, prompt_of_chat, tokens_of_text

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to an application."""
        for path, answer in (("/tokenize", self._tokenized), ("/detokenize", self._detokenized)):
            replace_route(app, path, self._route(answer))

    def _route(self, answer: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]) -> Callable[[Request], Any]:
        async def answered(request: Request) -> Response:
            return JSONResponse(await answer(await body_of(request, self._work)))

        return answered

    async def _tokenized(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens_of, reads_images = await self._work.run(self._prompt_in, body)
        tokens = await self._work.run(tokens_of, reads_images=reads_images)
        texts = self._tokenizer.convert_ids_to_tokens(tokens) if body.get("return_token_strs") else None
        return {"count": len(tokens), "max_model_len": self._most, "tokens": tokens, "token_strs": texts}

    def _prompt_in(self, body: dict[str, Any]) -> tuple[Callable[[], list[int]], bool]:
        """What returns the tokens of a body's prompt, and whether it reads images."""
        found = checked(TokenizeBody, body, self._facts)
        self._check_model(body)
        if found.prompt is not None:
            has_special = found.add_special_tokens is not False
            return partial(self._tokens_of_text, found.prompt, add_special_tokens=has_special), False
        names = ("model", "messages", "tools", "chat_template_kwargs")
        later = self._prompt_of_chat({name: body[name] for name in names if body.get(name) is not None})
        return later.tokens, later.reads_images

    async def _detokenized(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._work.run(self._text_in, body)

    def _text_in(self, body: dict[str, Any]) -> dict[str, Any]:
        found = checked(DetokenizeBody, body, self._facts)
        self._check_model(body)
        return {"prompt": self._tokenizer.decode(found.tokens)}
