"""The bodies of `/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from .kinds import Boolean, Closed, ListOf, Only, Text, TokenId, told
from .messages import Message
from .tools import NestedTool
from .variables import TemplateVariables


class TokenizeBody(Closed):
    """The body of `/tokenize`: a text, or a chat."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[ListOf[Message], Field(min_length=1)] | None = None
    tools: ListOf[NestedTool] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: Boolean | None = None
    return_token_strs: Boolean | None = None
    # Not supported.
    add_generation_prompt: Annotated[Any, Only("true")] = None
    continue_final_message: Annotated[Any, Only("false")] = None
    chat_template: Annotated[Any, Only()] = None
    media_io_kwargs: Annotated[Any, Only("{}")] = None
    mm_processor_kwargs: Annotated[Any, Only("{}")] = None

    @model_validator(mode="after")
    def _is_text_or_chat(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise told("`prompt` or `messages` must be given, and not both: a text, or a chat.")
        if self.messages is not None and self.add_special_tokens:
            raise told("`add_special_tokens` is for a `prompt`: a chat has those of its template. Leave it out.")
        return self


class DetokenizeBody(Closed):
    """The body of `/detokenize`."""

    model: Text | None = None
    tokens: ListOf[TokenId]
