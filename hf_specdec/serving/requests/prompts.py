"""The prompts of a completion, as text or tokens, and the number of its choices."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Strict, Tag

from .kinds import ListOf, Text, TokenId, kind_of


MOST_CHOICES = 128
"""Most texts of a request, as of OpenAI's `n`."""

Choices = Annotated[int, Strict(), Field(ge=1, le=MOST_CHOICES)]


class TokenPrompt(str):
    """
    A prompt of tokens. (transformers' handler lets nothing but a string pass.)

    Args:
        tokens (`list[int]`): the prompt.
    """

    tokens: list[int]

    def __new__(cls, tokens: list[int]) -> TokenPrompt:
        """An empty text that has the tokens."""
        own = super().__new__(cls)
        own.tokens = tokens
        return own


def _prompt_kind(value: Any) -> str | None:
    kind = kind_of(value)
    if kind == "<list>" and value and not isinstance(value[0], (str, list)):
        return "<tokens>"
    return kind if kind in ("<string>", "<list>") else None


_Tokens = Annotated[ListOf[TokenId], Field(min_length=1)]
_Many = Annotated[
    ListOf[
        Annotated[
            Annotated[Text, Tag("<string>")] | Annotated[_Tokens, Tag("<list>")],
            Discriminator(
                kind_of, custom_error_type="wrong", custom_error_message="must be a string or a list of tokens"
            ),
        ]
    ],
    Field(min_length=1, max_length=MOST_CHOICES),
]
Prompt = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[_Tokens, Tag("<tokens>")] | Annotated[_Many, Tag("<list>")],
    Discriminator(
        _prompt_kind,
        custom_error_type="wrong",
        custom_error_message="must be a string, a list of token ids, or a list of these",
    ),
]
"""A text or its tokens, or several of these."""


def prompts_of(prompt: Any) -> list[str]:
    """The prompts of a completion, each a text or a `TokenPrompt`."""
    several = [prompt] if _prompt_kind(prompt) != "<list>" else prompt
    return [one if isinstance(one, str) else TokenPrompt(one) for one in several]
