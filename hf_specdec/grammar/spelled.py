"""Grammars of texts that look like a special token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable


OPTIONS = "%llguidance"
"""How a Lark grammar begins its own options."""
_NOT_FORCED = f'{OPTIONS} {{"no_forcing": true}}\n'
_OWN_OPTIONS = re.compile(rf"^[ \t]*{OPTIONS}\s*(\{{[^\n]*\}})[ \t]*$", re.MULTILINE)
_LITERALS = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/')


def spelled_out(grammar: str, special: Iterable[str]) -> str:
    """
    The grammar, with such a text written in other tokens, where it seems to be that of one of the `special` ones.
    (Where only one text can follow, llguidance asks for the tokens of the tokenizer, and then does not take a special
    one.) Nothing is forced in it then. A grammar with options of its own stays as it is.
    """

    def spelled(lark: str) -> str:
        return without_forcing(lark) if OPTIONS not in lark and _has(lark, special) else lark

    return _rewritten(grammar, spelled)


def unforced(grammar: str) -> str:
    """The grammar, with nothing forced in it."""
    return _rewritten(grammar, without_forcing)


def without_forcing(lark: str) -> str:
    """A Lark grammar in which nothing is forced; its other options stay."""
    own = _OWN_OPTIONS.search(lark)
    if own is None:
        return _NOT_FORCED + lark
    options = json.dumps(json.loads(own[1]) | {"no_forcing": True})
    return f"{lark[: own.start(1)]}{options}{lark[own.end(1) :]}"


def _rewritten(grammar: str, rewrite: Callable[[str], str]) -> str:
    """The grammar, with its Lark grammars and JSON schemas, as Lark grammars, rewritten where that changes them."""
    try:
        told = json.loads(grammar)
    except ValueError:
        return rewrite(grammar)
    parts = told.get("grammars") if isinstance(told, dict) else None
    for part in parts if isinstance(parts, list) else ():
        if not isinstance(part, dict):
            continue
        schema, lark = part.get("json_schema"), part.get("lark_grammar")
        if lark is None and schema is not None:
            lark = f"start: %json {json.dumps(schema, ensure_ascii=False)}"
        if lark is not None and (new := rewrite(lark)) != lark:
            part |= {"lark_grammar": new, "json_schema": None}
            grammar = json.dumps(told)
    return grammar


def _has(lark: str, special: Iterable[str]) -> bool:
    """Whether strings and regular expressions of a grammar have one of these texts, alone or one after the other."""
    text = "".join(one[1:-1] for one in _LITERALS.findall(lark)).replace("\\", "")
    return any(one and one in text for one in special)
