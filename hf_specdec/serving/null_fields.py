"""Fields that OpenAI's API always has, if only null: clients look them up. transformers' handlers leave them out."""

from __future__ import annotations

from typing import Any


_OF_CHOICES: dict[str, tuple[str, ...]] = {
    "chat.completion": ("finish_reason", "logprobs"),
    "chat.completion.chunk": ("finish_reason",),
    "text_completion": ("finish_reason", "logprobs"),
}
_OF_MESSAGES = ("content", "refusal")


def add_null_fields(answer: dict[str, Any]) -> None:
    """Adds them to the choices of a chat or completion, or of a chunk of one. Other answers stay as they are."""
    for choice in answer.get("choices", ()):
        for name in _OF_CHOICES.get(answer.get("object", ""), ()):
            choice.setdefault(name, None)
        if "message" in choice:
            for name in _OF_MESSAGES:
                choice["message"].setdefault(name, None)
