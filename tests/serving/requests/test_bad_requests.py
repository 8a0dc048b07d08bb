"""Hand-made bad requests, at least five for each field and route: refused by name, before the engine has them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from support.tokenizer import tiny_tokenizer
from transformers import GenerationConfig, LlamaConfig


for package in ("fastapi", "openai", "prometheus_client"):
    pytest.importorskip(package)

from support.bad_requests import bad_requests  # noqa: E402
from support.bad_requests.fields import FIELDS, LOAD, OPTIONS, UNSUPPORTED, UNSUPPORTED_OPTIONS  # noqa: E402
from support.models import VOCAB  # noqa: E402
from support.scripts import answer  # noqa: E402

from hf_specdec.serving.app import build_app  # noqa: E402
from hf_specdec.serving.engine.messages import Served  # noqa: E402
from hf_specdec.serving.requests import BODIES  # noqa: E402
from hf_specdec.serving.requests.options import GenerationOptions  # noqa: E402


MOST_CITED = 200
MOST_SAID = 700


class NoEngine:
    """An engine that no request may reach."""

    fatal_error = None
    model = Served(LlamaConfig(vocab_size=VOCAB), GenerationConfig(eos_token_id=2), 4096, None)

    def __init__(self) -> None:
        self.background_thread_status = self

    def add_request(self, *_: Any, **__: Any) -> None:
        raise AssertionError("A bad request has reached the engine.")

    def register_result_handler(self, *_: Any) -> None: ...
    def unregister_result_handler(self, *_: Any) -> None: ...
    def cancel_request(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def app() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return build_app(NoEngine(), tokenizer, "some/model")  # type: ignore[arg-type]


def test_bad_requests(app: Any) -> None:
    requests = list(bad_requests())

    async def ask() -> list[str]:
        wrong = []
        for route, content, field in requests:
            status, body = await answer(app, route, content.encode())
            message = body["error"]["message"]
            names_it = field in message and "`" in message if field else "body" in message or "``" in message
            cites_little = message.count("x") < MOST_CITED and len(message) < MOST_SAID
            if status not in (400, 404 if field == "model" else 400) or not names_it or not cites_little:
                wrong.append(f"{route} {content[:200]}: {status} {message[:300]}, and not {field}")
        return wrong

    wrong = asyncio.run(ask())
    assert not wrong, "\n".join(wrong[:20])
    assert len(requests) > 1500


def test_every_field_has_bad_requests() -> None:
    """At least five on its route, and so has every option of `generate`."""
    counts = Counter((request.route, request.field) for request in bad_requests())
    for route, kind in BODIES.items():
        known = {*FIELDS[route], *UNSUPPORTED.get(route, {})}
        assert known == set(kind.model_fields)
        assert all(counts[route, field] >= 5 for field in known)
    assert counts[LOAD, "model"] >= 5
    options = {field.alias or name for name, field in GenerationOptions.model_fields.items()}
    assert options == {*OPTIONS, *UNSUPPORTED_OPTIONS}
