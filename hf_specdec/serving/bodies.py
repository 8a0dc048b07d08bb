"""Checks of request bodies, which transformers' handlers take for granted or ignore."""

from __future__ import annotations

import json
import sys
from typing import Any


_ANSWERED_ALIKE = {
    "n": ("1",),
    "best_of": ("1",),
    "logprobs": ("false",),
    "top_logprobs": ("0",),
    "echo": ("false",),
    "presence_penalty": ("0", "0.0", "-0.0"),
    "response_format": ('{"type": "text"}',),
    "functions": ("[]",),
    "function_call": ('"auto"', '"none"'),
    "audio": (),
    "modalities": ('["text"]',),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "web_search_options": (),
    "suffix": ('""',),
    "background": ("false",),
    "context_management": ("[]",),
    "conversation": (),
    "include": ("[]", '["reasoning.encrypted_content"]'),
    "max_tool_calls": (),
    "previous_response_id": (),
    "reasoning": ("{}",),
    "truncation": ('"disabled"',),
}
"""Options that are not supported, with the values (as JSON) that change nothing."""
_REMEDIES = {
    "reasoning_effort": "Leave it out, or give what the model's chat template knows in `chat_template_kwargs`.",
    "suffix": "Leave it out: the model would not see it.",
}
"""What to do about options, other than to leave them out."""
_ITEMS = ("reasoning", "function_call", "function_call_output")
_TEXT_PARTS = ("text", "input_text", "output_text")


def check_prompt(body: dict[str, Any]) -> None:
    """
    Checks that the prompt of a completion is a text.

    Raises:
        TypeError, ValueError: if it is missing, or is none.
    """
    if body.get("prompt") is None:
        raise ValueError("`prompt` is missing. Give the text to continue.")
    if not isinstance(body["prompt"], str):
        raise TypeError(f"`prompt` must be a string, but is {shortened(body['prompt'])}.")


def check_options(body: dict[str, Any]) -> None:
    """
    Refuses options that would change the answer but are not supported.

    Raises:
        TypeError, ValueError: if one is given with a value that changes something.
    """
    for name, values in _ANSWERED_ALIKE.items():
        if _without_nulls(body.get(name)) is not None and json.dumps(_without_nulls(body[name])) not in values:
            remedy = _REMEDIES.get(name, "Leave it out.")
            raise ValueError(f"`{name}={shortened(body[name])}` is not supported by this server. {remedy}")
    of_template = body.get("chat_template_kwargs") or {}
    _check_object("chat_template_kwargs", of_template)
    if "chat_template" in of_template:
        raise ValueError(
            "`chat_template_kwargs.chat_template` is not supported by this server: the chat template is the model's. "
            "Leave it out, or use `/v1/completions`, which takes text as it is."
        )
    text = body.get("text")
    format_ = text.get("format") if isinstance(text, dict) else text
    if format_ is not None and not (isinstance(format_, dict) and format_.get("type") == "text"):
        raise ValueError(f"`text.format={format_!r}` is not supported by this server. Leave it out.")


_RANGES = {"temperature": (0, sys.float_info.max), "top_p": (0, 1)}
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Names of the most tokens of an answer, in the three APIs."""


def check_numbers(body: dict[str, Any]) -> None:
    """
    Checks lengths and sampling options, some of which transformers would cut or leave out.

    Raises:
        TypeError, ValueError: if one is no number, or out of range.
    """
    for name, (least, most) in _RANGES.items():
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"`{name}` must be a number, but is {shortened(value)}.")
        if not least <= value <= most:
            raise ValueError(f"`{name}` must be at least {least} and at most {most}, but is {value}.")
    for name in LENGTHS:
        value = body.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"`{name}` must be an integer, but is {shortened(value)}.")


def chosen_tools(body: dict[str, Any]) -> dict[str, Any]:
    """
    The body, without its tools if `tool_choice` is "none".

    Raises:
        TypeError, ValueError: if the tools are no list of functions, or one is demanded, which cannot be enforced.
    """
    choice, tools = body.get("tool_choice"), body.get("tools")
    if not tools:
        return body
    _check_tools(tools)
    if choice not in (None, "auto", "none"):
        raise ValueError(f"`tool_choice={shortened(choice)}` is not supported by this server, but 'auto' and 'none'.")
    return {name: value for name, value in body.items() if name != "tools"} if choice == "none" else body


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """
    The messages of a chat, without empty lists of tool calls, because of which transformers drops a message's content.

    Raises:
        TypeError, ValueError: if they are no messages; the error names the message.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"`messages` must be a list of one message or more, but is {shortened(messages)}.")
    for number, message in enumerate(messages):
        _check_message(f"messages[{number}]", message)
    return [{name: value for name, value in message.items() if name != "tool_calls" or value} for message in messages]


