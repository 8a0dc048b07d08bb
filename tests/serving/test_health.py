"""`/health`, of an engine whose forwards do not end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.servers import client_over

from hf_specdec import NgramDraft
from hf_specdec.batching.warming_up import WarmUp
from hf_specdec.building import building
from hf_specdec.serving.engine import server as engine_server
from hf_specdec.serving.engine.messages import Pulse
from hf_specdec.serving.engine.stalls import Stalls


for package in ("fastapi", "prometheus_client"):
    pytest.importorskip(package)

from fastapi.testclient import TestClient  # noqa: E402


STALL_SECONDS = 0.5


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with pytest.MonkeyPatch.context() as patch, client_over(stall_seconds=STALL_SECONDS) as (client, _):
        patch.setattr(engine_server, "SECONDS_BETWEEN_LOOKS", 0.05)
        yield client


def becomes(client: TestClient, status: int, seconds: float = 10) -> dict[str, Any]:
    """Waits until `/health` has a status."""
    until = time.monotonic() + seconds
    while (answer := client.get("/health")).status_code != status:
        assert time.monotonic() < until, answer.text
        time.sleep(0.02)
    return answer.json()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_step_that_hangs(client: TestClient, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """503 while it does, and 200 again when it ends; without requests nothing is wrong."""
    goes_on, propose = threading.Event(), NgramDraft.propose

    def hang(*arguments: Any) -> Any:
        goes_on.wait(30)
        return propose(*arguments)

    monkeypatch.setattr(NgramDraft, "propose", hang)
    time.sleep(STALL_SECONDS)
    assert client.get("/health").json() == {"status": "ready"}
    body = {"prompt": "abc", "max_tokens": 4, "stream": stream}
    asking = threading.Thread(target=lambda: client.post("/v1/completions", json=body))
    begun = time.monotonic()
    asking.start()
    try:
        told = becomes(client, 503)
        assert time.monotonic() - begun >= STALL_SECONDS
        assert (told["status"], told["reason"]) == ("failed", "stalled") and "no forward has ended" in told["message"]
    finally:
        goes_on.set()
        asking.join(30)
    assert becomes(client, 200, 1) == {"status": "ready"}


def test_compiling_does_not_count(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    is_built, propose = threading.Event(), NgramDraft.propose

    def build(*arguments: Any) -> Any:
        with building():
            is_built.wait(30)
        return propose(*arguments)

    monkeypatch.setattr(NgramDraft, "propose", build)
    body = {"prompt": "abc", "max_tokens": 4}
    asking = threading.Thread(target=lambda: client.post("/v1/completions", json=body))
    asking.start()
    until = time.monotonic() + 3 * STALL_SECONDS
    while time.monotonic() < until:
        assert client.get("/health").status_code == 200
        time.sleep(0.05)
    is_built.set()
    asking.join(30)


def test_signs_of_forwards() -> None:
    """Counts that grow, results and preparations; not pulses as such, which other threads of the engine send."""
    now = [100.0]
    stalls = Stalls(lambda: now[0])

    def after(seconds: float) -> float:
        now[0] += seconds
        return stalls.seconds

    assert after(5) == 5
    stalls.note_work()
    assert after(5) == 5
    stalls.note_pulse(Pulse((1, 2), False))
    assert after(5) == 5
    stalls.note_pulse(Pulse((1, 2), False))
    assert after(5) == 10
    stalls.note_pulse(Pulse((1, 3), False))
    assert after(5) == 5
    stalls.note_forward()
    assert after(1) == 1
    stalls.note_pulse(Pulse((1, 3), True))
    assert after(1000) == 0
    stalls.note_pulse(Pulse((1, 3), False))
    assert after(3) == 3
    stalls.note_pulse(Pulse((1, 3), True))
    stalls.note_work()
    assert after(3) == 3


def test_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its end the server is starting, and requests are taken, but not served."""
    goes_on = threading.Event()
    monkeypatch.setattr(WarmUp, "run", lambda self: goes_on.wait(30))
    with client_over(warm_up=True) as (client, _):
        body = {"prompt": "abc", "max_tokens": 2}
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=body).status_code))
        asking.start()
        told = client.get("/health")
        assert told.status_code == 503 and told.json()["status"] == "starting" and told.headers["Retry-After"]
        assert not answers
        goes_on.set()
        assert becomes(client, 200) == {"status": "ready"}
        asking.join(30)
    assert answers == [200]
