"""Requests that a connection repeats byte by byte, as Prometheus does at each scrape.

The first one is parsed and passes all checks. If its answer depends only on the request, the connection and the web
configuration, the request's state then contains a `Repeat`, with which the HTTP protocol answers the same bytes without
parsing them again.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.types import Message, Scope, Send

from gpumond.api.auth import user
from gpumond.api.sending import FEW_ANSWERS, LARGE_PIECE_BYTES
from gpumond.api.unsent import Unsent

BODY, REPEAT = "body", "repeat"
"""Keys of the request's state: the function that returns the current body, and the `Repeat`."""

Body = Callable[[], bytes | None]


class Repeat:
    """The answer to a repeated request: the head of the first answer, and the current body.

    ``valid`` returns False if a repetition has to be checked again. ``unsent`` counts answers that are not yet read.
    """

    def __init__(self, scope: Scope, head: bytes, body: Body, valid: Callable[[], bool], unsent: Unsent) -> None:
        self._user, self._drop = user(scope), scope["state"].get("drop", lambda: None)
        self._head, self._body, self._valid, self._unsent = head, body, valid, unsent

    def answer(self, date: bytes) -> bytes | None:
        """Return the whole answer with header lines such as the date; None if the request has to be handled as a new
        one."""
        if not self._valid() or self._unsent.answers > FEW_ANSWERS:
            return None
        body = self._body()
        if body is None or len(body) > LARGE_PIECE_BYTES:
            return None
        return b"%b%bcontent-length: %d\r\n\r\n%b" % (self._head, date, len(body), body)

    def count_unread(self, answer: bytes) -> Callable[[], None]:
        """Count an answer that the reader does not accept at once, until the function that is returned is called."""
        sending = self._unsent.begin(self._user, answer, self._drop)
        return lambda: self._unsent.end(sending)


class HeadRecorder:
    """Records the head of a successful answer that is sent through ``send``."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.head: bytes | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            lines = [b"%b: %b\r\n" % line for line in message["headers"] if line[0].lower() != b"content-length"]
            self.head = b"HTTP/1.1 200 OK\r\n" + b"".join(lines)
        await self._send(message)


def offer(scope: Scope, body: Body) -> None:
    """State that the answer to this request may be repeated, with the body that ``body`` returns."""
    state: MutableMapping[str, Any] = scope.setdefault("state", {})
    state[BODY] = body