def check_input(body: dict[str, Any]) -> None:
    """
    Checks that the input of a response is a text, parts of a text, or messages and tool calls with their outputs, and
    no stored prompt.

    Raises:
        TypeError, ValueError: if not; the error names the part.
    """
    given, instructions = body.get("input"), body.get("instructions")
    if body.get("prompt") is not None:
        raise ValueError(
            f"`prompt={shortened(body['prompt'])}` is not supported by this server. Give its text in `input`."
        )
    if instructions is not None and not isinstance(instructions, str):
        raise TypeError(f"`instructions` must be a string, but is {shortened(instructions)}.")
    if isinstance(given, str):
        return
    if not isinstance(given, list) or not given:
        raise ValueError(f"`input` must be a string, or a list of one item or more, but is {shortened(given)}.")
    for number, item in enumerate(given):
        _check_object(f"input[{number}]", item)
    has_messages = "role" in given[0]  # else all are parts of one
    if not has_messages and given[0].get("type") in _ITEMS:
        raise ValueError(
            f"`input` begins with a {given[0]['type']}, but must begin with a message: this server keeps no earlier "
            "turns. Put the messages before it."
        )
    for number, item in enumerate(given):
        (_check_item if has_messages else _check_part)(f"input[{number}]", item)


def sequence_bias(logit_bias: Any, vocab_size: int) -> dict[tuple[int], float] | None:
    """
    The `sequence_bias` of a generation config for a `logit_bias`; None without a bias.

    Raises:
        TypeError, ValueError: if it is no bias of tokens that the model knows.
    """
    if logit_bias is None or logit_bias == {}:
        return None
    if not isinstance(logit_bias, dict):
        raise TypeError(f"`logit_bias` must be an object of token ids and biases, but is {shortened(logit_bias)}.")
    try:
        biases = {int(token): float(bias) for token, bias in logit_bias.items()}
    except (TypeError, ValueError) as error:
        raise ValueError(
            f'`logit_bias` must be an object of token ids and biases, such as {{"42": -100}}, but is '
            f"{shortened(logit_bias)}."
        ) from error
    unknown = [token for token in biases if not 0 <= token < vocab_size]
    if unknown:
        raise ValueError(
            f"`logit_bias` names tokens beyond the {vocab_size} that the model knows: {shortened(unknown)}. "
            "Leave them out."
        )
    return {(token,): bias for token, bias in biases.items()}


def _check_tools(tools: Any) -> None:
    if not isinstance(tools, list):
        raise TypeError(f"`tools` must be a list of functions, but is {shortened(tools)}.")
    for number, tool in enumerate(tools):
        _check_object(f"tools[{number}]", tool)
        kind = tool.get("type") or "function"
        if kind != "function":
            raise ValueError(
                f"`tools[{number}].type={shortened(kind)}` is not supported by this server: leave it out."
            )


def _check_item(where: str, item: dict[str, Any]) -> None:
    """An item of an input that begins with a message."""
    kind = item.get("type")
    if kind == "reasoning":
        for number, part in enumerate(item.get("content") or ()):
            _check_object(f"{where}.content[{number}]", part)
            _check_strings(f"{where}.content[{number}]", part, "text")
    elif kind == "function_call":
        _check_strings(where, item, "call_id", "name")
        _check_arguments(where, item)
    elif kind == "function_call_output":
        _check_strings(where, item, "call_id")
        _check_content(f"{where}.output", item.get("output", 0))
    else:
        _check_message(where, item)


def _check_message(where: str, message: Any) -> None:
    _check_object(where, message)
    _check_strings(where, message, "role")
    _check_content(f"{where}.content", message.get("content"))
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise TypeError(f"`{where}.tool_calls` must be a list, but is {shortened(calls)}.")
    for number, call in enumerate(calls):
        place = f"{where}.tool_calls[{number}]"
        _check_object(place, call)
        function = call.get("function") or call
        _check_object(f"{place}.function", function)
        if function.get("arguments") == "":  # as some clients write the call of a function without parameters
            function["arguments"] = "{}"
        _check_arguments(f"{place}.function", function)


def _check_content(where: str, content: Any) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise TypeError(f"`{where}` must be a string or a list of parts, but is {shortened(content)}.")
    for number, part in enumerate(content):
        _check_object(f"{where}[{number}]", part)
        _check_part(f"{where}[{number}]", part)


def _check_part(where: str, part: dict[str, Any]) -> None:
    kind = part.get("type")
    if kind not in (*_TEXT_PARTS, "refusal"):
        raise ValueError(
            f"`{where}.type` must be one of {', '.join(_TEXT_PARTS)}, but is {shortened(kind)}. "
            "This server reads text."
        )
    if kind in _TEXT_PARTS:
        _check_strings(where, part, "text")


def _check_arguments(where: str, function: dict[str, Any]) -> None:
    arguments = function.get("arguments")
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"`{where}.arguments` must be a JSON object, but is {shortened(arguments)}.")


def _without_nulls(value: Any) -> Any:
    """A value, without what is null in an object: that is the default."""
    return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else value


def _check_object(where: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise TypeError(f"`{where}` must be an object, but is {shortened(value)}.")


def _check_strings(where: str, value: dict[str, Any], *names: str) -> None:
    for name in names:
        if not isinstance(value.get(name), str):
            raise ValueError(f"`{where}.{name}` must be a string, but is {shortened(value.get(name))}.")


def shortened(value: Any) -> str:
    """A value for an error message, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} …"
