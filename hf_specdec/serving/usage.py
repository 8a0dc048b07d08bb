"""What the usage of an answer tells beside the numbers of tokens: those of the prompt cache, and of reasoning."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from .reasoning import Reasoning
from .stream_ends import event


IN_TEXT = '"usage":'
"""Is in no chunk but the last of a text: within a string, its quotes would be escaped."""


def num_reasoning(reasoning: Reasoning | None, prompt: list[int], tokens: list[int], tokenizer: Any) -> int:
    """How many tokens of an answer are its reasoning, marks included."""
    beginning = None if reasoning is None or not tokens else reasoning.beginning_after(prompt, tokenizer)
    if beginning is None:
        return 0
    length = beginning.length_in(tokens)
    return len(tokens) if length is None else length


def add_details(answer: dict[str, Any], num_cached: int, num_reasoning: int) -> None:
    """Adds the details to the usage of an answer, of a chunk that has one, or of the response in an event."""
    usage = answer.get("usage") or (answer.get("response") or {}).get("usage")
    if usage is None:
        return
    of_prompt, of_text = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
    usage.setdefault(f"{of_prompt}_tokens_details", {})["cached_tokens"] = num_cached
    usage.setdefault(f"{of_text}_tokens_details", {})["reasoning_tokens"] = num_reasoning


def summed_usage(usages: list[dict[str, Any]], per_prompt: int) -> dict[str, Any]:
    """The usage of several texts: the tokens of each prompt count once, and the first text of each has read it."""
    of_prompts = usages[::per_prompt]
    prompt = sum(one["prompt_tokens"] for one in of_prompts)
    new = sum(one["completion_tokens"] for one in usages)
    found: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    for name, some in (("prompt_tokens_details", of_prompts), ("completion_tokens_details", usages)):
        details = [one.get(name) or {} for one in some]
        keys = dict.fromkeys(key for one in details for key in one)
        if keys:
            found[name] = {key: sum(one.get(key) or 0 for one in details) for key in keys}
    return found


async def with_details(events: Any, details: Any) -> AsyncGenerator[str, None]:
    """
    The events of a stream, of which the last ones have the details of its usage.

    Args:
        events: of a text.
        details (`Callable`): returns the numbers that `add_details` takes.
    """
    async with aclosing(events):
        async for text in events:
            yield "".join(map(_detailed(details), text.split("\n\n")[:-1])) if IN_TEXT in text else text


def _detailed(details: Any) -> Any:
    def of_event(text: str) -> str:
        if IN_TEXT not in text:
            return f"{text}\n\n"
        found = json.loads(text.removeprefix("data: "))
        add_details(found, *details())
        return event(found)

    return of_event
