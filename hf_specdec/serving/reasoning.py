"""Where the reasoning of an answer begins and ends, as tokens: a grammar is of what comes after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from ..grammar import FreeBeginning


FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of the reasoning in response templates."""
TAIL = 64
"""Tokens at the end of a prompt among which are those that begin an answer."""


def has_reasoning(template: dict[str, Any] | None) -> bool:
    """Whether a response template has reasoning, be its marks tokens or not."""
    return template is not None and any(name in load_response_template(template).fields for name in FIELDS)


@dataclass(frozen=True)
class Reasoning:
    """
    The marks of a model's reasoning.

    Args:
        spec (`ResponseTemplate`): the model's response template.
        field (`str`): the name of the reasoning in it.
        start (`int`), end (`int`): tokens that the marks begin with, and end with.
    """

    spec: ResponseTemplate
    field: str
    start: int
    end: int

    @classmethod
    def of(cls, template: dict[str, Any] | None, tokenizer: Any) -> Reasoning | None:
        """The marks of a template; None if it has no reasoning, or if they are no tokens of their own."""
        if template is None:
            return None
        spec, own = load_response_template(template), tokenizer.get_added_vocab()
        for name in FIELDS:
            field = spec.fields.get(name)
            if field is None or not field.open_literals or not field.close_literals:
                continue
            starts = [one for one in own if field.open_literals[0].startswith(one)]
            if starts and field.close_literals[0] in own:
                return cls(spec, name, own[max(starts, key=len)], own[field.close_literals[0]])
        return None

    def beginning_after(self, prompt: list[int], tokenizer: Any) -> FreeBeginning | None:
        """What may precede the text of a grammar in an answer to this prompt, which may begin or end the reasoning."""
        parser = ResponseParser(self.spec, prefix=tokenizer.decode(prompt[-TAIL:]))
        if parser._current == self.field:
            return FreeBeginning((self.end,))
        return None if self.field in parser._output else FreeBeginning((self.end,), self.start)
