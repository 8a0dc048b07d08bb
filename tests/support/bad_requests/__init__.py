"""Requests that are wrong in one thing each: rows of a route, the body or a part of it, and the field at fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from .fields import (
    CHAT,
    COMPLETION,
    FIELDS,
    OPTIONS,
    RESPONSE,
    RIGHT,
    TOKENIZE,
    UNKNOWN,
    UNSUPPORTED,
    UNSUPPORTED_OPTIONS,
    USER,
)
from .parts import CHAT_MESSAGES, FLAT, ITEMS, MESSAGES, TOOL, TOOLS
from .values import WRONG, Raw, written


class BadRequest(NamedTuple):
    """
    A request that is refused with status 400.

    Args:
        route (`str`): where it goes.
        content (`str`): its body.
        field (`str`): what the message names.
    """

    route: str
    content: str
    field: str


BODIES = ["", "{", "[]", "[1]", "5", '"text"', "null", "NaN", "{'a': 1}", '{"a": }', "[" * 100_000, '{"a":' * 500]
"""Bodies that are no objects."""


def bad_requests() -> Iterator[BadRequest]:
    """All of them."""
    for route, right in RIGHT.items():
        yield from (BadRequest(route, content, "") for content in BODIES)
        yield from (_with(route, {name: 1}, name[:30] if name else "") for name in UNKNOWN)
        for field, kind in FIELDS[route].items():
            yield from (_with(route, {field: value}, field) for value in WRONG[kind])
        for field, values in UNSUPPORTED.get(route, {}).items():
            yield from (_with(route, {field: value}, field) for value in values)
        for field in right:
            yield from (BadRequest(route, body, field) for body in ("{}", json.dumps({field: None})))
        yield from (_with(route, {"user": _nested(depth)}, "body") for depth in (65, 500, 990, 5000))
    yield _with(TOKENIZE, {"messages": [USER]}, "messages")
    yield BadRequest(TOKENIZE, written({"messages": [USER], "add_special_tokens": True}), "add_special_tokens")
    yield from _with_options()
    for message, field in MESSAGES + CHAT_MESSAGES:
        yield _with(CHAT, {"messages": [USER, message]}, f"messages[1].{field}")
    for message, field in MESSAGES:
        yield _with(RESPONSE, {"input": [USER, message]}, f"input[1].{field}")
    for route, tools in TOOLS.items():
        yield from (_with(route, {"tools": [tool]}, field) for tool, field in tools)
        right_tool = TOOL if route == CHAT else FLAT
        for choice in ("required", "any", 5, {"type": "function", "name": "f"}, {}, [], True):
            yield _with(route, {"tools": [right_tool], "tool_choice": choice}, "tool_choice")
    yield _with(CHAT, {"top_logprobs": 2}, "top_logprobs")
    yield _with(CHAT, {"logprobs": False, "top_logprobs": 1}, "top_logprobs")
    yield from (_with(RESPONSE, {"input": [USER, item]}, field) for item, field in ITEMS)
    yield from (_with(RESPONSE, {"input": [item]}, "input") for item in ({"type": "reasoning"}, 5, "a", {}, []))
    for field, content in _given_twice():
        yield BadRequest(*content, field)
    for pair in ((1, 2), (2, 1), (5, 6), (1, 2**31 - 1), (100, 10)):
        yield _with(CHAT, dict(zip(("max_tokens", "max_completion_tokens"), pair, strict=True)), "max_tokens")
    for route in (CHAT, COMPLETION, RESPONSE):
        yield from (_with(route, {"seed": 1, "generation_config": {"seed": one}}, "seed") for one in (0, 2, -1, 3, 9))


def _with_options() -> Iterator[BadRequest]:
    """Wrong options of `generate`, each on one of the routes, as an object or as JSON."""
    wrong = [(name, value) for name, kind in OPTIONS.items() for value in WRONG[kind]]
    wrong += [(name, value) for name, values in UNSUPPORTED_OPTIONS.items() for value in values]
    wrong += [(name, 1) for name in UNKNOWN if name != "epsilon_cutoff"]
    for number, (name, value) in enumerate(wrong):
        route = (CHAT, COMPLETION, RESPONSE)[number % 3]
        options: Any = {name: value}
        if number % 2:
            options = written(options)
        field = "`stop_strings`" if name == "stop_strings" else f"generation_config.{name[:30]}"
        yield _with(route, {"generation_config": options}, field)


def _given_twice() -> Iterator[tuple[str, tuple[str, str]]]:
    """Fields that a body has twice, with the same value or another one, and their routes and bodies."""
    for route, right in RIGHT.items():
        for field in FIELDS[route]:
            for values in (("null", "null"), ("1", "1"), ('"a"', "null"), ("[]", "{}"), ("true", "1e999")):
                pairs = ", ".join(f"{json.dumps(field)}: {value}" for value in values)
                yield field, (route, written(right)[:-1] + f", {pairs}}}")
    for options, place in (('{"top_k": 1, "top_k": 1}', "top_k"), ('{"tree": {"a": 1, "a": 2}}', "tree.a")):
        for route in (CHAT, COMPLETION, RESPONSE):
            for given in (Raw(options), options):
                yield f"generation_config.{place}", (route, written(RIGHT[route] | {"generation_config": given}))
    message = Raw('{"role": "user", "content": "a", "role": "user"}')
    yield "messages[1].role", (CHAT, written({"messages": [USER, message]}))
    yield "input[1].role", (RESPONSE, written({"input": [USER, message]}))
    for route in (CHAT, RESPONSE):
        for field in ("metadata", "chat_template_kwargs", "prompt_cache_options"):
            yield f"{field}.a", (route, written(RIGHT[route] | {field: Raw('{"a": "b", "a": "b"}')}))


def _with(route: str, part: dict[str, Any], field: str) -> BadRequest:
    return BadRequest(route, written(RIGHT[route] | part), field)


def _nested(depth: int) -> Raw:
    return Raw("[" * depth + "]" * depth)
