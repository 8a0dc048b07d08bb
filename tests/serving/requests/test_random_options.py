"""Random options of `generate` over HTTP: each is served or refused by name, and none ends or holds up the engine."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.random_options import is_nonsense, random_options


for package in ("fastapi", "openai", "prometheus_client"):
    pytest.importorskip(package)

from fastapi.testclient import TestClient  # noqa: E402


SECONDS = 20
"""Within which each request is answered."""


@pytest.mark.parametrize("seed, number", [(1, 300), pytest.param(2, 8000, marks=pytest.mark.slow)])
def test_random_options(client: TestClient, seed: int, number: int) -> None:
    served = 0
    with ThreadPoolExecutor(max_workers=1) as sender:
        for case in range(number):
            options = random_options(random.Random(f"{seed}/{case}"))
            given = json.dumps(options) if case % 2 else options
            body = json.dumps({"prompt": "abc xyz", "max_tokens": 4, "generation_config": given})
            about = f"random.Random('{seed}/{case}'): {body[:400]}"
            began = time.monotonic()
            headers = {"Content-Type": "application/json"}
            answer = sender.submit(client.post, "/v1/completions", content=body, headers=headers).result(SECONDS)
            assert answer.status_code in (200, 400), f"{answer.text} to {about}"
            assert time.monotonic() - began < SECONDS, about
            if answer.status_code == 200:
                served += 1
                wrong = [name for name, value in options.items() if is_nonsense(name, value)]
                assert not wrong, f"served {wrong} of {about}"
            else:
                message = answer.json()["error"]["message"]
                assert len(message) < 800 and "`" in message, f"{message} to {about}"
    assert number // 10 < served < number // 2
    assert client.get("/health").status_code == 200
