"""The bodies and answers of the routes in the OpenAPI description, strict enough to make requests from it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

from .bodies import BODIES
from .checking import Facts
from .messages import IMAGE_PARTS, TEXT_PARTS
from .variables import possible_efforts


class ErrorDetails(BaseModel):
    """What went wrong."""

    message: str
    type: str
    code: int


class ErrorAnswer(BaseModel):
    """The body of an answer with an error status."""

    error: ErrorDetails = Field(...)


_REFERENCE = "#/components/schemas/{model}"
_ERRORS = {
    "400": "The request cannot be served as it is: the message names the field and the remedy.",
    "404": "There is no such model.",
    "500": "The server failed.",
    "503": "The queue is full, or the engine has ended.",
}
_ALWAYS = {"/health": ("503",), "/ping": ("503",), "/metrics": ("503",), "/v1/models/{name}": ("404",)}
"""Errors of the routes that take no body."""


def describe(app: FastAPI, facts: Facts) -> None:
    """
    Replaces the description that FastAPI makes of an application, which knows no more of bodies than that they are
    objects.

    Args:
        app (`FastAPI`): the application, with all of its routes.
        facts (`Facts`): what is known of the model.
    """

    def description() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title="hf-specdec", version="1", routes=app.routes)
            kinds: list[Any] = [(kind, "validation") for kind in (*BODIES.values(), ErrorAnswer)]
            _, schemas = models_json_schema(kinds, ref_template=_REFERENCE)
            _bound(
                schemas["$defs"],
                {
                    "token-id": {"maximum": facts.vocab_size - 1},
                    "effort": {"enum": list(possible_efforts(facts))},
                    "role": {"enum": sorted(facts.roles)},
                    "part-type": {"enum": [*TEXT_PARTS, "refusal", *([] if facts.no_images else IMAGE_PARTS)]},
                },
            )
            found.setdefault("components", {})["schemas"] = schemas["$defs"]
            for path, operations in found["paths"].items():
                for operation in operations.values():
                    _complete(path, operation)
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = description  # type: ignore[method-assign]


def _bound(schema: Any, formats: dict[str, dict[str, Any]]) -> None:
    """Replaces formats, wherever they are in a schema, by what they mean for the model."""
    if isinstance(schema, dict):
        if schema.get("format") in list(formats):
            schema.update(formats[schema.pop("format")])
        for part in schema.values():
            _bound(part, formats)
    elif isinstance(schema, list):
        for part in schema:
            _bound(part, formats)


def _complete(path: str, operation: dict[str, Any]) -> None:
    """Adds body and answers to the description of a route."""
    answers = operation["responses"]
    answers.pop("422", None)
    statuses: tuple[str, ...] = _ALWAYS.get(path, ())
    if path in BODIES:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(model=BODIES[path].__name__)}}},
        }
        answers["200"] = {
            "description": "The answer: events if `stream` is true.",
            "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
        }
        statuses = tuple(_ERRORS)
    for status in statuses:
        answers[status] = {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": _error_of(path)}},
        }
    if path == "/metrics":
        answers["200"] = {"description": "Metrics for Prometheus.", "content": {"text/plain": {}}}


def _error_of(path: str) -> dict[str, Any]:
    return (
        {"type": "object"} if path in ("/health", "/ping") else {"$ref": _REFERENCE.format(model=ErrorAnswer.__name__)}
    )
