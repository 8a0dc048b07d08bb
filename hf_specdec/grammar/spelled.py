"""Grammars of texts that look like a special token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable


OPTIONS = "%llguidance"
"""How a Lark grammar begins its own options."""
_NOT_FORCED = f'{OPTIONS} {{"no_forcing": true}}\n'
_LITERALS = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/')


def spelled_out(grammar: str, special: Iterable[str]) -> str:
    """
    The grammar, with such a text written in other tokens, where it may be that of one of the `special` ones. (Where
    only one text can follow, llguidance asks for the tokens of the tokenizer, and then does not take a special one.)
    Nothing is forced in it then. A grammar with options of its own stays as it is.
    """
    try:
        told = json.loads(grammar)
    except ValueError:
        return grammar if OPTIONS in grammar or not _has(grammar, special) else _NOT_FORCED + grammar
    parts = told.get("grammars") if isinstance(told, dict) else None
    for part in parts if isinstance(parts, list) else ():
        if not isinstance(part, dict):
            continue
        schema, lark = part.get("json_schema"), part.get("lark_grammar")
        if lark is None and schema is not None:
            lark = f"start: %json {json.dumps(schema, ensure_ascii=False)}"
        if lark is not None and OPTIONS not in lark and _has(lark, special):
            part |= {"lark_grammar": _NOT_FORCED + lark, "json_schema": None}
            grammar = json.dumps(told)
    return grammar


def _has(lark: str, special: Iterable[str]) -> bool:
    """Whether strings and regular expressions of a grammar have one of these texts, alone or one after the other."""
    text = "".join(one[1:-1] for one in _LITERALS.findall(lark)).replace("\\", "")
    return any(one and one in text for one in special)
