"""Messages, tools and items of a response's input, and what is wrong in them."""

from __future__ import annotations

from typing import Any

from .fields import CHAT, RESPONSE
from .values import LONG


TOOL = {"type": "function", "function": {"name": "f"}}
FLAT = {"type": "function", "name": "f"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}

MESSAGES: list[tuple[Any, str]] = [
    ({}, "role"),
    ({"content": "abc"}, "role"),
    *(({"role": role, "content": "abc"}, "role") for role in (5, None, "", "User", "nobody", "<eos>", LONG, ["user"])),
    *(({"role": role}, "content") for role in ("user", "system", "developer", "tool", "function", "assistant")),
    *(({"role": "user", "content": one}, "content") for one in (None, 5, True, {}, [], 1.5)),
    ({"role": "assistant", "content": None, "tool_calls": []}, "content"),
    ({"role": "user", "content": None, "tool_calls": [CALL]}, "content"),
    *(({"role": "user", "content": [one]}, "content[0]") for one in (5, "a", None, [], {}, {"text": "a"})),
    *(
        ({"role": "user", "content": [{"type": one}]}, "content[0].type")
        for one in (5, None, "image_url", "file", LONG)
    ),
    *(({"role": "user", "content": [{"type": "text", "text": one}]}, "content[0].text") for one in (5, None, [], {})),
    ({"role": "user", "content": [{"type": "text"}]}, "content[0].text"),
    ({"role": "user", "content": "\udf33"}, "content"),
]
"""Messages, and what is wrong in them; for chats and responses."""
CHAT_MESSAGES: list[tuple[Any, str]] = [
    *(({"role": "assistant", "tool_calls": one}, "tool_calls") for one in (5, "f", {}, True, LONG)),
    *(({"role": "assistant", "tool_calls": [one]}, "tool_calls[0]") for one in (5, "f", None, [], {})),
    *(
        ({"role": "assistant", "tool_calls": [{"function": one}]}, "tool_calls[0].function")
        for one in (5, "f", {}, {"name": "f"}, {"arguments": "{}"}, {"name": 5, "arguments": "{}"})
    ),
    *(
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": one}}]},
            "tool_calls[0].function.arguments",
        )
        for one in (5, None, "{", "[]", "5", [], '{"a": NaN}', "[" * 500, LONG)
    ),
    ({"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}, "tool_calls[0].type"),
    ({"role": "tool", "content": "abc", "tool_call_id": 5}, "tool_call_id"),
    ({"role": "assistant", "content": "abc", "function_call": {"name": "f"}}, "function_call"),
]
TOOLS: dict[str, list[tuple[Any, str]]] = {
    CHAT: [
        *((one, "tools[0]") for one in (5, "f", None, [], {})),
        *(
            ({"type": one, "function": {"name": "f"}}, "tools[0].type")
            for one in (5, "web_search", "custom", [], LONG)
        ),
        *(({"function": one}, "tools[0].function") for one in (5, "f", None, [], {})),
        *(({"function": {"name": one}}, "tools[0].function.name") for one in (5, None, "", [], "x" * 257)),
        *(({"function": {"name": "f", "parameters": one}}, "parameters") for one in (5, "{}", [], True, LONG)),
        *(({"function": {"name": "f", "description": one}}, "description") for one in (5, [], {}, True, 1.5)),
        *(({"function": {"name": "f", "strict": one}}, "strict") for one in (5, [], {}, "true", 1.5)),
        (FLAT, "tools[0].function"),
    ],
    RESPONSE: [
        *((one, "tools[0]") for one in (5, "f", None, [], {})),
        *(({"type": one, "name": "f"}, "tools[0].type") for one in (5, "web_search", "custom", [], LONG)),
        *(({"name": one}, "tools[0].name") for one in (5, None, "", [], "x" * 257)),
        *(({"name": "f", "parameters": one}, "tools[0].parameters") for one in (5, "{}", [], True, LONG)),
        *(({"name": "f", "strict": one}, "tools[0].strict") for one in (5, [], {}, "true", 1.5)),
        *(({"function": one}, "tools[0].function") for one in (5, "f", None, [], {})),
    ],
}
ITEMS: list[tuple[Any, str]] = [
    *((one, "input[1]") for one in (5, "a", None, [], 1.5)),
    *(({"type": one}, "input[1]") for one in ("item_reference", "web_search_call", 5, None, LONG)),
    *(({"type": "reasoning", "content": one}, "input[1].content") for one in (5, "a", {}, [5], [{}], [{"text": 5}])),
    *(({"type": "function_call", "name": "f", "arguments": "{}", "call_id": one}, "call_id") for one in (5, None, [])),
    *(({"type": "function_call", "name": one, "arguments": "{}", "call_id": "1"}, "name") for one in (5, None, "")),
    *(
        ({"type": "function_call", "name": "f", "call_id": "1", "arguments": one}, "input[1].arguments")
        for one in (5, None, "{", "[]", [])
    ),
    *(
        ({"type": "function_call_output", "call_id": "1", "output": one}, "input[1].output")
        for one in (5, None, {}, [], [{"type": "input_image"}])
    ),
    ({"type": "function_call_output", "output": "a"}, "input[1].call_id"),
]
"""Items of a response's input, after a message."""
