"""Response templates that may read a model's calls: its own, those that transformers has, and that of bare JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from transformers.cli.serving import utils
from transformers.cli.serving.utils import get_response_template


def known_templates(tokenizer: Any, model: Any, before: str, ends: list[str]) -> Iterator[dict[str, Any]]:
    """
    The templates, the most likely ones first.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
        model: has the model's config.
        before (`str`): what the chat template writes before an answer.
        ends (`list[str]`): texts of tokens that end an answer.
    """
    if (own := get_response_template(tokenizer, model)) is not None:
        yield own
    yield from getattr(utils, "_RESPONSE_TEMPLATE_FALLBACKS", {}).values()
    if before:
        for arguments in ("parameters", "arguments"):
            yield bare_json(before, ends, arguments)


def bare_json(before: str, ends: list[str], arguments: str) -> dict[str, Any]:
    """
    The template of models that write calls as JSON alone, as Llama 3 does, or after a mark, as Llama 4.

    Args:
        before (`str`): what is before an answer.
        ends (`list[str]`): what ends it.
        arguments (`str`): the key of a call's arguments.
    """
    end = rf"\s*(?:{'|'.join(map(re.escape, ends))})" if ends else r"\s*\Z"
    call = {"name": "{content.name}", "arguments": f"{{content.{arguments}}}"}
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": before,
        "fields": {
            "tool_calls": {
                "open_pattern": r"\A\s*(?:<\|python_tag\|>|<\|python_start\|>(?:<\|python_end\|>)?)?(?=\{)",
                "close_pattern": end,
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": call},
            },
            "content": {"close_pattern": end, "content": "text"},
        },
    }
