"""Which rules a Lark grammar has, and which they name, as llguidance reads it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any


_LEXEMES = re.compile(
    r"""
    (?P<skipped> [ \t]+ | (?:\#|//)[^\n]* | "(?:\\.|[^"\\\n])*"i? | /(?:\\.|[^/\\])+/[imslux]* | <[^<>\s]+>
        | @[a-zA-Z0-9_-]+ | 0[xX][0-9a-fA-F]+ | [+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)? )
    | (?P<line> (?:\r?\n)+[ \t]* )
    | (?P<statement> %[a-zA-Z]+ )
    | !?\??(?P<name> _?[a-z][_a-z0-9-]* | _?[A-Z][_A-Z0-9-]* )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_WITH_JSON = ("%json", "%regex", "%llguidance")
_SPACE = re.compile(r"\s*")


@dataclass
class Rules:
    """
    Rules and terminals of a grammar. Those of a grammar within it (`%lark {…}`) are its own.

    Args:
        levels (`dict[str, int]`): by name, how many levels it is itself: one, and one for each group within another.
        inner (`dict[str, dict[str, None]]`): by name, the names in it.
        schemas (`list`): the JSON schemas in it.
    """

    levels: dict[str, int] = field(default_factory=dict)
    inner: dict[str, dict[str, None]] = field(default_factory=dict)
    schemas: list[Any] = field(default_factory=list)


def rules_of(text: str, decoder: json.JSONDecoder) -> Rules:
    """
    The rules of a Lark grammar. What a wrong grammar has does not matter: llguidance compiles nothing of that.

    Args:
        text (`str`): the grammar.
        decoder (`JSONDecoder`): what reads JSON in it.
    """
    found, place = _Reader(), 0
    while match := _LEXEMES.match(text, place):
        place = match.end()
        kind, lexeme = match.lastgroup or "", match[match.lastgroup or 0]
        if kind == "statement" and lexeme in _WITH_JSON:
            space = _SPACE.match(text, place)
            try:
                value, place = decoder.raw_decode(text, space.end() if space else place)
            except ValueError:
                continue
            if lexeme == "%json":
                found.rules.schemas.append(value)
            kind = "json"
        if kind != "skipped":
            found.read(kind, lexeme)
    return found.done()


class _Reader:
    """Follows the lexemes of a grammar."""

    def __init__(self) -> None:
        self.rules = Rules()
        self._num_scopes, self._scope, self._rule = 1, 0, "0:"
        self._is_first, self._groups = True, 0
        self._braces: list[tuple[int, str, int] | None] = []
        """By open brace, the scope, rule and groups around a grammar within; None for a number of times."""
        self._is_inner = False
        """Whether a brace opens a grammar."""
        self._add(self._rule)

    def _add(self, rule: str) -> None:
        """Begins a rule, or goes on with one of the same name."""
        self._rule, self._groups = rule, 0
        self.rules.levels[rule] = self.rules.levels.get(rule, 0) + 1
        self.rules.inner.setdefault(rule, {})
        self._deepest = 0

    def read(self, kind: str, lexeme: str) -> None:
        """Goes on behind a lexeme that counts."""
        begins, self._is_first = self._is_first, False
        if kind == "line":
            self._is_first = True
        elif kind == "name" and begins:
            self._add(f"{self._scope}:{lexeme}")
        elif kind == "name":
            self.rules.inner[self._rule][f"{self._scope}:{lexeme}"] = None
        elif kind == "statement":
            self._is_inner = lexeme == "%lark"
            self._is_first = False
            if begins:
                self._add(f"{self._scope}:")
        elif lexeme in "([":
            self._groups += 1
            if self._groups > self._deepest:
                self._deepest += 1
                self.rules.levels[self._rule] += 1
        elif lexeme in ")]":
            self._groups -= 1
        elif lexeme == "{":
            self._open_brace()
        elif lexeme == "}" and self._braces and (outside := self._braces.pop()) is not None:
            self._scope, self._rule, self._groups = outside
            self._deepest = self._groups

    def _open_brace(self) -> None:
        if not self._is_inner:
            self._braces.append(None)
            return
        self._braces.append((self._scope, self._rule, self._groups))
        self._scope, self._num_scopes = self._num_scopes, self._num_scopes + 1
        self._add(f"{self._scope}:")
        self._is_inner, self._is_first = False, True

    def done(self) -> Rules:
        """The rules, which name none that there is not."""
        known = self.rules.levels
        inner = {rule: {name: None for name in names if name in known} for rule, names in self.rules.inner.items()}
        return Rules(known, inner, self.rules.schemas)
