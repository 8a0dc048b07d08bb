"""Grammars of values in which strings are not JSON's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from .lark import Lark
from .schemas import at


_KINDS = ["string", "number", "boolean", "null", "array", "object"]


class Values(ABC):
    """Writes the rule of a value by its JSON schema, in the way of a form of calls."""

    comma: ClassVar[str] = ","
    """What is between two items."""

    @abstractmethod
    def _string(self, lark: Lark, schema: Mapping[str, Any]) -> str:
        """The rule of a string."""

    @abstractmethod
    def _pairs(self, properties: Mapping[str, Any]) -> list[tuple[str, str]]:
        """The keys of an object as they come, each with what is before its value."""

    @abstractmethod
    def _written(self, value: Any) -> str:
        """The text of one value."""

    def _other(self, lark: Lark, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        """The rule of a number, a truth value or nothing."""
        return lark.json(schema)

    def _value(self, lark: Lark, schema: Any, root: Mapping[str, Any]) -> str:
        found = schema if isinstance(schema, dict) else {}
        if "$ref" in found:
            place = f"{id(root)} {found['$ref']}"
            return lark.rule_of(place, lambda: self._value(lark, at(root, found["$ref"]), root))
        if (chosen := found.get("enum", [found["const"]] if "const" in found else None)) is not None:
            return lark.rule(" | ".join(lark.literal(self._written(one)) for one in chosen))
        if some := found.get("anyOf") or found.get("oneOf"):
            return lark.rule(" | ".join(self._value(lark, one, root) for one in some))
        kind = found.get("type") or _KINDS
        if isinstance(kind, list):
            return lark.rule(" | ".join(self._value(lark, found | {"type": one}, root) for one in kind))
        if kind == "string":
            return self._string(lark, found)
        if kind == "array":
            return self._array(lark, found, root)
        return self._object(lark, found, root) if kind == "object" else self._other(lark, found, root)

    def _array(self, lark: Lark, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        item = lark.rule_of(f"item {id(schema)}", lambda: self._value(lark, schema.get("items"), root))
        if most == 0:
            return lark.literal("[]")
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = f"{item} ({lark.literal(self.comma)} {item}){more}"
        return lark.rule(f'"[" {items if least else f"({items})?"} "]"')

    def _object(self, lark: Lark, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        return lark.rule(f'"{{" {self._members(lark, schema, root, self._pairs)} "}}"')

    def _members(self, lark: Lark, schema: Mapping[str, Any], root: Mapping[str, Any], pairs: Any) -> str:
        """What is in an object's braces, or in other ones; `pairs` says what is before each value."""
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        members = [
            (lark.rule(f"{lark.literal(before)} {self._value(lark, properties[key], root)}"), key in required)
            for key, before in pairs(properties)
        ]
        return _some_of(lark, members, lark.literal(self.comma))


def _some_of(lark: Lark, members: list[tuple[str, bool]], comma: str) -> str:
    """The members of an object with commas between them, of which some may be missing."""
    if not members:
        return ""
    (first, is_required), rest = members[0], members[1:]
    whole = " ".join([first, *(f"{comma} {rule}" if must else f"({comma} {rule})?" for rule, must in rest)])
    if is_required:
        return whole
    others = _some_of(lark, rest, comma)
    if any(must for _, must in rest):
        return f"({whole} | {lark.rule(others)})"
    return f"({whole}{f' | {others}' if others else ''})?"
