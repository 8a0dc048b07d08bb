"""
How models write calls: JSON between marks, or alone (Qwen 2 and 3, Llama 3), tags (Qwen 3.5), or JSON with marks for
quotes (Gemma 4). Each form is found in what a chat template writes of an example, and makes grammars for other calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .lark import Lark
from .schemas import arguments_of, at, moved, name_of, with_definitions
from .values import Values


Written = Callable[[dict[str, Any]], str]
"""What the template writes of a call of `EXAMPLE` with these arguments, from its opening mark to its closing one."""
EXAMPLE = "zqfunction"
MOST_REFERENCES = 16
"""Most references from one to the next."""
_KEYS, _VALUES = ("zqkey", "zqbey"), ("zqvalue", "zqother")


class Form(Protocol):
    """How a model writes calls."""

    def call(self, lark: Lark, tools: Sequence[Mapping[str, Any]]) -> str:
        """The rule of a call of one of the tools."""


@dataclass(frozen=True)
class JsonForm:
    """
    An object with the name and the arguments.

    Args:
        opening (`str`), closing (`str`): what is around it.
        keys (`tuple[str, ...]`): of the object, as they come.
        name (`str`), arguments (`str`): keys of the function's name and of its arguments.
        others (`dict[str, Any]`): values of others.
        has_spaces (`bool`): whether it is written as `json.dumps` writes it. Otherwise spaces are the model's choice.
    """

    opening: str
    closing: str
    keys: tuple[str, ...]
    name: str
    arguments: str
    others: dict[str, Any]
    has_spaces: bool

    @classmethod
    def of(cls, written: Written, body: Callable[[str], str | None], args: Mapping[str, Any]) -> JsonForm | None:
        """The form of what is written; None if it has another."""
        example = {_KEYS[0]: _VALUES[0]}
        text = written(example)
        inner = (body(text) or "").strip()
        try:
            found = json.loads(inner)
        except ValueError:
            return None
        if args or not isinstance(found, dict):
            return None
        name = next((key for key, value in found.items() if value == EXAMPLE), None)
        arguments = next((key for key, value in found.items() if value == example), None)
        if name is None or arguments is None:
            return None
        opening, _, closing = text.partition(inner)
        others = {key: value for key, value in found.items() if key not in (name, arguments)}
        return cls(opening, closing, tuple(found), name, arguments, others, json.dumps(found) == inner)

    def call(self, lark: Lark, tools: Sequence[Mapping[str, Any]]) -> str:
        definitions = {
            str(number): moved(arguments_of(tool), f"#/$defs/{number}") for number, tool in enumerate(tools)
        }
        schema: dict[str, Any] = {"$defs": definitions, "anyOf": [self._of(n, tool) for n, tool in enumerate(tools)]}
        if self.has_spaces:
            spaces = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
            schema = {"x-guidance": spaces} | schema
        return lark.rule(f"{lark.literal(self.opening)} {lark.json(schema)} {lark.literal(self.closing)}")

    def _of(self, number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
        own = {self.name: {"const": name_of(tool)}, self.arguments: {"$ref": f"#/$defs/{number}"}}
        own |= {key: {"const": value} for key, value in self.others.items()}
        properties = {key: own[key] for key in self.keys}
        return {"type": "object", "properties": properties, "required": [*self.keys], "additionalProperties": False}


@dataclass(frozen=True)
class TagForm:
    """
    A tag for each argument. Strings are written as they are, other values as JSON.

    Args:
        before (`tuple[str, str]`): what is before the first tag, around the function's name.
        tag (`tuple[str, str, str]`): what is before the key, between it and the value, and after the value.
        after (`str`): what is after the last tag.
    """

    before: tuple[str, str]
    tag: tuple[str, str, str]
    after: str

    @classmethod
    def of(cls, written: Written, body: Callable[[str], str | None], args: Mapping[str, Any]) -> TagForm | None:
        """The form of what is written; None if it has another."""
        pairs = list(zip(_KEYS, _VALUES, strict=True))
        none, one, two = (written(dict(pairs[:count])) for count in range(3))
        for cut in range(len(none) + 1):
            before, after = none[:cut], none[cut:]
            tag = one[cut : len(one) - len(after)]
            begins, *rest = tag.split(_KEYS[0])
            if not (one == before + tag + after and tag.startswith("<") and len(rest) == 1):
                continue
            middle, found, ends = rest[0].partition(_VALUES[0])
            second = tag.replace(*_both(_KEYS)).replace(*_both(_VALUES))
            around = before.split(EXAMPLE)
            if found and ends.strip() and len(around) == 2 and two == before + tag + second + after:
                return cls((around[0], around[1]), (begins, middle, ends), after)
        return None

    def call(self, lark: Lark, tools: Sequence[Mapping[str, Any]]) -> str:
        return lark.rule(" | ".join(self._of(lark, tool) for tool in tools))

    def _of(self, lark: Lark, tool: Mapping[str, Any]) -> str:
        root = arguments_of(tool)
        required = root.get("required") or ()
        parts = [lark.literal(name_of(tool).join(self.before))]
        for key, schema in (root.get("properties") or {}).items():
            rule = lark.rule(f"{lark.literal(self.tag[0] + key + self.tag[1])} {self._value(lark, schema, root)}")
            parts.append(rule if key in required else f"{rule}?")
        return " ".join([*parts, lark.literal(self.after)])

    def json_keys(self, tool: Mapping[str, Any]) -> frozenset[str]:
        """The arguments of a tool that are written as JSON."""
        root = arguments_of(tool)
        properties = (root.get("properties") or {}).items()
        return frozenset(key for key, schema in properties if not _may_be_text(_resolved(schema, root)))

    def _value(self, lark: Lark, schema: Any, root: Mapping[str, Any]) -> str:
        """A value, and what is after it."""
        end, found = self.tag[2], _resolved(schema, root)
        if (chosen := found.get("enum", [found["const"]] if "const" in found else None)) is not None:
            texts = (one if isinstance(one, str) else json.dumps(one) for one in chosen)
            return f"({' | '.join(map(lark.literal, texts))}) {lark.literal(end)}"
        if _may_be_text(found):
            return lark.text([end.strip(), self.after.strip().split("\n")[0]], found, end)
        return f"{lark.json(with_definitions(schema, root))} {lark.literal(end)}"


def _both(pair: tuple[str, str]) -> tuple[str, str]:
    return pair[0], pair[1]


def _resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """A schema, or that which it refers to."""
    for _ in range(MOST_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = at(root, schema["$ref"])
    return schema if isinstance(schema, dict) else {}


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value may be a string, or is not said to be anything."""
    if (chosen := schema.get("enum", [schema["const"]] if "const" in schema else None)) is not None:
        return any(isinstance(one, str) for one in chosen)
    if "anyOf" in schema or "oneOf" in schema:
        some = schema.get("anyOf") or schema.get("oneOf") or []
        return any(isinstance(one, dict) and "$ref" not in one and _may_be_text(one) for one in some)
    kind = schema.get("type", "string")
    return "string" in kind if isinstance(kind, list) else kind == "string"


