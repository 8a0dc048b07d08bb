"""Tools of a request, and which one is to be called."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from ..characters import shortened
from .kinds import Boolean, Only, Open, Text, told


Kind = Annotated[Any, Only('"function"', remedy="Leave it out: tools are functions.")]


class _Typed(Open):
    type: Kind = None


class Function(Open):
    """A function that the model may call. Further fields are for the chat template."""

    name: Annotated[Text, Field(min_length=1, max_length=256)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Boolean | None = None


class NestedTool(_Typed):
    """A function as the chat API writes it."""

    function: Function


class FlatTool(Function, _Typed):
    """A function as the responses API writes it."""


def _form(tool: Any) -> str | None:
    return None if not isinstance(tool, dict) else "<nested>" if "function" in tool else "<flat>"


ResponseTool = Annotated[
    Annotated[NestedTool, Tag("<nested>")] | Annotated[FlatTool, Tag("<flat>")],
    Discriminator(_form, custom_error_type="wrong", custom_error_message="must be an object"),
]


def check_choice(choice: Any, tools: Any) -> None:
    """
    Checks that no call is demanded, which could not be enforced.

    Raises:
        PydanticCustomError: if one is.
    """
    if choice in (None, "auto", "none"):
        return
    if not isinstance(choice, (str, dict)):
        raise told(f"`tool_choice` must be 'auto' or 'none', but is {shortened(choice)}.")
    if not tools:
        raise told(f"`tool_choice={shortened(choice)}` without `tools`: there is none to be called. Leave it out.")
    raise told(f"`tool_choice={shortened(choice)}` is not supported by this server, but 'auto' and 'none'.")
