"""uvicorn's HTTP/1.1 protocol with absolute deadlines, which uvicorn itself lacks.

A request, headers and body, arrives within ten seconds of its first byte, and an answer is read within thirty; else
the connection is closed. Only the origin form of a target is accepted, so that the Host header alone names the host.

`HttpProtocol` overrides methods of uvicorn that are not part of its public interface. ``check_contract`` compares them
at import; pyproject.toml bounds the version.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import uvicorn
from httptools import HttpParserError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpumond.config.tls import certificate_subjects
from gpumond.daemon.listener import HttpPeer

RECEIVE_SECONDS = 10.0
TAKE_SECONDS = 30.0
MAX_HEAD_BYTES = 32 * 1024
MAX_REQUEST_BYTES = 1 << 20
"""As sent: with chunks, their extensions and trailers. The application bounds the body itself."""
MAX_PIPELINED = 8
"""Requests that wait for the answer to the previous one. Each is parsed, and so takes some KiB."""
UNDERSTOOD = "only HTTP/1.0 and 1.1 are supported, and targets that begin with /"

TOO_LONG = (431, f"the headers are longer than {MAX_HEAD_BYTES} bytes")


CONTRACT = {
    "connection_made": ("transport",),
    "connection_lost": ("exc",),
    "data_received": ("data",),
    "pause_writing": (),
    "resume_writing": (),
    "on_message_begin": (),
    "on_url": ("url",),
    "on_header": ("name", "value"),
    "on_headers_complete": (),
    "on_message_complete": (),
    "on_response_complete": (),
    "send_400_response": ("msg",),
}
"""The methods that `HttpProtocol` overrides, and their parameters."""


def check_contract(protocol: type, version: str) -> None:
    """Raise ImportError if ``protocol`` lacks a method of ``CONTRACT``, or has it with other parameters."""
    for name, expected in CONTRACT.items():
        method = getattr(protocol, name, None)
        found = tuple(inspect.signature(method).parameters)[1:] if method is not None else None
        if found != expected:
            state = "is missing" if found is None else f"takes ({', '.join(found)}), not ({', '.join(expected)})"
            raise ImportError(
                f"uvicorn {version}: {protocol.__name__}.{name} {state}; "
                "install the version of uvicorn that gpumond requires: pip install 'gpumond[daemon]'"
            )


check_contract(HttpToolsProtocol, uvicorn.__version__)


class HttpProtocol(HttpToolsProtocol):
    """One connection. ``admit`` may refuse it by its TLS certificate; ``gone`` is called at its end."""

    def __init__(
        self,
        peer: HttpPeer,
        gone: Callable[[HttpPeer], None],
        rejected: Callable[[str], None],
        admit: Callable[[asyncio.BaseTransport], bool],
        receive_seconds: float = RECEIVE_SECONDS,
        **uvicorn: Any,
    ) -> None:
        super().__init__(**uvicorn)
        self._peer, self._gone, self._rejected, self._admit = peer, gone, rejected, admit
        self._receive_seconds = receive_seconds
        self._receiving: asyncio.TimerHandle | None = None
        self._taking: asyncio.TimerHandle | None = None
        self._request_bytes = 0
        self._head_bytes = 0
        self._head_complete = False
        self._refusal = (400, "this is not HTTP/1.1")
        self._subjects: frozenset[str] = frozenset()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self.transport.set_write_buffer_limits(1, 0)  # the application waits until its last piece is read
        self._peer.close, self._peer.begun = self.transport.abort, self._begun
        if not self._admit(transport):
            self._reject("certificate")
            return
        self._subjects = certificate_subjects(transport.get_extra_info("peercert"))
        self._arm(self._receive_seconds - (time.monotonic() - self._peer.since))

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.resume_writing()
        self._gone(self._peer)
        super().connection_lost(exc)
        # Break reference cycles: a flood of connections makes much garbage before the next collection.
        for cycle, _ in self.pipeline:
            cycle.on_response = _nothing
        self.pipeline.clear()
        self._peer.close, self._peer.begun = _nothing, bool

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
            self._reject("oversize")

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
            self._reject("pipelined")
            raise HttpParserError("too many requests at once")
        peer = self._peer
        self.scope["state"].update(
            uid=peer.uid,
            user=peer.user,
            reserved=peer.reserved,
            subjects=self._subjects,
            drop=partial(_drop, peer, self._rejected),
        )
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._disarm()
        self._head_complete, self._request_bytes = False, 0
        self._peer.enter("serving", time.monotonic())
        super().on_message_complete()

    def on_response_complete(self) -> None:
        unread = self._receiving is not None and self._head_complete and not self.pipeline
        super().on_response_complete()
        if unread:
            self.transport.close()  # answered before the body had arrived: the rest is not read
        elif not self.pipeline:
            self._peer.enter("idle" if self._receiving is None else "waiting", time.monotonic())

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._taking is None:
            self._taking = self.loop.call_later(TAKE_SECONDS, self._reject, "unread")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None

    def send_400_response(self, msg: str) -> None:
        """Answer with a problem document, and close the connection."""
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
        if self._peer.stage != "waiting":  # a partial request does not move behind connections that sent nothing
            self._peer.enter("waiting", time.monotonic())

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _begun(self) -> bool:
        return self.cycle is not None and self.cycle.response_started

    def _too_slow(self) -> None:
        self._receiving = None
        if self._head_complete or not self._answering():
            self._reject("slow")
        else:
            self.cycle.keep_alive = False  # the previous answer is still sent

    def _reject(self, reason: str) -> None:
        self._rejected(reason)
        self.transport.abort()

    def _disarm(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None


def _drop(peer: HttpPeer, rejected: Callable[[str], None]) -> None:
    rejected("unread")
    peer.close()


def _nothing() -> None:
    pass
