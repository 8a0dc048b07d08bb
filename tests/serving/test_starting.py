"""The server while its engine loads: it listens, and says how far it is, or why it cannot start."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest


pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

import uvicorn
from fastapi.responses import JSONResponse
from transformers import GenerationConfig, LlamaConfig

from hf_specdec.serving import starting as module
from hf_specdec.serving.engine.client import EngineClient
from hf_specdec.serving.engine.messages import Ended, NotServed, Served, Stage, Warm
from hf_specdec.serving.engine.options import StartError
from hf_specdec.serving.http_server import HttpServer
from hf_specdec.serving.starting import StartingApp, starting


class Server:
    """
    A server in a thread, whose engine is the other end of a pipe.

    Args:
        options: of a `StartingApp`.
    """

    def __init__(self, **options: Any):
        connection, self.engine_end = multiprocessing.Pipe()
        self.lines: list[str] = []
        self.engine = EngineClient(connection, self.lines.append)
        self.is_made, self.error = threading.Event(), None
        app = StartingApp(self.engine, **options)
        config = uvicorn.Config(app, port=0, log_config=None, timeout_keep_alive=60)
        self.server = HttpServer(config, self.engine)
        self._app = app
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self._connection = http.client.HTTPConnection(*self.server.servers[0].sockets[0].getsockname()[:2])

    def _run(self) -> None:
        try:
            with starting(self._app, self.engine, self.server, self._make_app, self.lines.append):
                self.server.run()
        except BaseException as error:
            self.error = error

    def _make_app(self) -> Any:
        self.is_made.wait(10)
        return JSONResponse({"is": "the real one"})

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, http.client.HTTPMessage]:
        """Status, body and headers of an answer."""
        self._connection.request(method, path, headers=headers)
        answer = self._connection.getresponse()
        body = answer.read()
        return answer.status, json.loads(body) if body.startswith(b"{") else body, answer.headers

    def becomes(self, path: str, expected: dict[str, Any]) -> None:
        until = time.monotonic() + 10
        while (answer := self.get(path)[1]) != expected:
            assert time.monotonic() < until, answer
            time.sleep(0.02)


@contextmanager
def server(**options: Any) -> Iterator[tuple[Server, Connection]]:
    made = Server(**options)
    try:
        yield made, made.engine_end
    finally:
        made.server.should_exit = True
        made.thread.join(20)
        assert not made.thread.is_alive()
        made.engine_end.close()


def served(is_warm: bool) -> Served:
    return Served(LlamaConfig(), GenerationConfig(), 100, is_warm=is_warm)


def test_a_start() -> None:
    """Requests are taken once the engine is loaded, and their routes are made."""
    with server() as (one, engine):
        status, told, headers = one.get("/health")
        assert status == 503 and told["status"] == "starting" and told["stage"] and headers["Retry-After"]
        engine.send(Stage("Loading the model."))
        one.becomes("/health", {"status": "starting", "stage": "Loading the model."})
        assert one.get("/ping")[:2] == one.get("/health")[:2]
        assert one.get("/version")[0] == one.get("/metrics")[0] == 200
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/")):
            status, told, headers = one.get(path, method)
            assert status == 503 and int(headers["Retry-After"]) > 1
            assert "Loading the model." in told["error"]["message"]
        engine.send(served(is_warm=False))
        one.engine.wait_until_loaded()
        assert one.get("/v1/models")[0] == 503
        engine.send(Warm())
        one.engine.wait_until_warm()
        one.becomes("/health", {"status": "starting", "stage": "The engine is ready; its routes are added."})
        one.is_made.set()
        one.becomes("/v1/models", {"is": "the real one"})
        until = time.monotonic() + 10
        while "Ready." not in one.lines and time.monotonic() < until:
            time.sleep(0.01)
    assert len(one.lines) == 3 and one.lines[::2] == ["Loading the model.", "Ready."]
    assert one.error is None


@pytest.mark.parametrize("how", ["refused", "killed", "warm-up"])
def test_a_start_that_fails(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`/health` says why, and the server ends with the error."""
    monkeypatch.setattr(module, "SECONDS_TO_TELL", 0.5)
    with server() as (one, engine):
        one.is_made.set()
        if how == "refused":
            engine.send(NotServed("--draft", "no such thing"))
        elif how == "killed":
            engine.close()
        else:
            engine.send(served(is_warm=False))
            engine.send(Ended("RuntimeError: no such thing"))
        one.engine._is_settled.wait(10)
        if how != "warm-up":
            status, told, _ = one.get("/health")
            assert (status, told["status"], told["reason"]) == (503, "failed", "not_started")
            assert ("Its process is no more" if how == "killed" else "no such thing") in told["message"]
            assert one.get("/v1/models")[0] == 503
        one.thread.join(20)
    assert isinstance(one.error, StartError)
    assert (one.error.option == "--draft") == (how == "refused")


def test_an_end_while_it_starts() -> None:
    with server() as (one, engine):
        assert one.get("/health")[0] == 503
        one.server.should_exit = True
        one.thread.join(20)
    assert one.error is None


def test_an_end_before_the_engine_is_loaded() -> None:
    """It is not waited for, and what it tells nevertheless is no error."""
    connection, theirs = multiprocessing.Pipe()
    lines: list[str] = []
    engine = EngineClient(connection, lines.append)
    engine.fail_open()
    theirs.send(served(is_warm=True))
    theirs.send(Stage("later"))
    until = time.monotonic() + 10
    while not lines:
        assert time.monotonic() < until
        time.sleep(0.01)
    before = time.monotonic()
    assert not engine.stop(10) and time.monotonic() - before < 5
    theirs.close()


def test_access() -> None:
    with server(api_keys=["secret"]) as (one, _):
        assert one.get("/health")[0] == 503 and one.get("/version")[0] == 200
        assert one.get("/v1/models")[0] == 401
        assert one.get("/v1/models", Authorization="Bearer secret")[0] == 503
