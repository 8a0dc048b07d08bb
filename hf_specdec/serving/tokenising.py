"""Prompts that are tokenised beside the event loop. (transformers' handlers would tokenise in it.)"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi.responses import Response
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from .errors import refusing
from .text_limits import TextLimit
from .tokenizers import LikeTokenizer
from .work_pool import WorkPool


_OF_TEMPLATES = (TemplateError, ArithmeticError, LookupError, TypeError, ValueError)
"""Errors of a chat template: its own checks, and what its expressions meet in a request."""


@dataclass(frozen=True)
class _Prompt:
    """
    A prompt that is not tokenised yet, in the place of a tokenizer's output.

    Args:
        tokenise (`Callable`): returns the tokenizer's output.
    """

    tokenise: Callable[[], Any]


class PromptMaker(LikeTokenizer):
    """
    A tokenizer that returns prompts which are tokenised later.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
        limit (`TextLimit`): of a prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limit: TextLimit):
        super().__init__(tokenizer)
        self._limit = limit

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the tokenizer, by which handlers know that the model reads text."""
        return type(self._own)

    def __call__(self, text: str, **_: Any) -> _Prompt:
        return _Prompt(partial(self._tokens, lambda: text))

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, return_tensors: Any = None, return_dict: Any = None, **options: Any
    ) -> _Prompt:
        """The prompt of a chat. All further options are the template's, and none of them the tokenizer's."""
        render = partial(self._own.apply_chat_template, messages, **options | {"tokenize": False})
        return _Prompt(partial(self._tokens, render, add_special_tokens=False))

    def _tokens(self, render: Callable[[], str], **options: Any) -> Any:
        with refusing(*_OF_TEMPLATES, says="The model's chat template says: "):
            text = render()
        self._limit.check(text)
        return self._own(text, **options)


@dataclass(frozen=True)
class _Stream:
    """A streamed answer that begins when its prompt is tokenised; takes the tokens."""

    prompt: _Prompt
    begin: Callable[[Any], Response]


class TokenisedElsewhere:
    """
    A mixin for transformers' handlers that goes before all others with a `_streaming` or `_non_streaming`. Their
    tokenizer is a `PromptMaker`.
    """

    model_manager: Any
    """Has the pool that tokenises, `work`."""

    def _streaming(self, *arguments: Any, **options: Any) -> Any:
        stream: Any = super()._streaming  # type: ignore[misc]  # of the handler with this mixin
        return _Stream(_prompt_in(arguments), lambda tokens: stream(*_with_tokens(arguments, tokens), **options))

    async def _non_streaming(self, *arguments: Any, **options: Any) -> Any:
        answer: Any = super()._non_streaming  # type: ignore[misc]  # of the handler with this mixin
        tokens = await self.model_manager.work.run(_prompt_in(arguments).tokenise)
        return await answer(*_with_tokens(arguments, tokens), **options)


async def begun(response: Any, work: WorkPool) -> Response:
    """The answer of a handler's `handle_request`: a stream has to be begun, when its prompt is tokenised."""
    if not isinstance(response, _Stream):
        return response
    return response.begin(await work.run(response.prompt.tokenise))


def _prompt_in(arguments: tuple[Any, ...]) -> _Prompt:
    """The prompt among a handler's arguments, in which its place differs from handler to handler."""
    return next(one for one in arguments if isinstance(one, _Prompt))


def _with_tokens(arguments: tuple[Any, ...], tokens: Any) -> list[Any]:
    """A handler's arguments with tokens for the prompt, and with the tokenizer itself."""
    given = [tokens if isinstance(one, _Prompt) else one for one in arguments]
    return [one._own if type(one) is PromptMaker else one for one in given]
