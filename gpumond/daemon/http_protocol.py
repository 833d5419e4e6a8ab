"""uvicorn's HTTP/1.1 protocol with absolute deadlines: uvicorn itself lets a client dribble for ever.

A request, headers and body, is there within ten seconds of its first byte, whatever comes meanwhile, and an answer is
taken within thirty. Only the origin form of a target is understood, so that the Host header alone says who is meant.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from httptools import HttpParserError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpumond.daemon.listener import HttpPeer

RECEIVE_SECONDS = 10.0
TAKE_SECONDS = 30.0
MAX_HEAD_BYTES = 32 * 1024
MAX_REQUEST_BYTES = 1 << 20
"""As it is sent: with chunks, their extensions and trailers. The body itself is bounded by the application."""
MAX_PIPELINED = 8
"""Requests that wait for the answer of the one before. Each is parsed, and so costs some KiB."""
UNDERSTOOD = "only HTTP/1.0 and 1.1 are understood, and targets that begin with /"

TOO_LONG = (431, f"the headers are longer than {MAX_HEAD_BYTES} bytes")


class HttpProtocol(HttpToolsProtocol):
    """One connection. ``admit`` may refuse it by its TLS certificate; ``gone`` hears of its end."""

    def __init__(
        self,
        visit: HttpPeer,
        gone: Callable[[HttpPeer], None],
        rejected: Callable[[str], None],
        admit: Callable[[asyncio.BaseTransport], bool],
        receive_seconds: float = RECEIVE_SECONDS,
        **uvicorn: Any,
    ) -> None:
        super().__init__(**uvicorn)
        self._visit, self._gone, self._rejected, self._admit = visit, gone, rejected, admit
        self._receive_seconds = receive_seconds
        self._receiving: asyncio.TimerHandle | None = None
        self._taking: asyncio.TimerHandle | None = None
        self._request_bytes = 0
        self._head_bytes = 0
        self._head_complete = False
        self._refusal = (400, "this is not HTTP/1.1")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self.transport.set_write_buffer_limits(1, 0)  # the application waits until its last piece is taken
        self._visit.leave, self._visit.begun = self.transport.abort, self._begun
        if not self._admit(transport):
            self._turn_away("certificate")
            return
        self._arm(self._receive_seconds - (time.monotonic() - self._visit.since))

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.resume_writing()
        self._gone(self._visit)
        super().connection_lost(exc)
        # No cycles of references: garbage is looked for every ten seconds only, and a flood makes much of it.
        for cycle, _ in self.pipeline:
            cycle.on_response = _nothing
        self.pipeline.clear()
        self._visit.leave, self._visit.begun = _nothing, bool

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._receiving is None:
            self._arm(self._receive_seconds)
        self._request_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing() or self._receiving is None:
            return
        if not self._answering() or self.cycle.more_body:
            self._wait()
        if not self._head_complete and self._request_bytes > MAX_HEAD_BYTES:
            self._refusal = TOO_LONG
            self.send_400_response("")
        elif self._request_bytes > MAX_REQUEST_BYTES:
            self._turn_away("oversize")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_complete, self._head_bytes = False, 0

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_complete:
            return  # a trailer: a proxy that filters headers has not seen it (RFC 9110, section 6.5.1)
        self._count_head(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def _count_head(self, count: int) -> None:
        self._head_bytes += count
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refusal = TOO_LONG
            raise HttpParserError("the headers are too long")

    def on_headers_complete(self) -> None:
        self._head_complete = True
        if not self.url.startswith(b"/") or self.parser.get_http_version() not in ("1.0", "1.1"):
            self._refusal = (400, UNDERSTOOD)
            raise HttpParserError(UNDERSTOOD)
        if len(self.pipeline) > MAX_PIPELINED:
            self._turn_away("pipelined")
            raise HttpParserError("too many requests at once")
        visit = self._visit
        self.scope["state"].update(
            uid=visit.uid, user=visit.user, reserved=visit.reserved, drop=partial(_drop, visit, self._rejected)
        )
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._disarm()
        self._head_complete, self._request_bytes = False, 0
        self._visit.turn("serving", time.monotonic())
        super().on_message_complete()

    def on_response_complete(self) -> None:
        unread = self._receiving is not None and self._head_complete and not self.pipeline
        super().on_response_complete()
        if unread:
            self.transport.close()  # answered before the body was there: the rest is not read
        elif not self.pipeline:
            self._visit.turn("idle" if self._receiving is None else "waiting", time.monotonic())

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._taking is None:
            self._taking = self.loop.call_later(TAKE_SECONDS, self._turn_away, "unread")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None

    def send_400_response(self, msg: str) -> None:
        """As a problem document. What is left of the connection is of no use."""
        if self.transport.is_closing():
            return
        self._rejected("malformed")
        status, detail = self._refusal
        body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
        content = json.dumps(body).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/problem+json\r\n"
            f"content-length: {len(content)}\r\nx-content-type-options: nosniff\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + content)
        self.transport.close()

    def _arm(self, seconds: float) -> None:
        self._receiving = self.loop.call_later(seconds, self._too_slow)

    def _wait(self) -> None:
        if self._visit.stage != "waiting":  # who said a little is not behind who said nothing yet
            self._visit.turn("waiting", time.monotonic())

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _begun(self) -> bool:
        return self.cycle is not None and self.cycle.response_started

    def _too_slow(self) -> None:
        self._receiving = None
        if self._head_complete or not self._answering():
            self._turn_away("slow")
        else:
            self.cycle.keep_alive = False  # the answer before is not to blame

    def _turn_away(self, reason: str) -> None:
        self._rejected(reason)
        self.transport.abort()

    def _disarm(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None


def _drop(visit: HttpPeer, rejected: Callable[[str], None]) -> None:
    rejected("unread")
    visit.leave()


def _nothing() -> None:
    pass
