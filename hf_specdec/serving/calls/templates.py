"""Response templates that may read a model's calls: its own, those that transformers has, and that of bare JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from transformers.cli.serving import utils
from transformers.cli.serving.utils import get_response_template

from ..reasoning import FIELDS
from .python_form import NAME, PythonForm
from .python_reading import IS_PYTHON


MARKS = r"(?:<\|python_tag\|>|<\|python_start\|>(?:<\|python_end\|>)?)?"
"""What Llama 3 and 4 may write before a call."""


def known_templates(tokenizer: Any, model: Any) -> Iterator[dict[str, Any]]:
    """The model's own template, and those that transformers has."""
    if (own := get_response_template(tokenizer, model)) is not None:
        yield own
    yield from getattr(utils, "_RESPONSE_TEMPLATE_FALLBACKS", {}).values()


def bare_json(before: str, ends: list[str], arguments: str) -> dict[str, Any]:
    """
    The template of models that write calls as JSON alone, as Llama 3 does, or after a mark, as Llama 4.

    Args:
        before (`str`): what is before an answer.
        ends (`list[str]`): what ends it.
        arguments (`str`): the key of a call's arguments.
    """
    end = _end_of(ends)
    call = {"name": "{content.name}", "arguments": f"{{content.{arguments}}}"}
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": before,
        "fields": {
            "tool_calls": {
                "open_pattern": rf"\A\s*{MARKS}(?=\{{)",
                "close_pattern": end,
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": call},
            },
            "content": {"close_pattern": end, "content": "text"},
        },
    }


def python_calls(form: PythonForm, own: dict[str, Any] | None, before: str, ends: list[str]) -> dict[str, Any]:
    """
    The template of models that write calls in Python, as Llama 3.2 and 4 may, LFM2 and OLMo 3. Bare calls begin an
    answer or follow its reasoning, and may be JSON; those between marks may be anywhere.

    Args:
        form (`PythonForm`): how they write them.
        own (`dict`, *optional*): the model's own template, of which all but calls is kept.
        before (`str`): what is before an answer.
        ends (`list[str]`): what ends it.
    """
    end, (opens, closes) = _end_of(ends), map(re.escape, form.marks)
    own = own or {"start_anchor": before, "fields": {"content": {"close_pattern": end, "content": "text"}}}
    others = {name: field for name, field in own["fields"].items() if name != "tool_calls"}
    if not opens:
        begins = rf"\[\s*{NAME}\(|\{{" if form.is_list else rf"{NAME}\("
        thoughts = (others.get(name, {}).get("close") for name in FIELDS)
        after = [re.escape(one) for given in thoughts for one in ([given] if isinstance(given, str) else given or ())]
        opens, closes = rf"(?:\A{''.join(f'|(?<={one})' for one in after)})\s*{MARKS}(?={begins})", ""
    call = {
        "open_pattern": opens if form.marks[0] == "" else rf"\s*{opens}",
        "close_pattern": closes or rf"<\|python_end\|>|{end}",
        "repeats": True,
        "content": "json",
        "content_args": {"allow_non_json": True, IS_PYTHON: True},
    }
    return {"defaults": {"role": "assistant"}} | own | {"fields": {"tool_calls": call} | others}


def _end_of(ends: list[str]) -> str:
    return rf"\s*(?:{'|'.join(map(re.escape, ends))})" if ends else r"\s*\Z"
