"""Variables of the chat template that a request gives."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationInfo

from ..characters import cut, escaped
from .kinds import told, wrong


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
