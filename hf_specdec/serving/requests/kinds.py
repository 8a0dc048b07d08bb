"""Types of the values in requests. None of them is converted from another: "5" is no number, and 1 is not true."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    Strict,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema


LARGEST = 3.4028234663852886e38
"""The largest number of float32: a larger one is infinite to the model."""
MOST_TOKENS = 2**31 - 1


class Closed(BaseModel):
    """An object that has no other fields than those named. Null stands for the default."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _with_one_unknown_field(cls, given: Any) -> Any:
        """Leaves out unknown fields after the first: one is enough to be told; see `ListOf`."""
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        first = next((name for name in given if name not in known), None)
        return {name: value for name, value in given.items() if name in known or name == first}


class Open(BaseModel):
    """An object that may have further fields, which change nothing or are for the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)


Boolean = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False, ge=-LARGEST, le=LARGEST)]
Positive = Annotated[float, Strict(), Field(allow_inf_nan=False, gt=0, le=LARGEST)]
Probability = Annotated[float, Strict(), Field(allow_inf_nan=False, ge=0, le=1)]
PositiveProbability = Annotated[float, Strict(), Field(allow_inf_nan=False, gt=0, le=1)]
Cutoff = Annotated[float, Strict(), Field(allow_inf_nan=False, ge=0, lt=1)]
Temperature = Annotated[float, Strict(), Field(allow_inf_nan=False, ge=0, le=LARGEST)]
Length = Annotated[int, Strict(), Field(ge=1, le=MOST_TOKENS)]
Count = Annotated[int, Strict(), Field(ge=0, le=MOST_TOKENS)]
NgramSize = Annotated[int, Strict(), Field(ge=0, le=64)]
"""Above 0, a list of that many copies of the text is made at every step."""
Seed = Annotated[int, Strict(), Field(ge=-(2**63), le=2**63 - 1)]

Item = TypeVar("Item")
ListOf = Annotated[list[Item], Field(fail_fast=True)]
"""
A list of which the first wrong item is told. (pydantic would report all of them: 290,000 took 1.7 seconds, for most of
which no other thread could run.)
"""


def wrong(says: str) -> PydanticCustomError:
    """An error of a value: `field` {says}, but is {value}."""
    return PydanticCustomError("wrong", "{says}", {"says": says})


def told(message: str) -> PydanticCustomError:
    """An error whose message is complete."""
    return PydanticCustomError("told", "{message}", {"message": message})


def wrong_field(field: str, says: str) -> PydanticCustomError:
    """An error of a field of the object that is checked: `object.field` {says}."""
    return PydanticCustomError("wrong_field", "{says}", {"field": field, "says": says})


def checking(check: Callable[[Any], Any]) -> BeforeValidator:
    """A validator by a function whose errors of value or type are the request's fault, and name the field."""

    def run(value: Any) -> Any:
        try:
            return value if value is None else check(value)
        except (TypeError, ValueError) as error:
            raise told(str(error)) from error

    return BeforeValidator(run)


def in_vocabulary(token: int, info: ValidationInfo) -> int:
    """
    A token that the model knows.

    Raises:
        PydanticCustomError: if it does not.
    """
    size = None if info.context is None else info.context.vocab_size
    if size is not None and token >= size:
        raise wrong(f"must be one of the {size} tokens that the model knows")
    return token


TokenId = Annotated[
    int, Strict(), Field(ge=0, json_schema_extra={"format": "token-id"}), AfterValidator(in_vocabulary)
]


@dataclass(frozen=True)
class Only:
    """
    The type of an option that is not supported, but for values that change nothing.

    Args:
        values (`str`): these values, as JSON.
        remedy (`str`): what to do about others.
    """

    values: tuple[str, ...]
    remedy: str

    def __init__(self, *values: str, remedy: str = "Leave it out."):
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "remedy", remedy)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [None, *(json.loads(value) for value in self.values)]}

    def _checked(self, value: Any) -> Any:
        given = _without_nulls(value)
        if given is None or any(_kind(one) is _kind(given) and one == given for one in map(json.loads, self.values)):
            return value
        raise PydanticCustomError("unsupported", "{remedy}", {"remedy": self.remedy})


def _kind(value: Any) -> type:
    """The type of a value in JSON, where 1 and 1.0 are the same number."""
    return float if type(value) is int else type(value)


def _without_nulls(value: Any) -> Any:
    """A value, without what is null in an object: that is the default."""
    return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else value


def kind_of(value: Any) -> str | None:
    """Tells strings, lists and objects apart, by the tags of unions. (Tags are no part of a field's place.)"""
    kinds: dict[type, str] = {str: "<string>", list: "<list>", dict: "<object>", int: "<integer>"}
    return kinds.get(type(value))
