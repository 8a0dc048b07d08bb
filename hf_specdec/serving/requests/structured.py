"""What form an answer must have: `response_format`, `text.format` and `structured_outputs`, as grammars."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from ...grammar.depths import check_grammar
from ..characters import cut
from ..schema_limits import check_schema
from .checking import place_of
from .kinds import Boolean, Closed, ListOf, Open, Text, kind_of, told, wrong_field
from .parsing import json_of
from .schema_places import place_in_schema


MOST_CHOICES = 1024
LONGEST = 2**16
"""Most characters of a regular expression, a grammar or all choices: compiling them holds up other requests."""
MOST_OF_A_REASON = 160
"""Most characters of what is said of a wrong schema or grammar."""

_Long = Annotated[Text, Field(max_length=LONGEST)]
_Schema = Annotated[
    Annotated[dict[str, Any], Tag("<object>")] | Annotated[_Long, Tag("<string>")],
    Discriminator(kind_of, custom_error_type="wrong", custom_error_message="must be a JSON schema, or its JSON"),
]
Kind = Literal["text", "json_object", "json_schema"]


class JsonSchema(Open):
    """A JSON schema. Its name and description change nothing, and it is always followed strictly."""

    name: Text | None = None
    description: Text | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: Boolean | None = None

    @model_validator(mode="after")
    def _compiles(self) -> JsonSchema:
        _check_size("schema", self.schema_)
        _check("schema", self.grammar(), self.schema_)
        return self

    def grammar(self) -> str:
        """The schema as a grammar."""
        return _of_schema(self.schema_)


class ResponseFormat(Open):
    """The form of an answer in the chat API."""

    type: Kind
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise wrong_field("json_schema", "is missing: give an object with a `schema`")
        return self

    def grammar(self) -> str | None:
        """The form as a grammar; None for any text."""
        if self.type == "json_schema" and self.json_schema is not None:
            return self.json_schema.grammar()
        return _of_schema({"type": "object"}) if self.type == "json_object" else None


class TextFormat(Open):
    """The form of an answer in the responses API."""

    type: Kind = "text"
    name: Text | None = None
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Boolean | None = None

    @model_validator(mode="after")
    def _compiles(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise wrong_field("schema", "is missing: give a JSON schema")
        _check_size("schema", self.schema_)
        _check("schema", self.grammar(), self.schema_)
        return self

    def grammar(self) -> str | None:
        """The form as a grammar; None for any text."""
        if self.type == "json_schema":
            return _of_schema(self.schema_)
        return _of_schema({"type": "object"}) if self.type == "json_object" else None


class StructuredOutputs(Closed):
    """The form of an answer under vLLM's names: one of five."""

    json_: Annotated[_Schema | None, Field(alias="json")] = None
    regex: _Long | None = None
    choice: Annotated[ListOf[_Long], Field(min_length=1, max_length=MOST_CHOICES)] | None = None
    grammar: _Long | None = None
    json_object: Boolean | None = None
    # How JSON is written.
    disable_any_whitespace: Boolean | None = None
    whitespace_pattern: _Long | None = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        given = self._given()
        if len(given) != 1:
            what = " and ".join(f"`{name}`" for name in given) or "nothing"
            raise told(
                "`structured_outputs` must have one of `json`, `regex`, `choice`, `grammar` and `json_object`, but "
                f"has {what}."
            )
        if sum(map(len, self.choice or ())) > LONGEST:
            raise wrong_field("choice", f"may have {LONGEST} characters in all. Give fewer or shorter choices")
        try:
            schema = None if self.json_ is None else json_schema_of(self.json_)
            check_schema(schema)
            grammar = self.as_grammar()
            check_grammar(grammar)
        except ValueError as error:  # no JSON, no grammar, or too deep
            raise wrong_field(given[0], told_of(str(error))) from error
        _check(given[0], grammar, schema)
        return self

    def _given(self) -> list[str]:
        values = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        given = [name for name, value in values.items() if value is not None]
        return [*given, *(["json_object"] if self.json_object else [])]

    def as_grammar(self) -> str:
        """The form as a grammar."""
        from llguidance import LLMatcher, grammar_from

        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        if self.choice is not None:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, self.choice)))
        if self.grammar is not None:
            return grammar_from("grammar", self.grammar)
        schema = {"type": "object"} if self.json_ is None else self.json_
        options: dict[str, Any] = {"whitespace_flexible": not self.disable_any_whitespace}
        if self.whitespace_pattern is not None:
            options["whitespace_pattern"] = self.whitespace_pattern
        has_options = self.disable_any_whitespace or self.whitespace_pattern is not None
        return _of_schema(schema, options if has_options else None)


def grammar_of(body: Any) -> str | None:
    """
    The grammar that a checked body asks for; None for any text.

    Raises:
        PydanticCustomError: if it asks for two.
    """
    text = getattr(body, "text", None)
    forms = {
        "response_format": getattr(body, "response_format", None),
        "text.format": None if text is None else text.format,
    }
    found = {name: grammar for name, form in forms.items() if form is not None and (grammar := form.grammar())}
    if body.structured_outputs is not None:
        found["structured_outputs"] = body.structured_outputs.as_grammar()
    if len(found) > 1:
        raise told(f"{' and '.join(f'`{name}`' for name in found)} say of one answer what form it has. Give one.")
    return next(iter(found.values()), None)


def _of_schema(schema: Any, options: dict[str, Any] | None = None) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(schema, defaults=options)  # type: ignore[arg-type]


def json_schema_of(given: Any) -> Any:
    """A schema, or its JSON, as a schema."""
    return json_of(given, "structured_outputs.json", may_repeat=True) if isinstance(given, str) else given


def _check_size(field: str, schema: Any) -> None:
    """Raises if the schema in a field is too large or too deep to be compiled."""
    try:
        check_schema(schema)
    except ValueError as error:
        raise wrong_field(field, told_of(str(error))) from error


def _check(field: str, grammar: str | None, schema: Any = None) -> None:
    """Raises what is wrong with the field of an object that the grammar was made of, and where in a schema."""
    from llguidance import LLMatcher

    if grammar is not None:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
        if is_error:
            raise wrong_field(f"{field}{told_place(schema, messages[0])}", told_of(messages[0]))


def told_place(schema: Any, reason: str) -> str:
    """The place in a schema that an error is said of, to be put behind the schema's; empty for the whole."""
    place = place_of(place_in_schema(schema, reason))
    return f".{place}" if place else ""


def told_of(reason: str) -> str:
    """What is said of a schema or a grammar that is wrong."""
    return f"cannot be followed: {cut(' '.join(reason.split()), MOST_OF_A_REASON)}".removesuffix(".")
