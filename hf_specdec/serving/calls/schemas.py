"""JSON schemas of functions' arguments, wherever they stand in a larger one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Arguments of functions without parameters."""


def arguments_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments: an object, whatever it says."""
    function = tool.get("function", tool)
    found = function.get("parameters")
    return {"type": "object", **found} if found else dict(NOTHING)


def name_of(tool: Mapping[str, Any]) -> str:
    """The name of a tool's function."""
    return str(tool.get("function", tool)["name"])


def moved(schema: Any, place: str) -> Any:
    """A schema whose references to its own parts are to another place: `#/$defs/a` is `{place}/$defs/a`."""
    if isinstance(schema, list):
        return [moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    own = {name: moved(value, place) for name, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        own["$ref"] = place + reference[1:]
    return own


def at(root: Any, reference: str) -> Any:
    """
    The part of a schema that a reference names.

    Raises:
        ValueError: if there is none.
    """
    found = root
    for part in reference.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or part not in found:
            raise ValueError(f"`$ref` {reference!r} is not in the schema")
        found = found[part]
    return found


def with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """A part of a schema with all that its references may name."""
    if not isinstance(schema, dict):
        return schema
    return schema | {name: root[name] for name in ("$defs", "definitions") if name in root and name not in schema}
