"""Calls that a model writes in Python, as `[f(x=1), g(y="a")]`: read as literals, and never run."""

from __future__ import annotations

import ast
import keyword
import re
from typing import Any


IS_PYTHON = "is_python"
"""Among the arguments of a field's content: that it is calls in Python, which transformers' parser leaves as text."""
_STRING = r"""(?P<raw>\b[rR])?(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_RESERVED = rf"\b(?P<reserved>{'|'.join(keyword.kwlist)})(?=\s*=[^=])"
_PARTS = re.compile(f"{_STRING}|{_RESERVED}", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = set("\n\\'\"abfnrtvxuUN01234567")
"""What may follow a backslash in a string of Python."""
_MARK = "zq_reserved_"
_NAMES = {"true": True, "false": False, "null": None}
"""Names of JSON, which models write in Python, too."""


def calls_in_python(value: Any) -> list[dict[str, Any]]:
    """
    Calls as a response template gives them: `{"type": "function", "function": {"name": …, "arguments": …}}`.

    Args:
        value: the text of a list of calls, or of one call in each line, whose arguments have names and are literals.
            Names of arguments may be reserved in Python (`from`). Or JSON that has been read: a call, or a list of
            calls, with `name` and `arguments` or `parameters`.

    Raises:
        ValueError, SyntaxError, MemoryError, RecursionError: if it is something else.
    """
    if isinstance(value, str):
        calls = _expressions(_PARTS.sub(_readable, value.strip()))
        return [_function(_name(call.func), _arguments(call)) for call in calls]
    found = value if isinstance(value, list) else [value]
    return [_function(one["name"], one["arguments" if "arguments" in one else "parameters"]) for one in found]


def _function(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _readable(part: re.Match[str]) -> str:
    """A string whose escapes Python knows, or a name that it does not reserve."""
    if part["reserved"]:
        return _MARK + part["reserved"]
    return part[0] if part["raw"] else _ESCAPE.sub(_escaped, part[0])


def _escaped(escape: re.Match[str]) -> str:
    if escape[1] == "/":  # of JSON
        return "/"
    return escape[0] if escape[1] in _ESCAPES else "\\" + escape[0]


def _expressions(text: str) -> list[ast.Call]:
    found: list[Any] = [line.value if isinstance(line, ast.Expr) else line for line in ast.parse(text).body]
    if len(found) == 1 and isinstance(found[0], ast.List):
        found = found[0].elts
    if not found or not all(isinstance(one, ast.Call) for one in found):
        raise ValueError(f"no calls: {text!r}")
    return found


def _name(function: ast.expr) -> str:
    """The name of a function, which may have dots."""
    if isinstance(function, ast.Attribute):
        return f"{_name(function.value)}.{function.attr}"
    if not isinstance(function, ast.Name):
        raise ValueError(f"no name of a function: {ast.dump(function)}")
    return function.id


def _arguments(call: ast.Call) -> dict[str, Any]:
    found = {(one.arg or "").removeprefix(_MARK): _literal(one.value) for one in call.keywords}
    if call.args or "" in found or len(found) < len(call.keywords):
        raise ValueError("arguments without names of their own")
    return found


def _literal(node: ast.expr) -> Any:
    """The value of a literal that JSON has, too."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)):
            return -value if isinstance(sign, ast.USub) else value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(one) for one in items]
        case ast.Dict(keys=keys, values=values):
            names = [_literal(key) if key is not None else None for key in keys]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_literal, values), strict=True))
    raise ValueError(f"no literal: {ast.dump(node)[:80]}")
