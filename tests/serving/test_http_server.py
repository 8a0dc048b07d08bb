"""The HTTP server's end, with streams that nobody else would end, and limits of its connections."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


pytest.importorskip("uvicorn")

import uvicorn

from hf_specdec.cli.serve_checks import check_certificate
from hf_specdec.serving import http_protocol, http_server
from hf_specdec.serving.http_server import HttpServer


class Engine:
    """Stands for a client of the engine, whose requests end when they fail."""

    def __init__(self) -> None:
        self.is_gone, self.failed = False, asyncio.Event()

    def fail_open(self) -> None:
        self.is_gone = True
        self.failed.set()

    async def app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """A stream that has begun, and goes on until its request fails."""
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
        await self.failed.wait()
        await send({"type": "http.response.body", "body": b"failed"})


@contextmanager
def running(app: Any, engine: Engine, **options: Any) -> Iterator[tuple[str, int]]:
    """A server in a thread; gives its address."""
    config = uvicorn.Config(app, port=0, log_config=None, interface="asgi3", **options)
    server = HttpServer(config, engine)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[:2]
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


async def echo(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answers the length of the body, or with 413 to one that says that it has more than 1000 bytes."""
    if scope["type"] == "lifespan":
        return await Engine().app(scope, receive, send)
    length, status = 0, 200
    if int(dict(scope["headers"]).get(b"content-length", b"0")) > 1000:
        status = 413
    else:
        message = {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            length += len(message["body"])
    content = f"{length}".encode()
    headers = [(b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SECONDS_FOR_HEADERS", "SECONDS_FOR_BODY", "SECONDS_FOR_REST"):
            patch.setattr(http_protocol, name, 0.5)
        with running(echo, Engine()) as address:
            yield address


def said(address: tuple[str, int], *parts: bytes, pause: float = 0.0) -> bytes:
    """All that the server says until it closes the connection, to a client that sends these parts with pauses."""
    with socket.create_connection(address, timeout=10) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
        except OSError:
            pass  # the server has closed the connection
        found = b""
        try:
            while more := connection.recv(65536):
                found += more
        except ConnectionResetError:
            pass
        return found


POST = b"POST / HTTP/1.1\r\nHost: here\r\n"


@pytest.mark.parametrize(
    "parts, answer",
    [
        ([], b""),
        ([POST], b"408"),
        ([POST, *[b"a"] * 100], b"408"),
        ([POST + b"Content-Length: 900\r\n\r\n"], b"408"),
        ([POST + b"Content-Length: 900\r\n\r\n", *[b"a"] * 100], b"408"),
        ([POST + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\na\r\n"] * 100], b"408"),
        ([POST + b"Content-Length: 2\r\n\r\nab", POST, *[b"a"] * 100], b"408"),
        ([POST + b"Content-Length: 2000\r\n\r\n", *[b"a"] * 100], b"413"),
    ],
    ids=["nothing", "headers", "headers by bytes", "body", "body by bytes", "chunks", "a second request", "answered"],
)
def test_slow_requests_are_closed(address: tuple[str, int], parts: list[bytes], answer: bytes) -> None:
    begun = time.monotonic()
    found = said(address, *parts, pause=0.02)
    assert time.monotonic() - begun < 5
    statuses = re.findall(rb"HTTP/1.1 (\d+)", found)
    assert statuses[-1:] == ([answer] if answer else []), found
    if answer == b"408":
        assert b"took too long" in found


@pytest.mark.parametrize("piece", [1000, 100_000])
@pytest.mark.parametrize("kind", ["one", "many", "url"])
def test_long_headers(address: tuple[str, int], kind: str, piece: int) -> None:
    """They are not read to their end, however they come."""
    whole = {
        "one": POST + b"X: " + b"a" * 10**7,
        "many": POST + b"X: abc\r\n" * 10**6,
        "url": b"GET /" + b"a" * 10**7,
    }[kind]
    begun = time.monotonic()
    found = said(address, *(whole[at : at + piece] for at in range(0, len(whole), piece)))
    assert found.startswith(b"HTTP/1.1 431 ") and b"longer than 65536 bytes" in found
    assert time.monotonic() - begun < 5


def test_headers_that_are_long_enough(address: tuple[str, int]) -> None:
    for number in (1, 3):
        head = (b"X: " + b"a" * (60_000 // number) + b"\r\n") * number
        whole = POST + head + b"Connection: close\r\nContent-Length: 3\r\n\r\nabc"
        for piece in (1000, 10**6):
            parts = [whole[at : at + piece] for at in range(0, len(whole), piece)]
            assert said(address, *parts).endswith(b"\r\n3")


def test_what_is_no_http_is_answered_as_json(address: tuple[str, int]) -> None:
    found = said(address, b"nonsense\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 400 ") and json.loads(found.partition(b"\r\n\r\n")[2])["error"]["code"] == 400


def test_large_bodies_that_bring_enough_have_time(address: tuple[str, int]) -> None:
    """As many seconds more as their bytes are worth; what follows an answer is dropped, and the connection goes on."""
    parts = [POST + b"Content-Length: 900\r\n\r\n", *[b"a" * 90] * 10]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_protocol, "BYTES_PER_SECOND", 300)
        found = said(address, *parts, POST + b"Content-Length: 5000\r\n\r\n" + b"a" * 5000, POST + b"\r\n", pause=0.1)
    assert re.findall(rb"HTTP/1.1 (\d+)", found) == [b"200", b"413", b"200"]


def test_a_large_body_that_was_answered_early_is_no_header(address: tuple[str, int]) -> None:
    """The end of what is dropped may come with more bytes than headers may have: the connection goes on."""
    size = 2 * http_protocol.MOST_HEADER_BYTES
    rest = [b"a" * size, POST + b"Connection: close\r\n\r\n"]
    found = said(address, POST + b"Content-Length: %d\r\n\r\n" % size, *rest, pause=0.2)
    assert re.findall(rb"HTTP/1.1 (\d+)", found) == [b"413", b"200"]


def test_three_hundred_slow_clients_are_closed(address: tuple[str, int]) -> None:
    """While others are answered."""
    slow = [socket.create_connection(address, timeout=10) for _ in range(300)]
    for number, one in enumerate(slow):
        one.sendall(POST if number % 2 else POST + b"Content-Length: 900\r\n\r\na")
    begun = time.monotonic()
    assert said(address, POST + b"Connection: close\r\n\r\n").endswith(b"\r\n0")
    assert time.monotonic() - begun < 1
    for one in slow:
        assert one.recv(100).startswith(b"HTTP/1.1 408 ")
        one.close()


@pytest.mark.parametrize("number_of_signals", [1, 2])
def test_open_streams_fail_when_the_server_ends(
    number_of_signals: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a while; at once when asked again."""
    monkeypatch.setattr(http_server, "SECONDS_TO_FINISH", 0.5 if number_of_signals == 1 else 60.0)
    engine = Engine()
    server = HttpServer(uvicorn.Config(engine.app, port=0, log_config=None, interface="asgi3"), engine)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run)
    with caplog.at_level(logging.INFO):
        thread.start()
        while not server.started:
            time.sleep(0.01)
        (listening,) = server.servers[0].sockets[:1]
        connection = http.client.HTTPConnection(*listening.getsockname()[:2], timeout=30)
        connection.request("GET", "/")
        response = connection.getresponse()
        assert response.read(6) == b"begun "
        for _ in range(number_of_signals):
            server.handle_exit(signal.SIGINT, None)
            time.sleep(0.3)
        assert response.read() == b"failed"
        thread.join(10)
        assert not thread.is_alive()
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate")
def test_https(tmp_path: Path) -> None:
    """Requests over it are served, and the limits of connections hold, too; others are not answered."""
    certificate, key = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subject = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make.split(), *subject, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    check_certificate(certificate, key)
    with running(echo, Engine(), ssl_certfile=certificate, ssl_keyfile=key) as (host, port):
        context = ssl.create_default_context(cafile=certificate)
        for body, status in ((b"abc", 200), (b"a" * 2000, 413)):
            connection = http.client.HTTPSConnection(host, port, context=context, timeout=10)
            connection.request("POST", "/", body)
            assert connection.getresponse().status == status
            connection.close()
        with pytest.raises(OSError):
            plain = http.client.HTTPConnection(host, port, timeout=10)
            plain.request("POST", "/", b"abc")
            plain.getresponse()
