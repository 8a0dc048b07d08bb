"""Messages, their parts and calls, and the items of a response's input."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)

from ..characters import shortened
from ..defaults import NO_IMAGES
from .kinds import ListOf, Only, Open, Text, kind_of, told, wrong, wrong_field
from .parsing import json_of
from .templates import ROLES


TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image_url", "input_image")
_ITEMS = {"reasoning": "<reasoning>", "function_call": "<call>", "function_call_output": "<output>"}


def _known_role(role: str, info: ValidationInfo) -> str:
    known = ROLES if info.context is None else info.context.roles
    if role not in known:
        raise wrong(f"must be one of {', '.join(sorted(known))}")
    return role


def _arguments(value: Any) -> Any:
    """The arguments of a call: an object, or its JSON. (No text: some clients' call of a function without any.)"""
    found = value
    if isinstance(value, str):
        try:
            found = json_of(value or "{}", may_repeat=True)  # as a model has written them
        except ValueError:
            found = None
    if not isinstance(found, dict):
        raise wrong("must be a JSON object")
    return value


Role = Annotated[Text, AfterValidator(_known_role), Field(json_schema_extra={"format": "role"})]
_ObjectText = Annotated[str, Field(json_schema_extra={"format": "json-object"})]
Arguments = Annotated[
    str | dict[str, Any], BeforeValidator(_arguments, json_schema_input_type=_ObjectText | dict[str, Any])
]


class ImageUrl(Open):
    """Where an image is. Its `detail` changes nothing."""

    url: Text


Place = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[ImageUrl, Tag("<object>")],
    Discriminator(kind_of, custom_error_type="wrong", custom_error_message="must be a URL, or an object with a `url`"),
]


class Part(Open):
    """A part of a message. Refusals of the model, which it may have, are left out."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["text"], "properties": {"text": {"type": "string"}}},
                {"properties": {"type": {"const": "refusal"}}},
                {"required": ["image_url"], "properties": {"type": {"enum": [*IMAGE_PARTS]}}},
            ]
        }
    )
    type: Annotated[Text, Field(json_schema_extra={"format": "part-type"})]
    text: Text | None = None
    image_url: Place | None = None

    @model_validator(mode="after")
    def _is_readable(self, info: ValidationInfo) -> Part:
        no_images = NO_IMAGES if info.context is None else info.context.no_images
        known = (*TEXT_PARTS, "refusal") if no_images else (*TEXT_PARTS, *IMAGE_PARTS, "refusal")
        if self.type not in known:
            why = f" ({no_images})" if self.type in IMAGE_PARTS else ""
            raise wrong_field(
                "type",
                f"must be one of {', '.join(known[:-1])}, but is {shortened(self.type)}. This server reads "
                f"{'text' if no_images else 'text and images'}{why}",
            )
        if self.type in TEXT_PARTS and self.text is None:
            raise wrong_field("text", "is missing: it must be a string")
        if self.type in IMAGE_PARTS and self.image_url is None:
            raise wrong_field("image_url", "is missing: it must be a URL, or an object with a `url`")
        return self


Parts = Annotated[ListOf[Part], Field(min_length=1)]
Content = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[Parts, Tag("<list>")],
    Discriminator(kind_of, custom_error_type="wrong", custom_error_message="must be a string or a list of parts"),
]


class CalledFunction(Open):
    """What a call in an earlier turn has called."""

    name: Annotated[Text, Field(min_length=1)]
    arguments: Arguments


class Call(Open):
    """A call in an earlier turn, as the chat API writes it."""

    type: Annotated[Any, Only('"function"', remedy="Leave it out: calls are of functions.")] = None
    function: CalledFunction


class FlatCall(CalledFunction):
    """A call without the object around its function."""

    type: Annotated[Any, Only('"function"', remedy="Leave it out: calls are of functions.")] = None


def _call_form(call: Any) -> str | None:
    return None if not isinstance(call, dict) else "<nested>" if "function" in call or not call else "<flat>"


Calls = ListOf[
    Annotated[
        Annotated[Call, Tag("<nested>")] | Annotated[FlatCall, Tag("<flat>")],
        Discriminator(_call_form, custom_error_type="wrong", custom_error_message="must be an object"),
    ]
]


class Message(Open):
    """A message of a conversation. Further fields change nothing."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
                {
                    "required": ["tool_calls"],
                    "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}},
                },
            ]
        }
    )
    role: Role
    content: Content | None = None
    tool_calls: Calls | None = None
    tool_call_id: Text | None = None
    function_call: Annotated[Any, Only(remedy="Give the call in `tool_calls`.")] = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise wrong_field("content", "is missing: it must be a string or a list of parts")
        return self


class InputMessage(Message):
    """A message in the input of a response."""

    type: Annotated[Any, Only('"message"', remedy="Give messages, calls and their outputs.")] = None


class ReasoningPart(Open):
    """A part of an earlier turn's reasoning."""

    text: Text


class Reasoning(Open):
    """The reasoning of an earlier turn."""

    content: ListOf[ReasoningPart] | None = None


class InputCall(CalledFunction):
    """A call in an earlier turn, as the responses API writes it."""

    call_id: Text


class CallOutput(Open):
    """What a called function has returned."""

    call_id: Text
    output: Content


def _item_kind(item: Any) -> str | None:
    if not isinstance(item, dict):
        return None
    kind = item.get("type")
    return _ITEMS.get(kind, "<message>") if isinstance(kind, str) else "<message>"


Item = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[Reasoning, Tag("<reasoning>")]
    | Annotated[InputCall, Tag("<call>")]
    | Annotated[CallOutput, Tag("<output>")],
    Discriminator(_item_kind, custom_error_type="wrong", custom_error_message="must be an object"),
]


def _input_kind(given: Any) -> str | None:
    if not isinstance(given, list):
        return kind_of(given)
    first = given[0] if given else None
    if isinstance(first, dict) and "role" not in first and first.get("type") not in list(_ITEMS):
        return "<list>"
    return "<items>"


def _begins_with_a_message(items: Any) -> Any:
    first = items[0] if items else None
    if isinstance(first, dict) and "role" not in first:
        raise told(
            f"`input` begins with a {first['type']}, but must begin with a message: this server keeps no earlier "
            "turns. Put the messages before it."
        )
    return items


Items = Annotated[ListOf[Item], Field(min_length=1), BeforeValidator(_begins_with_a_message)]
Input = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[Parts, Tag("<list>")] | Annotated[Items, Tag("<items>")],
    Discriminator(
        _input_kind, custom_error_type="wrong", custom_error_message="must be a string, or a list of one item or more"
    ),
]
"""A text, the parts of one, or messages with calls and their outputs."""


def normal_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Checked messages as transformers' handlers take them: without empty lists of tool calls, because of which a
    message's content would be dropped, and with arguments that are JSON.
    """
    return [
        {name: _normal_calls(value) if name == "tool_calls" else value for name, value in message.items()}
        if message.get("tool_calls")
        else {name: value for name, value in message.items() if name != "tool_calls"}
        for message in messages
    ]


def normal_items(given: Any) -> Any:
    """A checked input of a response as transformers' handler takes it: with arguments that are JSON."""
    if not isinstance(given, list):
        return given
    return [item | {"arguments": item["arguments"] or "{}"} if "arguments" in item else item for item in given]


def _normal_calls(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [call | {"function": _normal(call["function"])} if "function" in call else _normal(call) for call in calls]


def _normal(function: dict[str, Any]) -> dict[str, Any]:
    return function | {"arguments": function["arguments"] or "{}"}
