"""Checks a body by its type, and explains in a sentence what is wrong with it, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from ..characters import cut, escaped, shortened
from ..defaults import NO_IMAGES
from ..errors import RequestRefused
from .options import GenerationOptions


Body = TypeVar("Body", bound=BaseModel)

MOST_OF_A_PLACE = 100
"""Most characters of the place of a field, which may be a client's own names."""


@dataclass(frozen=True)
class Facts:
    """
    What checks have to know of the model.

    Args:
        vocab_size (`int`): number of tokens.
        roles (`frozenset[str]`): roles that messages may have.
        reserved (`frozenset[str]`): names that `chat_template_kwargs` may not have.
        has_end (`bool`): whether a token ends the model's texts if the request names none.
        no_images (`str`): why messages may have no images; empty if they may.
        switches (`tuple[str, ...]`): variables of the chat template that say how much the model reasons.
        reasons (`bool`): whether answers may have reasoning.
    """

    vocab_size: int
    roles: frozenset[str] = field(default_factory=frozenset)
    reserved: frozenset[str] = field(default_factory=frozenset)
    has_end: bool = True
    no_images: str = NO_IMAGES
    switches: tuple[str, ...] = ()
    reasons: bool = False


def checked(kind: type[Body], body: dict[str, Any], facts: Facts) -> Body:
    """
    A body whose fields are what they must be.

    Args:
        kind (`type`): the type of the body, one of `bodies`.
        body (`dict`): as JSON has it.
        facts (`Facts`): what is known of the model.

    Raises:
        RequestRefused: if a field is wrong; the message names the first one.
    """
    try:
        return kind.model_validate(body, context=facts)
    except ValidationError as error:
        found: Any = error.errors(include_url=False)[0]
        raise RequestRefused(_explained(kind, found)) from None


def _explained(kind: type[BaseModel], error: dict[str, Any]) -> str:
    """A sentence for an error as pydantic reports it."""
    place, value, context = error["loc"], error.get("input"), error.get("ctx") or {}
    where = place_of(place) or "body"
    match error["type"]:
        case "told":
            return str(context["message"])
        case "unsupported":
            return f"`{where}={shortened(value)}` is not supported by this server. {context['remedy']}"
        case "wrong_field":
            return f"`{where}.{context['field']}` {context['says']}."
        case "missing":
            return f"`{where}` is missing.{_ABOUT.get(str(place[-1]), '')}"
        case "extra_forbidden":
            return _unknown(kind, place, where)
    return f"`{where}` {_must(error, context)}, but is {shortened(value)}."


def _must(error: dict[str, Any], context: dict[str, Any]) -> str:
    """What a value must be."""
    words = _WORDS.get(error["type"])
    return str(error["msg"]) if words is None else words.format(**{name: _short(one) for name, one in context.items()})


def _short(bound: Any) -> Any:
    """A bound as one writes it: 1 for 1.0."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() and abs(bound) < 1e6 else bound


_ABOUT = {
    "prompt": " Give the text to continue.",
    "messages": " Give a list of one message or more.",
    "input": " Give a string, or a list of one item or more.",
}
_WORDS = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must be a list of {min_length} or more",
    "too_long": "must be a list of {max_length} at most",
    "string_too_short": "must be a string of {min_length} characters or more",
    "string_too_long": "must be a string of {max_length} characters at most",
    "literal_error": "must be {expected}",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}


def place_of(place: tuple[int | str, ...]) -> str:
    """A field's place as clients write it, `messages[0].content`; the tags of unions are no part of it."""
    parts = [f"[{one}]" if isinstance(one, int) else f".{cut(escaped(one), 40)}" for one in place if _is_said(one)]
    return cut("".join(parts).removeprefix("."), MOST_OF_A_PLACE)


def _is_said(part: int | str) -> bool:
    return isinstance(part, int) or not (part.startswith("<") and part.endswith(">")) and part != "[key]"


def _unknown(kind: type[BaseModel], place: tuple[int | str, ...], where: str) -> str:
    """What is said of a field that is none, with the name of the field that may be meant."""
    name, known = str(place[-1]), _names_at(kind, place[:-1])
    if len(place) == 1 and name in _names_at(GenerationOptions, ()) and "generation_config" in known:
        return f"`{where}` is not known here: options of `generate` go into `generation_config`."
    near = difflib.get_close_matches(name[:64], known, n=1)
    if near:
        return f"`{where}` is not known here. Write `{where.removesuffix(name)}{near[0]}`, if you mean that."
    return f"`{where}` is not known here. Leave it out."


def _names_at(kind: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """Names of the fields that the object at a place may have."""
    for part in place:
        fields = {one.alias or name: one for name, one in kind.model_fields.items()}
        if part in fields:
            kind = next(_objects_in(fields[str(part)].annotation), kind)
    return [one.alias or name for name, one in kind.model_fields.items()]


def _objects_in(kind: Any) -> Iterator[type[BaseModel]]:
    """The objects among the types that an annotation names."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from _objects_in(part)
