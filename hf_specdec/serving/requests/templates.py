"""What of a chat template matters to requests: roles, switches, names that `chat_template_kwargs` may not have."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from jinja2 import Environment, TemplateError, meta, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils


ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles of the chat API."""

SWITCHES = ("reasoning_effort", "enable_thinking", "thinking")
"""Variables by which templates tell a model how much to reason, or whether."""

_VARIABLES = frozenset(
    {
        "messages",
        "message",
        "conversation",
        "conversations",
        "tools",
        "documents",
        "add_generation_prompt",
        "chat_template",
        "raise_exception",
        "strftime_now",
        "self",
        "load_audio_from_video",
        "num_frames",
        "processor_kwargs",
        "tokenizer_kwargs",
        "images",
        "videos",
        "audio",
        "text",
    }
)
"""Variables that a template has from the request or from transformers, and arguments of processors."""


def reserved_names(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """
    Names that are more than variables of the template: parameters of `apply_chat_template`, of the tokenizer's own
    call and of the rendering, and variables that the template has from elsewhere.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
    """
    functions: list[Any] = [chat_template_utils.render_jinja_template]
    for kind in (type(tokenizer), PreTrainedTokenizerBase):
        functions += [kind.apply_chat_template, kind.__call__, kind.encode]
        functions += [
            getattr(kind, name) for name in ("_encode_plus", "_batch_encode_plus", "pad") if hasattr(kind, name)
        ]
    parameters = (name for function in functions for name in inspect.signature(function).parameters)
    return _VARIABLES | frozenset(parameters) | frozenset(tokenizer.special_tokens_map)


def roles_of(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """
    Roles that messages may have: those of the chat API, and those that the model's chat template compares a message's
    role with. (Many templates write any role out as it is, and so any special token in it.)
    """
    comparisons = (one for tree in _trees(tokenizer) for one in tree.find_all(nodes.Compare))
    found = (one for comparison in comparisons for one in _roles_in(comparison))
    return ROLES.union(one for one in found if re.fullmatch(r"[A-Za-z][\w-]*", one))


def switches_of(tokenizer: Any) -> tuple[str, ...]:
    """
    Variables of a chat template that say how much the model reasons.

    Args:
        tokenizer (`PreTrainedTokenizerBase` or `ProcessorMixin`): has the template.
    """
    read = {name for tree in _trees(tokenizer) for name in meta.find_undeclared_variables(tree)}
    return tuple(name for name in SWITCHES if name in read)


def _trees(tokenizer: Any) -> Iterator[nodes.Template]:
    """The parsed chat templates of a tokenizer or processor."""
    templates = tokenizer.chat_template
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    for text in templates.values() if isinstance(templates, dict) else [templates]:
        if isinstance(text, str):
            try:
                yield environment.parse(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text))
            except TemplateError:
                continue  # of the template's own syntax, which its rendering tells of


def _roles_in(comparison: nodes.Compare) -> Iterator[str]:
    """The strings with which something called role is compared."""
    is_role = any(
        [one.attr == "role" for one in comparison.find_all(nodes.Getattr)]
        + [isinstance(one.arg, nodes.Const) and one.arg.value == "role" for one in comparison.find_all(nodes.Getitem)]
        + [one.name == "role" for one in comparison.find_all(nodes.Name)]
    )
    for one in comparison.find_all(nodes.Const) if is_role else ():
        if isinstance(one.value, str) and one.value != "role":
            yield one.value
