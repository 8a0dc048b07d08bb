"""`/tokenize` and `/detokenize`: the tokens of a prompt as a request would have them, and the text of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from transformers import PreTrainedTokenizerBase

from .requests import DetokenizeBody, Facts, TokenizeBody, checked
from .routes import body_of, replace_route
from .work_pool import WorkPool


class TokenRoutes:
    """
    Answers to what is asked about tokens.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
        facts (`Facts`): what is known of the model.
        most_tokens (`int`): most tokens of a text.
        check_model (`Callable`): raises for a name that the model does not have.
        tokens_of_chat (`Callable`): returns the tokens of the body of a chat.
        tokens_of_text (`Callable`): returns the tokens of a text; takes `add_special_tokens`.
        work (`WorkPool`): does the work on large bodies.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        facts: Facts,
        most_tokens: int,
        check_model: Callable[[dict[str, Any]], Any],
        tokens_of_chat: Callable[[dict[str, Any]], list[int]],
        tokens_of_text: Callable[..., list[int]],
        work: WorkPool,
    ):
        self._tokenizer, self._facts, self._most, self._work = tokenizer, facts, most_tokens, work
        self._check_model, self._tokens_of_chat, self._tokens_of_text = check_model, tokens_of_chat, tokens_of_text

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to an application."""
        for path, answer in (("/tokenize", self._tokenized), ("/detokenize", self._detokenized)):
            replace_route(app, path, self._route(answer))

    def _route(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Request], Any]:
        async def answered(request: Request) -> Response:
            body = await body_of(request, self._work)
            return JSONResponse(await self._work.run(answer, body))

        return answered

    def _tokenized(self, body: dict[str, Any]) -> dict[str, Any]:
        found = checked(TokenizeBody, body, self._facts)
        self._check_model(body)
        if found.prompt is not None:
            tokens = self._tokens_of_text(found.prompt, add_special_tokens=found.add_special_tokens is not False)
        else:
            names = ("model", "messages", "tools", "chat_template_kwargs")
            tokens = self._tokens_of_chat({name: body[name] for name in names if body.get(name) is not None})
        texts = self._tokenizer.convert_ids_to_tokens(tokens) if found.return_token_strs else None
        return {"count": len(tokens), "max_model_len": self._most, "tokens": tokens, "token_strs": texts}

    def _detokenized(self, body: dict[str, Any]) -> dict[str, Any]:
        found = checked(DetokenizeBody, body, self._facts)
        self._check_model(body)
        return {"prompt": self._tokenizer.decode(found.tokens)}
