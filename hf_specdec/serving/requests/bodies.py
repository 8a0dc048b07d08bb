"""The bodies of the routes: fields that are served, that change nothing, and that would change the answer."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, model_validator

from ...verification.log_probabilities import MOST_BEST
from ..characters import shortened
from .decoding import Decoding
from .elsewhere import OfCompletions, OfConversations
from .kinds import (
    LARGEST,
    MOST_TOKENS,
    Boolean,
    Closed,
    Length,
    ListOf,
    Only,
    Open,
    Text,
    told,
    wrong,
)
from .logit_bias import sequence_bias
from .messages import Input, Message
from .options import GenerationOptions, StopStrings
from .parsing import json_of
from .prompts import MOST_CHOICES, Choices, Prompt, prompts_of
from .structured import ResponseFormat, StructuredOutputs, TextFormat, grammar_of
from .token_bodies import DetokenizeBody, TokenizeBody
from .tools import NestedTool, ResponseTool, ToolChoice, check_choice
from .variables import Effort, TemplateVariables, check_one_effort


MOST_NAMES = 16
"""Most names in the `metadata` of a request, as in OpenAI's API."""


def _from_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        found = json_of(value, "generation_config")
    except json.JSONDecodeError as error:
        raise told(
            f"`generation_config` must be an object, or its JSON, but is {shortened(value)}: {error}."
        ) from error
    except ValueError as error:
        raise told(str(error)) from error
    return found


def _bias(value: Any, info: ValidationInfo) -> Any:
    try:
        return sequence_bias(value, None if info.context is None else info.context.vocab_size)
    except (TypeError, ValueError) as error:
        raise told(str(error)) from error


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MOST_NAMES:
        raise wrong(f"must have {MOST_NAMES} names at most")
    return value


Options = Annotated[
    GenerationOptions,
    BeforeValidator(
        _from_text,
        json_schema_input_type=Annotated[str, Field(json_schema_extra={"contentMediaType": "application/json"})]
        | GenerationOptions,
    ),
]
LogitBias = Annotated[
    Any,
    BeforeValidator(_bias),
    WithJsonSchema(
        {
            "type": ["object", "null"],
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -LARGEST, "maximum": LARGEST},
        }
    ),
]
BestTokens = Annotated[int, Field(strict=True, ge=0, le=MOST_BEST)]
BestTokensOfCompletion = Annotated[
    BestTokens | None,
    BeforeValidator(lambda value: None if value is False else value),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0, "maximum": MOST_BEST}, {"enum": [False, None]}]}),
]
"""As in OpenAI's API, and `false`, which clients send for none."""
LOGPROBS = "message.output_text.logprobs"
"""What a response includes, if asked to."""
Names = Annotated[dict[str, Text], BeforeValidator(_few), Field(max_length=MOST_NAMES)]


NO_LIMIT = -1
"""In requests of llama.cpp's clients, the most tokens of an answer of which the server says how long it is."""


def _default_length(value: Any) -> Any:
    return None if type(value) is int and value == NO_LIMIT else value


MostNew = Annotated[
    Length | None,
    BeforeValidator(_default_length),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": MOST_TOKENS}, {"enum": [NO_LIMIT, None]}]}),
]
LENGTHS = ("max_completion_tokens", "max_tokens", "n_predict", "max_output_tokens")
"""Names of the most tokens of an answer, in the three APIs and llama.cpp's; the first that a request has counts."""


class StreamOptions(Open):
    """Options of a stream. With `include_usage` a chunk of its own has the usage; by default, the last one has."""

    include_usage: Boolean | None = None
    include_obfuscation: Boolean | None = None


