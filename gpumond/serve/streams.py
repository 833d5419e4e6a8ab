"""Responses that are streams of server-sent events. Each is limited by user, and ends if its reader is too slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

from pydantic import TypeAdapter
from starlette.datastructures import State
from starlette.responses import StreamingResponse
from starlette.types import Message, Scope, Send

from gpumond.events import Event
from gpumond.serve.auth import user
from gpumond.serve.limits import Shares

SLOW_SECONDS = 30.0
"""Time without progress after which a reader is disconnected; it can connect again."""

MAX_STREAMS = 256
"""Limit of streams. Above it, the oldest stream of the user with the most streams ends; its reader may reconnect."""

RETRY_MILLISECONDS = 3000
RETRY = f"retry: {RETRY_MILLISECONDS}\n\n".encode()
"""First message of each stream."""
EVENTS: TypeAdapter[list[Event]] = TypeAdapter(list[Event])


class EventStream(StreamingResponse):
    """Stream of ``content`` to the reader that made the request ``scope``. ``state``: that of the application."""

    media_type = "text/event-stream"

    def __init__(
        self, scope: Scope, state: State, content: AsyncIterator[bytes], headers: Mapping[str, str] = {}
    ) -> None:
        super().__init__(content, headers={"Cache-Control": "no-store"} | dict(headers))
        self._streams: Shares[EventStream] = state.event_streams
        self._user, self._slow_seconds = user(scope), state.slow_seconds
        self._ended = False

    def end(self) -> None:
        """End the stream. Its reader may reconnect."""
        self._streams.remove(self._user, self)
        self._ended = True
        self._task.cancel()

    async def stream_response(self, send: Send) -> None:
        async def in_time(message: Message) -> None:
            await asyncio.wait_for(send(message), self._slow_seconds)

        if not self._streams.admits(self._user):
            self._streams.holders(self._streams.users()[0])[0].end()
        self._streams.add(self._user, self)
        self._task = asyncio.ensure_future(super().stream_response(in_time))
        with suppress(asyncio.TimeoutError):  # the server closes the connection
            try:
                await self._task
            except asyncio.CancelledError:
                if not self._ended:
                    raise
                await in_time({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                self._streams.remove(self._user, self)
