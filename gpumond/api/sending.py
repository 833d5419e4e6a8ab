"""Response sending in pieces, and responses to HEAD."""

from __future__ import annotations

from starlette.types import Message, Scope, Send

from gpumond.api.auth import user
from gpumond.api.unsent import Unsent

PIECE_BYTES = 16 * 1024
"""Size of a piece. The transport copies what the kernel does not accept at once, and thus at most one piece."""
LARGE_PIECE_BYTES = 128 * 1024
FEW_ANSWERS = 16
"""Up to this number of answers in progress, large pieces are sent: each piece costs processor time."""


def in_pieces(scope: Scope, send: Send, unsent: Unsent) -> Send:
    """Split bodies into pieces; each is sent when the previous one has been accepted."""
    drop = (scope.get("state") or {}).get("drop", lambda: None)

    async def send_in_pieces(message: Message) -> None:
        body: bytes = message.get("body", b"")
        if len(body) <= PIECE_BYTES:
            await send(message)
            return
        view, more = memoryview(body), message.get("more_body", False)
        sending = unsent.begin(user(scope), body, drop)
        try:
            end = 0
            while end < len(body):
                start, size = end, LARGE_PIECE_BYTES if unsent.answers <= FEW_ANSWERS else PIECE_BYTES
                end += size
                await send({**message, "body": view[start:end], "more_body": more or end < len(body)})
        finally:
            unsent.end(sending)

    return send_in_pieces


def without_body(send: Send) -> Send:
    """End the response after its headers; the server reports the end to the producer of the body."""

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_head