class TextOptions(Open):
    """The form of a response's text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Closed):
    """How much a response is reasoned about. Of summaries there are none, which `"auto"` leaves to the server."""

    effort: Effort | None = None
    summary: Annotated[Any, Only('"auto"')] = None
    generate_summary: Annotated[Any, Only('"auto"')] = None


class Shared(Decoding):
    """What all requests for a text have."""

    model: Text | None = None
    stream: Boolean | None = None
    stream_options: StreamOptions | None = None
    generation_config: Options | None = None
    structured_outputs: StructuredOutputs | None = None
    # Without effect.
    user: Text | None = None

    @property
    def best_tokens(self) -> int | None:
        """Number of best tokens in the place of each whose log-probabilities are asked for; None for no such."""
        return None

    @model_validator(mode="after")
    def _has_one_seed(self) -> Shared:
        inner = None if self.generation_config is None else self.generation_config.seed
        if None not in (self.seed, inner) and self.seed != inner:
            raise told(f"`seed={self.seed}` and `generation_config.seed={inner}` differ. Leave one of them out.")
        return self

    @model_validator(mode="after")
    def _has_one_form(self) -> Shared:
        grammar_of(self)
        return self

    @model_validator(mode="after")
    def _has_one_length(self) -> Shared:
        given = {name: most for name in LENGTHS if (most := getattr(self, name, None)) is not None}
        if len(set(given.values())) > 1:
            raise told(
                f"{' and '.join(f'`{name}={most}`' for name, most in given.items())} differ. Leave one of them out."
            )
        for name, most in given.items():
            if (self.min_tokens or 0) > most:
                raise told(f"`min_tokens={self.min_tokens}` is more than `{name}={most}`. Lower it.")
        return self


class _Choices(Shared):
    """What chats and completions have."""

    max_tokens: MostNew = None
    n_predict: MostNew = None
    stop: StopStrings | None = None
    response_format: ResponseFormat | None = None
    n: Choices | None = None
    best_of: Choices | None = None
    logit_bias: LogitBias = None

    @model_validator(mode="after")
    def _has_no_others_to_choose_from(self) -> _Choices:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise told(
                f"`best_of={self.best_of}` is not supported by this server, unless `n` is the same. Leave it out."
            )
        return self


class _Conversation(Shared, OfConversations):
    """What chats and responses have."""

    chat_template_kwargs: TemplateVariables | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Boolean | None = None
    # Without effect.
    metadata: Names | None = None
    store: Boolean | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: Text | None = None
    top_logprobs: BestTokens | None = None
    # Not supported.
    moderation: Annotated[Any, Only()] = None

    @property
    def effort(self) -> str | None:
        """How much is to be reasoned."""
        return None

    @model_validator(mode="after")
    def _has_one_effort(self) -> _Conversation:
        check_one_effort(self.effort, self.chat_template_kwargs)
        return self

    @model_validator(mode="after")
    def _demands_a_tool_that_it_has(self) -> _Conversation:
        tools = [
            tool.function if isinstance(tool, NestedTool) else tool for tool in getattr(self, "tools", None) or ()
        ]
        check_choice(self.tool_choice, [tool.name for tool in tools])
        return self


class ChatBody(_Conversation, _Choices):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[ListOf[Message], Field(min_length=1)]
    tools: ListOf[NestedTool] | None = None
    max_completion_tokens: MostNew = None
    logprobs: Boolean | None = None
    reasoning_effort: Effort | None = None
    # Without effect.
    verbosity: Literal["low", "medium", "high"] | None = None
    # Not supported.
    functions: Annotated[Any, Only("[]")] = None
    function_call: Annotated[Any, Only('"auto"', '"none"')] = None
    audio: Annotated[Any, Only()] = None
    modalities: Annotated[Any, Only('["text"]')] = None
    prediction: Annotated[Any, Only()] = None
    web_search_options: Annotated[Any, Only()] = None

    @property
    def best_tokens(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort

    @model_validator(mode="after")
    def _asks_for_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise told(f"`top_logprobs={self.top_logprobs}` needs `logprobs=true`. Give it, or leave this out.")
        return self


class CompletionBody(_Choices, OfCompletions):
    """The body of `/v1/completions`."""

    prompt: Prompt
    logprobs: BestTokensOfCompletion = None
    # Not supported.
    echo: Annotated[Any, Only("false")] = None
    suffix: Annotated[Any, Only('""', remedy="Leave it out: the model would not see it.")] = None

    @property
    def best_tokens(self) -> int | None:
        return self.logprobs

    @model_validator(mode="after")
    def _has_few_choices(self) -> CompletionBody:
        number = len(prompts_of(self.prompt)) * (self.n or 1)
        if number > MOST_CHOICES:
            raise told(
                f"`prompt` and `n` ask for {number} texts, but a request may have {MOST_CHOICES}. Send several."
            )
        return self


class ResponseBody(_Conversation):
    """The body of `/v1/responses`."""

    input: Input
    instructions: Text | None = None
    tools: ListOf[ResponseTool] | None = None
    max_output_tokens: MostNew = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: ListOf[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    # Without effect.
    image: dict[str, Any] | None = None
    access_programs: dict[str, Any] | None = None
    # Not supported.
    background: Annotated[Any, Only("false")] = None
    context_management: Annotated[Any, Only("[]")] = None
    conversation: Annotated[Any, Only()] = None
    max_tool_calls: Annotated[Any, Only()] = None
    previous_response_id: Annotated[Any, Only()] = None
    prompt: Annotated[Any, Only(remedy="Give its text in `input`.")] = None
    truncation: Annotated[Any, Only('"disabled"')] = None

    @property
    def best_tokens(self) -> int | None:
        is_included = LOGPROBS in (self.include or ()) or self.top_logprobs
        return (self.top_logprobs or 0) if is_included else None

    @property
    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort


class LoadModelBody(Closed):
    """The body of `/load_model`."""

    model: Text


BODIES: dict[str, type[Closed]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponseBody,
    "/load_model": LoadModelBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