@dataclass(frozen=True)
class MarkedForm(Values):
    """
    An object whose keys have no quotes, and whose strings have marks in their place.

    Args:
        opening (`tuple[str, str]`): what is before it, around the function's name.
        closing (`str`): what is after it.
        mark (`str`): before and after a string.
        is_sorted (`bool`): whether keys are sorted.
    """

    opening: tuple[str, str]
    closing: str
    mark: str
    is_sorted: bool

    @classmethod
    def of(cls, written: Written, body: Callable[[str], str | None], args: Mapping[str, Any]) -> MarkedForm | None:
        """The form of what is written; None if it has another."""
        marks = args.get("string_delims") or []
        if not args.get("unquoted_keys") or len(marks) != 1 or marks[0][0] != marks[0][1]:
            return None
        mark, text = marks[0][0], written(dict(zip(_KEYS, _VALUES, strict=True)))
        pairs = [f"{key}:{mark}{value}{mark}" for key, value in zip(_KEYS, _VALUES, strict=True)]
        for order in (pairs, pairs[::-1]):  # the second is sorted
            opening, found, closing = text.partition("{" + ",".join(order) + "}")
            around = opening.split(EXAMPLE)
            if found and len(around) == 2:
                return cls((around[0], around[1]), closing, mark, order is not pairs)
        return None

    def call(self, lark: Lark, tools: Sequence[Mapping[str, Any]]) -> str:
        return lark.rule(" | ".join(self._of(lark, tool) for tool in tools))

    def _of(self, lark: Lark, tool: Mapping[str, Any]) -> str:
        root = arguments_of(tool)
        parts = lark.literal(name_of(tool).join(self.opening)), self._value(lark, root, root)
        return " ".join([*parts, lark.literal(self.closing)])

    def _string(self, lark: Lark, schema: Mapping[str, Any]) -> str:
        mark = lark.literal(self.mark)
        return lark.rule(f"{mark} {lark.text([self.mark, self.closing], schema)} {mark}")

    def _pairs(self, properties: Mapping[str, Any]) -> list[tuple[str, str]]:
        if wrong := [key for key in properties if not (key.isidentifier() and key.isascii())]:
            raise ValueError(
                f"the model writes keys without quotes, but {wrong[0]!r} has other characters than letters"
            )
        return [(key, f"{key}:") for key in (sorted(properties) if self.is_sorted else properties)]

    def _written(self, value: Any) -> str:
        return f"{self.mark}{value}{self.mark}" if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


FORMS: tuple[Any, ...] = (JsonForm, TagForm, MarkedForm)
