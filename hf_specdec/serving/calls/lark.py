"""Grammars in llguidance's Lark, rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...grammar.spelled import OPTIONS


class Lark:
    """
    A grammar that is being written.

    Args:
        special (`Mapping[str, int]`): special tokens, by their text: a grammar's text never stands for one.
    """

    def __init__(self, special: Mapping[str, int]):
        self._special, self._rules, self._names = special, list[str](), dict[str, str]()
        texts = sorted(map(re.escape, special), key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(texts)})") if texts else None

    def literal(self, text: str) -> str:
        """A text as it is, in which special tokens are those."""
        parts = self._split.split(text) if self._split else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def rule(self, body: str, attributes: str = "") -> str:
        """The name of a rule; equal ones are one."""
        if (key := attributes + body) not in self._names:
            self._names[key] = f"r{len(self._rules)}"
            self._rules.append(f"{self._names[key]}{attributes}: {body}")
        return self._names[key]

    def rule_of(self, key: str, body: Any) -> str:
        """The name of the rule that `body()` writes; the same for equal keys, in its own body, too."""
        if key not in self._names:
            name = self._names[key] = f"r{len(self._rules)}"
            place = len(self._rules)
            self._rules.append("")
            self._rules[place] = f"{name}: {body()}"
        return self._names[key]

    def json(self, schema: Any) -> str:
        """JSON of a schema."""
        return self.rule(f"%json {json.dumps(schema)}")

    def text(self, without: Iterable[str], schema: Mapping[str, Any], end: str = "") -> str:
        """Any text in which none of some strings is, of a string's schema, and the end of it."""
        pattern = _patterns("(?s:.)", schema)
        excluded = "|".join(re.escape(one).replace("/", r"\/") for one in without)
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {' & '.join(pattern)} & ~/(?s:.*)({excluded})(?s:.*)/")
        return self.rule(f"{name} {self.literal(end)}", "[lazy]") if end else name

    def letters(self, letter: str, schema: Mapping[str, Any]) -> str:
        """Any text of such letters, each of which a pattern matches, of a string's schema."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {' & '.join(_patterns(f'({letter})', schema))}")
        return name

    def grammar(self, start: str) -> str:
        """The grammar of texts that begin with this."""
        from llguidance import LLMatcher

        return LLMatcher.grammar_from_lark("\n".join([f"{OPTIONS} {{}}", f"start: {start}", *self._rules]))


def _patterns(letter: str, schema: Mapping[str, Any]) -> list[str]:
    """Patterns that a text of such letters must match all of by its schema."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    found = [f"/{letter}{{{least},{most}}}/" if least or most != "" else f"/{letter}*/"]
    if isinstance(own := schema.get("pattern"), str):
        begins, ends = own.startswith("^"), own.endswith("$") and not own.endswith("\\$")
        own = own[begins : len(own) - ends]
        own = f"{'' if begins else '(?s:.*)'}({own}){'' if ends else '(?s:.*)'}"
        found.append("/" + re.sub(r"(?<!\\)/", r"\/", own) + "/")
    return found
