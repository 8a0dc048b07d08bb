"""How models write calls in Python: what a chat template writes of an example, or asks for, and grammars of it."""

from __future__ import annotations

import json
import keyword
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from .forms import EXAMPLE
from .lark import Lark
from .schemas import arguments_of, name_of, with_definitions
from .values import Values


NAME = r"[A-Za-z_][\w.]{0,255}"
"""The name of a function, as a pattern."""
_KEYS, _VALUES = ("zqkey", "zqbey"), ("zqvalue", "zqother")
_CALL = re.compile(rf"{EXAMPLE}\({_KEYS[0]}=([\"']?){_VALUES[0]}\1, ?{_KEYS[1]}=\1{_VALUES[1]}\1\)")
_ASKED = re.compile(rf"\[{NAME}\(\w+=")
_SAID = "0"
_NAMES = {True: "True", False: "False", None: "None"}


class Written(Protocol):
    """What the chat template writes of calls of `EXAMPLE`, and of an answer without any."""

    def __call__(self, *arguments: dict[str, Any]) -> str: ...

    def said(self, content: str) -> str: ...


@dataclass(frozen=True)
class PythonForm(Values):
    """
    Calls of Python, whose arguments have names and are literals.

    Args:
        opening (`str`), closing (`str`): what is around all calls: marks and brackets, if any.
        separator (`str`, *optional*): what is between two calls; None if there is one.
        quote (`str`): around strings.
    """

    opening: str
    closing: str
    separator: str | None
    quote: str = '"'
    comma: ClassVar[str] = ", "

    @classmethod
    def of(cls, written: Written, ends: list[str]) -> PythonForm | None:
        """The form of what is written; None if it has another."""
        try:
            one, said = written(dict(zip(_KEYS, _VALUES, strict=True))), written.said(_SAID)
            found = _CALL.search(one)
        except Exception:  # whatever a template makes of what it does not expect
            return None
        if found is None:
            return None
        begins, rest = one[: found.start()], one[found.end() :]
        opening = begins[len(os.path.commonprefix([begins, said.rpartition(_SAID)[0]])) :]
        after = said.rpartition(_SAID)[2]
        places = [at for end in ends if (at := rest.find(end)) >= 0]
        closing = rest[: min(places)] if places else rest.removesuffix(after)
        return cls(opening.lstrip(), closing.rstrip(), _separator(written), found[1] or '"')

    @classmethod
    def asked_for(cls, with_tools: str, without: str) -> PythonForm | None:
        """The form that a prompt with tools asks for: `[f(name=value), …]`; None if it asks for no calls in Python."""
        return cls("[", "]", ", ") if len(_ASKED.findall(with_tools)) > len(_ASKED.findall(without)) else None

    @property
    def marks(self) -> tuple[str, str]:
        """What is around the list; empty texts if there is nothing."""
        return self.opening.rstrip().removesuffix("[").strip(), self.closing.lstrip().removeprefix("]").strip()

    @property
    def is_list(self) -> bool:
        """Whether calls are in brackets."""
        return self.opening.rstrip().endswith("[")

    def call(self, lark: Lark, tools: Sequence[Mapping[str, Any]]) -> str:
        return lark.rule(" | ".join(self._of(lark, tool) for tool in tools))

    def _of(self, lark: Lark, tool: Mapping[str, Any]) -> str:
        root, name = arguments_of(tool), name_of(tool)
        if not re.fullmatch(NAME, name) or any(map(keyword.iskeyword, name.split("."))):
            raise ValueError(f"the model writes calls in Python, where no function is called {name!r}")
        return lark.rule(f'{lark.literal(f"{name}(")} {self._members(lark, root, root, self._named)} ")"')

    def _named(self, properties: Mapping[str, Any]) -> list[tuple[str, str]]:
        if wrong := [key for key in properties if not key.isidentifier()]:
            raise ValueError(f"the model writes calls in Python, where no argument is called {wrong[0]!r}")
        return [(key, f"{key}=") for key in properties]

    def _pairs(self, properties: Mapping[str, Any]) -> list[tuple[str, str]]:
        return [(key, f"{self._written(key)}: ") for key in properties]

    def _string(self, lark: Lark, schema: Mapping[str, Any]) -> str:
        plain = rf"[^{self.quote}\\\n\r\x00]"
        letter = plain if "pattern" in schema else rf"{plain}|\\[\\{self.quote}nrt]"
        quote = lark.literal(self.quote)
        return lark.rule(f"{quote} {lark.letters(letter, schema)} {quote}")

    def _object(self, lark: Lark, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        if not schema.get("properties") and schema.get("additionalProperties", True):
            return lark.json(with_definitions(dict(schema), root))
        return super()._object(lark, schema, root)

    def _other(self, lark: Lark, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        kind = schema.get("type")
        if kind in ("boolean", "null"):
            return lark.rule('"True" | "False"' if kind == "boolean" else '"None"')
        return lark.json(with_definitions(dict(schema), root))

    def _written(self, value: Any) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(self._written, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self._written(key)}: {self._written(one)}' for key, one in value.items())}}}"
        if not isinstance(value, str):
            return _NAMES[value] if value is None or isinstance(value, bool) else json.dumps(value)
        inner = json.dumps(value, ensure_ascii=False)[1:-1]
        return f'"{inner}"' if self.quote == '"' else "'" + inner.replace('\\"', '"').replace("'", "\\'") + "'"


def _separator(written: Written) -> str | None:
    """What is between two calls; None if the template does not write two."""
    arguments = dict(zip(_KEYS, _VALUES, strict=True))
    try:
        first, second = _CALL.finditer(text := written(arguments, arguments))
    except Exception:
        return None
    return text[first.end() : second.start()]
