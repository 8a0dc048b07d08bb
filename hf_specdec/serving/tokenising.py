"""Prompts that are made and tokenised beside the event loop. (transformers' handlers would do so in it.)"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.cli.serving.utils import get_response_template

from .decoding import beside, for_choice
from .engine.messages import Served
from .errors import refusing
from .generation import Generation
from .images import ImageReader, images_in, without_urls
from .reasoning import Reasoning
from .requests import TokenPrompt
from .text_limits import TextLimit
from .tokenizers import LikeTokenizer


_OF_TEMPLATES = (TemplateError, ArithmeticError, LookupError, TypeError, ValueError)
"""Errors of a chat template: its own checks, and what its expressions meet in a request."""


@dataclass(frozen=True)
class _Prompt:
    """
    A prompt that is not tokenised yet, in the place of a tokenizer's output.

    Args:
        tokenise (`Callable`): returns the tokenizer's output.
        reads_images (`bool`): whether it reads images, too.
    """

    tokenise: Callable[[], Any]
    reads_images: bool = False


class PromptMaker(LikeTokenizer):
    """
    A tokenizer that returns prompts which are tokenised later.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
        limit (`TextLimit`): of a prompt.
        images (`ImageReader`, *optional*): reads images in chats; None for a model that reads text.
        reasoning (`Reasoning`, *optional*): the marks of the model's reasoning, if it has any.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        limit: TextLimit,
        images: ImageReader | None = None,
        reasoning: Reasoning | None = None,
    ):
        super().__init__(tokenizer)
        self._limit, self._images, self._reasoning = limit, images, reasoning

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the tokenizer, by which handlers know that the model reads text."""
        return type(self._own)

    def __call__(self, text: str, **_: Any) -> _Prompt:
        if isinstance(text, TokenPrompt):
            tokens = text.tokens
            return _Prompt(lambda: {"input_ids": tokens})
        return _Prompt(partial(self._tokens, lambda: text))

    def tokens_of(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text."""
        return list(self._tokens(lambda: text, add_special_tokens=add_special_tokens)["input_ids"])

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, return_tensors: Any = None, return_dict: Any = None, **options: Any
    ) -> _Prompt:
        """The prompt of a chat. All further options are the template's, and none of them the tokenizer's."""
        reader, options = self._images, options | {"tokenize": False}
        if reader is None:
            render = partial(self._own.apply_chat_template, messages, **options)
            return _Prompt(partial(self._tokens, render, add_special_tokens=False))
        options.pop("load_audio_from_video", None)  # which transformers' handler names
        urls, shown = images_in(messages), without_urls(messages)
        render = partial(reader.processor.apply_chat_template, shown, **options)
        if not urls:
            return _Prompt(partial(self._tokens, render, add_special_tokens=False))
        return _Prompt(lambda: reader.inputs(self._rendered(render), urls), reads_images=True)

    def let_reason(self, config: GenerationConfig, prompt: list[int]) -> None:
        """Lets the grammar of a request begin after the reasoning that its prompt begins, or that the answer may."""
        if self._reasoning is None or getattr(config, "grammar", None) is None or not beside(config).may_reason:
            return
        config.beside = replace(beside(config), grammar_after=self._reasoning.beginning_after(prompt, self._own))

    def _tokens(self, render: Callable[[], str], **options: Any) -> Any:
        return self._own(self._rendered(render), **options)

    def _rendered(self, render: Callable[[], str]) -> str:
        with refusing(*_OF_TEMPLATES, says="The model's chat template says: "):
            text = render()
        self._limit.check(text)
        return text


class KnownPrompt(LikeTokenizer):
    """
    A tokenizer that has decoded a prompt already. (transformers' handlers decode it again, for what it begins of the
    answer.)

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
        tokens (`list[int]`): the prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: list[int]):
        super().__init__(tokenizer)
        self._tokens, self._text = tokens, tokenizer.decode(tokens)

    def decode(self, tokens: list[int], **options: Any) -> str:
        """The text of tokens."""
        return self._text if tokens is self._tokens and not options else str(self._own.decode(tokens, **options))


@dataclass(frozen=True)
class Later:
    """
    An answer that begins when its prompt is tokenised.

    Args:
        arguments (`Callable`): tokenises the prompt, and returns the arguments of the handler's next function.
        begin (`Callable`): takes these, and `options`; returns the response, or waits for it.
        options (`dict[str, Any]`): further arguments of `begin`.
        reads_images (`bool`): whether the prompt has images, which `arguments` reads.
    """

    arguments: Callable[[], list[Any]]
    begin: Callable[..., Any]
    options: dict[str, Any]
    reads_images: bool

    def tokens(self) -> list[int]:
        """The tokens of the prompt."""
        inputs = next(one for one in self.arguments() if isinstance(one, Mapping) and "input_ids" in one)
        return list(inputs["input_ids"])

    def another(self, number: int, arguments: list[Any]) -> Any:
        """
        Begins one of several answers to the same prompt: with its own name, and its own seed if the request has one.

        Args:
            number (`int`): of the answer, from 0.
            arguments (`list`): as `arguments` returns them.
        """
        name, *others = (_for_another(one, number) for one in arguments)
        options = {key: _for_another(one, number) for key, one in self.options.items()}
        return self.begin(f"{name}-{number}" if number else name, *others, **options)


class TokenisedElsewhere:
    """
    A mixin for transformers' handlers that goes before all others with a `_streaming` or `_non_streaming`. Their
    tokenizer is a `PromptMaker`, and their `handle_request` returns a `Later` without having waited for anything.
    """

    def _streaming(self, *arguments: Any, **options: Any) -> Any:
        stream: Any = super()._streaming  # type: ignore[misc]  # of the handler with this mixin
        return _later(arguments, stream, options, streams=True)

    async def _non_streaming(self, *arguments: Any, **options: Any) -> Any:
        answer: Any = super()._non_streaming  # type: ignore[misc]  # of the handler with this mixin
        return _later(arguments, answer, options, streams=False)


def _later(arguments: tuple[Any, ...], begin: Callable[..., Any], options: dict[str, Any], streams: bool) -> Later:
    reads_images = any(isinstance(one, _Prompt) and one.reads_images for one in arguments)
    return Later(partial(_tokenised, arguments, streams=streams), begin, options, reads_images)


def _for_another(argument: Any, number: int) -> Any:
    """An argument of a handler for another answer to the same prompt."""
    if isinstance(argument, GenerationConfig):
        return for_choice(argument, number)
    return argument.another() if isinstance(argument, Generation) else argument


def _tokenised(arguments: tuple[Any, ...], streams: bool) -> list[Any]:
    """
    A handler's arguments with tokens for the prompt, and with the tokenizer itself. (Their places differ from handler
    to handler.) A stream's reads what the prompt begins of the answer.
    """
    prompt = next(one for one in arguments if isinstance(one, _Prompt))
    maker = next(one for one in arguments if type(one) is PromptMaker)
    own, tokens = maker._own, prompt.tokenise()
    model = next(one for one in arguments if isinstance(one, Served))
    for one in arguments:
        if isinstance(one, GenerationConfig):
            maker.let_reason(one, tokens["input_ids"])
    if streams and get_response_template(own, model) is not None:
        own = KnownPrompt(own, tokens["input_ids"])
    return [tokens if isinstance(one, _Prompt) else own if type(one) is PromptMaker else one for one in arguments]
