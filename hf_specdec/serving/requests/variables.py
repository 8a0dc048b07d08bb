"""Variables of the chat template that a request gives, and the effort of reasoning, which is one of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from ..characters import cut, escaped, shortened
from .kinds import told, wrong


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Efforts of reasoning, as OpenAI's API and vLLM have them."""
EFFORT = "reasoning_effort"
"""The variable of chat templates that know such efforts."""
_OTHERS = "Leave it out, or give what the model's chat template knows in `chat_template_kwargs`."


def _template_variables(value: Any, info: ValidationInfo) -> Any:
    if value is None:
        return value
    if not isinstance(value, dict):
        raise wrong("must be an object")
    reserved = frozenset() if info.context is None else info.context.reserved
    for name in value:
        if name in reserved or name.startswith("_"):
            said = cut(escaped(name), 40)
            if name == "chat_template":
                raise told(
                    "`chat_template_kwargs.chat_template` is not supported by this server: the chat template is the "
                    "model's. Leave it out, or use `/v1/completions`, which takes text as it is."
                )
            raise told(
                f"`chat_template_kwargs.{said}` is reserved: it is no variable that a request gives to a chat "
                "template. Leave it out."
            )
    return value


TemplateVariables = Annotated[dict[str, Any], BeforeValidator(_template_variables)]


def _possible(effort: str, info: ValidationInfo) -> str:
    facts = info.context
    if facts is not None and effort not in possible_efforts(facts):
        raise PydanticCustomError("unsupported", "{remedy}", {"remedy": _OTHERS})
    return effort


Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    AfterValidator(_possible),
    Field(json_schema_extra={"format": "effort"}),
]


def possible_efforts(facts: Any) -> tuple[str, ...]:
    """Efforts that requests may ask for: any, if the chat template can be told; else none, if the model has none."""
    return EFFORTS if facts.switches else () if facts.reasons else EFFORTS[:1]


def check_one_effort(effort: str | None, given: dict[str, Any] | None) -> None:
    """Raises if a request gives one effort by its field, and another one among its `chat_template_kwargs`."""
    inner = (given or {}).get(EFFORT)
    if None not in (effort, inner) and effort != inner:
        raise told(
            f"The effort of reasoning {effort!r} and `chat_template_kwargs.{EFFORT}={shortened(inner)}` differ. Leave "
            "one of them out."
        )


def variables_of(effort: str, facts: Any) -> dict[str, Any]:
    """An effort as variables of the chat template, which are read as in vLLM: none switches reasoning off."""
    return {name: effort if name == EFFORT else effort != EFFORTS[0] for name in facts.switches}
