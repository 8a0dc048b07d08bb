"""Limits of HTTP connections that uvicorn does not have: the size of headers, and the time that a request may take."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .errors import error_object


MOST_HEADER_BYTES = 64 * 2**10
"""Most bytes of a request's line and headers, as of uvicorn's other protocol."""
SECONDS_FOR_HEADERS = 10.0
"""Seconds from the start of a connection, or of a further request on it, to the end of the headers."""
SECONDS_FOR_BODY = 20.0
"""Seconds from the end of the headers to the end of a body, beside those for its bytes."""
BYTES_PER_SECOND = 2000
"""Bytes of a body that must come in a second: it has as many seconds more as this goes into those that have come."""
SECONDS_FOR_REST = 5.0
"""Seconds in which the rest of a body may come that has been answered already, such as with 413."""


class _TooLongHeaders(Exception):
    """Raised where the headers become too long. The parser turns it into an error of its own."""


class LimitedProtocol(HttpToolsProtocol):
    """
    uvicorn's protocol for connections whose requests are late or have too long headers: they are answered with 408 or
    431, and closed. What comes of a body after its answer is read and dropped for a while, so that a client that sends
    all before it reads gets the answer.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._late: asyncio.TimerHandle | None = None
        self._reading = "headers"
        """What is read at present: "headers", "body", or "" between requests."""
        self._header_bytes = self._unread = self._body_bytes = 0
        self._num_ended = 0
        """Number of requests that have been read to their end."""
        self._since = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._begin("headers")

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        before = self._header_bytes, self._num_ended
        super().data_received(data)
        if self._reading != "headers" or (self._header_bytes, self._num_ended) != before:
            self._unread = 0
            return
        self._unread += len(data)  # of one header, for whose end the parser waits
        if self._headers_are_too_long and not self.transport.is_closing():
            self.send_400_response("")

    # ------------------------------------------------------------------------------------------ called by the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = self._unread = self._body_bytes = 0
        self._begin("headers")

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._begin("body")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        is_answered = self.cycle.response_complete
        super().on_message_complete()
        self._num_ended += 1
        self._begin("headers" if is_answered else "")

    def _count(self, number: int) -> None:
        self._header_bytes, self._unread = self._header_bytes + number, 0
        if self._headers_are_too_long:
            raise _TooLongHeaders

    @property
    def _headers_are_too_long(self) -> bool:
        return self._header_bytes + self._unread > MOST_HEADER_BYTES

    # ---------------------------------------------------------------------------------------------------- what is late

    def _begin(self, what: str) -> None:
        self._cancel()
        self._reading, self._since = what, self.loop.time()
        if what:
            self._late = self.loop.call_later(self._seconds, self._check_time)

    def _cancel(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    @property
    def _seconds(self) -> float:
        """Seconds that what is read at present may take."""
        if self._reading == "headers":
            return SECONDS_FOR_HEADERS
        return SECONDS_FOR_BODY + self._body_bytes / BYTES_PER_SECOND

    def _check_time(self) -> None:
        left = self._since + self._seconds - self.loop.time()
        if self.pipeline:  # it is not read on before the answer to the request before it
            left = SECONDS_FOR_BODY
        if left > 0:
            self._late = self.loop.call_later(left, self._check_time)
        elif not self.transport.is_closing():
            self._answer_and_close(408, f"The {self._reading} of the request took too long. Send it faster.")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._reading == "body" and not self.pipeline:
            self._cancel()
            self._late = self.loop.call_later(SECONDS_FOR_REST, self.transport.close)

    # --------------------------------------------------------------------------------------------------------- answers

    def send_400_response(self, msg: str) -> None:
        if self._headers_are_too_long:
            self._answer_and_close(431, f"The headers are longer than {MOST_HEADER_BYTES} bytes. Send less.")
        else:
            self._answer_and_close(400, msg)

    def _answer_and_close(self, status: int, message: str) -> None:
        """Answers, unless another answer has begun or nothing has been asked, and closes the connection."""
        self._cancel()
        cycle = self.cycle
        is_free = cycle is None or cycle.response_complete or (self._reading == "body" and not cycle.response_started)
        if is_free and self.headers is not None:
            content = json.dumps({"error": error_object(status, "invalid_request_error", message)}).encode()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(content)
            self.transport.write(STATUS_LINE[status] + head + content)
        self.transport.close()
