"""uvicorn's HTTP/1.1 protocol with absolute deadlines, which it lacks, and bounded bytes for slow readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from httptools import HttpParserError
from starlette.types import Message, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpumond.config.web_file import certificate_subjects
from gpumond.serve.authentication import counted_user
from gpumond.serve.limits import SharedResource
from gpumond.serve.listener import HttpPeer
from gpumond.serve.responses import problem

RECEIVE_TIMEOUT_SECONDS = 10.0
DRAIN_TIMEOUT_SECONDS = 30.0
MAX_HEAD_BYTES = 32 * 1024
MAX_REQUEST_BYTES = 1 << 20
"""As sent: with chunks, their extensions and trailers. The application bounds the body itself."""
MAX_PIPELINED = 8
"""Requests that wait for the answer to the previous one. Each is parsed, and so takes some KiB."""
UNSUPPORTED_REQUEST = "only HTTP/1.0 and 1.1 are supported, and targets that begin with /"

TOO_LONG = (431, f"the headers are longer than {MAX_HEAD_BYTES} bytes")


class HttpProtocol(HttpToolsProtocol):
    """One connection. ``accepts_certificate`` may refuse its TLS certificate; ``on_close`` is called at its end."""

    def __init__(
        self,
        peer: HttpPeer,
        on_close: Callable[[HttpPeer], None],
        count_rejection: Callable[[str], None],
        accepts_certificate: Callable[[asyncio.BaseTransport], bool],
        receive_seconds: float = RECEIVE_TIMEOUT_SECONDS,
        **uvicorn: Any,
    ) -> None:
        super().__init__(**uvicorn)
        self._peer, self._on_close, self._count_rejection, self._accepts_certificate = (
            peer,
            on_close,
            count_rejection,
            accepts_certificate,
        )
        self._receive_seconds = receive_seconds
        self._receive_timer: asyncio.TimerHandle | None = None
        self._drain_timer: asyncio.TimerHandle | None = None
        self._request_bytes = 0
        self._head_bytes = 0
        self._head_complete = False
        self._refusal = (400, "this isn't HTTP/1.1")
        self._subjects: frozenset[str] = frozenset()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self.transport.set_write_buffer_limits(1, 0)  # the application waits until its last piece is read
        self._peer.close, self._peer.has_response_started = self.transport.abort, self._has_response_started
        if not self._accepts_certificate(transport):
            self._reject("certificate")
            return
        self._subjects = certificate_subjects(transport.get_extra_info("peercert"))
        self._start_receive_timer(self._receive_seconds - (time.monotonic() - self._peer.since))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_receive_timer()
        self.resume_writing()
        self._on_close(self._peer)
        super().connection_lost(exc)
        # Break reference cycles: a flood of connections makes much garbage before the next collection.
        for cycle, _ in self.pipeline:
            cycle.on_response = _do_nothing
        self.pipeline.clear()
        self._peer.close, self._peer.has_response_started = _do_nothing, bool

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._receive_timer is None:
            self._start_receive_timer(self._receive_seconds)
        self._request_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing() or self._receive_timer is None:
            return
        if not self._is_answering() or self.cycle.more_body:
            self._enter_waiting()
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
            self._refusal = (400, UNSUPPORTED_REQUEST)
            raise HttpParserError(UNSUPPORTED_REQUEST)
        if len(self.pipeline) > MAX_PIPELINED:
            self._reject("pipelined")
            raise HttpParserError("too many requests at once")
        peer = self._peer
        self.scope["state"].update(
            uid=peer.uid,
            user=peer.user,
            reserved=peer.reserved,
            subjects=self._subjects,
            drop=partial(_drop, peer, self._count_rejection),
        )
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_receive_timer()
        self._head_complete, self._request_bytes = False, 0
        self._peer.enter("serving" if self._is_answering() else "idle", time.monotonic())
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline:  # without its body the request is still awaited, or its sender would miss the answer
            self._peer.enter("idle" if self._receive_timer is None else "waiting", time.monotonic())

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._drain_timer is None:
            self._drain_timer = self.loop.call_later(DRAIN_TIMEOUT_SECONDS, self._reject, "unread")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None

    def send_400_response(self, msg: str) -> None:
        """Answer with a problem document, and close the connection."""
        if self.transport.is_closing():
            return
        self._count_rejection("malformed")
        status, detail = self._refusal
        content = bytes(problem(status, detail).body)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/problem+json\r\n"
            f"content-length: {len(content)}\r\nx-content-type-options: nosniff\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + content)
        self.transport.close()

    def _start_receive_timer(self, seconds: float) -> None:
        self._receive_timer = self.loop.call_later(seconds, self._on_timeout)

    def _enter_waiting(self) -> None:
        if self._peer.stage != "waiting":  # a partial request does not move behind connections that sent nothing
            self._peer.enter("waiting", time.monotonic())

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _has_response_started(self) -> bool:
        return self.cycle is not None and self.cycle.response_started

    def _on_timeout(self) -> None:
        self._receive_timer = None
        if self._head_complete or not self._is_answering():
            self._reject("slow")
        else:
            self.cycle.keep_alive = False  # the previous answer is still sent

    def _reject(self, reason: str) -> None:
        self._count_rejection(reason)
        self.transport.abort()

    def _stop_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None


def _drop(peer: HttpPeer, count_rejection: Callable[[str], None]) -> None:
    count_rejection("unread")
    peer.close()


def _do_nothing() -> None:
    pass


MAX_UNSENT_BYTES = 32 << 20
MAX_UNSENT_BYTES_OF_USER = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class UnsentResponse:
    """One answer to one reader. ``drop`` closes the connection."""

    user: str
    body: bytes
    drop: Callable[[], object]


class UnsentResponses:
    """Limits the queued bytes, in total and of each user. A body shared by several responses is counted once.

    Above a limit, the user with the most bytes loses the readers of its oldest body. The newest body is always sent,
    because a response larger than the limit could otherwise never be read.
    """

    def __init__(self, max_bytes: int = MAX_UNSENT_BYTES, max_bytes_of_user: int = MAX_UNSENT_BYTES_OF_USER) -> None:
        self._max_bytes = max_bytes
        self._bodies: SharedResource[int] = SharedResource(max_bytes, max_bytes_of_user)
        self._readers: dict[tuple[str, int], dict[UnsentResponse, None]] = {}
        self._user_counts: dict[int, int] = {}
        self.bytes = self.response_count = 0

    def begin(self, user: str, body: bytes, drop: Callable[[], object]) -> UnsentResponse:
        """Count a response until ``end``; drop others if they exceed a limit."""
        response = UnsentResponse(user, body, drop)
        readers = self._readers.setdefault((user, id(body)), {})
        if not readers:
            self._bodies.add(user, id(body), len(body))
            self._user_counts[id(body)] = self._user_counts.get(id(body), 0) + 1
            self.bytes += len(body) if self._user_counts[id(body)] == 1 else 0
        readers[response] = None
        self.response_count += 1
        self._make_room(user, id(body))
        return response

    def end(self, response: UnsentResponse) -> None:
        """Stop counting a response that has been sent or dropped."""
        key = response.user, id(response.body)
        readers = self._readers.get(key, {})
        if readers.pop(response, response) is None:
            self.response_count -= 1
            if not readers:
                self._remove_body(*key, len(response.body))

    def _make_room(self, user: str, newest: int) -> None:
        while self._bodies.used_by(user) > self._bodies.per_user and self._drop_oldest(user, newest):
            pass
        while self.bytes > self._max_bytes and any(self._drop_oldest(other, newest) for other in self._bodies.users()):
            pass

    def _drop_oldest(self, user: str, newest: int) -> bool:
        body_id = next((body_id for body_id in self._bodies.claims(user) if body_id != newest), None)
        if body_id is None:
            return False
        for response in tuple(self._readers[user, body_id]):
            self.end(response)
            response.drop()
        return True

    def _remove_body(self, user: str, body_id: int, size: int) -> None:
        del self._readers[user, body_id]
        self._bodies.remove(user, body_id)
        self._user_counts[body_id] -= 1
        if not self._user_counts[body_id]:
            del self._user_counts[body_id]
            self.bytes -= size


PIECE_BYTES = 16 * 1024
"""Size of a piece. The transport copies what the kernel does not accept at once, and thus at most one piece."""
LARGE_PIECE_BYTES = 128 * 1024
FEW_RESPONSES = 16
"""Up to this number of answers in progress, large pieces are sent: each piece costs processor time."""


def in_pieces(scope: Scope, send: Send, unsent: UnsentResponses) -> Send:
    """Split bodies into pieces; each is sent when the previous one has been accepted."""
    drop = (scope.get("state") or {}).get("drop", lambda: None)

    async def send_in_pieces(message: Message) -> None:
        body: bytes = message.get("body", b"")
        if len(body) <= PIECE_BYTES:
            await send(message)
            return
        view, has_more = memoryview(body), message.get("more_body", False)
        response = unsent.begin(counted_user(scope), body, drop)
        try:
            end = 0
            while end < len(body):
                start, size = end, LARGE_PIECE_BYTES if unsent.response_count <= FEW_RESPONSES else PIECE_BYTES
                end += size
                await send({**message, "body": view[start:end], "more_body": has_more or end < len(body)})
        finally:
            unsent.end(response)

    return send_in_pieces


def without_body(send: Send) -> Send:
    """End the response after its headers; the server reports the end to the producer of the body."""

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_head
