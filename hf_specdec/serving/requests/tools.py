"""Tools of a request, and which one is to be called."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, WithJsonSchema

from ..calls.schemas import name_of
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


def _named(choice: dict[str, Any]) -> Any:
    """The name of the function that a choice demands, in the form of chats or of responses."""
    function = choice.get("function")
    inner = function if isinstance(function, dict) else choice
    return inner.get("name") if choice.get("type") in (None, "function") else None


def check_choice(choice: Any, names: list[str]) -> None:
    """
    Checks which tool is to be called.

    Args:
        choice: `"none"`, `"auto"`, `"required"`, or an object that names a function.
        names (`list[str]`): of the tools.

    Raises:
        PydanticCustomError: if it is something else, or names none of the tools.
    """
    if choice in (None, "auto", "none"):
        return
    name = _named(choice) if isinstance(choice, dict) else None
    if choice != "required" and not isinstance(name, str):
        raise told(
            f"`tool_choice` must be 'none', 'auto', 'required' or an object that names a function, but is "
            f"{shortened(choice)}."
        )
    if not names:
        raise told(f"`tool_choice={shortened(choice)}` without `tools`: there is none to be called. Leave it out.")
    if name is not None and name not in names:
        raise told(f"`tool_choice` names the function {shortened(name)}, but `tools` has {shortened(names)}.")


def demanded_tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The tools of a checked body of which one must be called; none if the model may choose not to."""
    choice, tools = body.get("tool_choice"), body.get("tools") or []
    if isinstance(choice, dict):
        return [tool for tool in tools if name_of(tool) == _named(choice)][:1]
    return list(tools) if choice == "required" else []


_NAME = {"type": "string", "minLength": 1}
_NAMED = {"type": "object", "properties": {"type": {"const": "function"}, "name": _NAME}, "required": ["type", "name"]}
_NESTED = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": _NAME}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
ToolChoice = Annotated[Any, WithJsonSchema({"anyOf": [{"enum": ["auto", "none", "required", None]}, _NESTED, _NAMED]})]
