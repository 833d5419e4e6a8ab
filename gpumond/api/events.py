"""GET /api/v1/events: a stream of server-sent events, or the newest events as a list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import TypeAdapter
from starlette.types import Message, Send

from gpumond.api import examples
from gpumond.api.auth import user
from gpumond.api.event_log import EventLog
from gpumond.api.shares import Shares
from gpumond.api.view import view_of
from gpumond.engine.events import Event
from gpumond.protocol.text import accepts

router = APIRouter(tags=["facts"])

HEARTBEAT_SECONDS = 15.0
SLOW_SECONDS = 30.0
"""Time without progress after which a reader is disconnected; it can resume with Last-Event-ID."""

MAX_STREAMS = 256
"""Limit of streams. Above it, the oldest stream of the user with the most streams ends; its reader may reconnect."""

RETRY_MILLISECONDS = 3000

EVENT: TypeAdapter[Event] = TypeAdapter(Event)
EVENTS: TypeAdapter[list[Event]] = TypeAdapter(list[Event])

_OK: dict[int | str, dict[str, Any]] = {
    200: {
        "model": list[Event],
        "content": {
            "application/json": {"example": EVENTS.dump_python([examples.EVENT], mode="json")},
            "text/event-stream": {
                "example": f"id: {examples.EVENT.id}\nevent: {examples.EVENT.kind}\n"
                f"data: {EVENT.dump_json(examples.EVENT).decode()}\n\n"
            },
        },
    }
}


@router.get("/events", summary="Stream or list of events", responses=_OK, response_model=None)
async def events(request: Request) -> Response:
    """Sends events as server-sent events, starting now or, with `Last-Event-ID`, after that event if it is among the
    newest 1000.

    With `Accept: application/json`, returns those 1000 as a list, newest last; with `Last-Event-ID`, only later ones.
    Above 256 streams, the oldest stream of the user with the most streams ends.
    """
    event_log = view_of(request).events
    accept = request.headers.get("accept", "")
    last_id = request.headers.get("last-event-id", "")
    known_id = int(last_id) if last_id.isdecimal() and len(last_id) < 20 else None
    if accepts(accept, "application/json") and not accepts(accept, "text/event-stream"):
        return Response(EVENTS.dump_json(list(event_log.after(known_id or 0))), media_type="application/json")
    since = event_log.last_id if known_id is None else known_id
    state = request.app.state
    return EventStream(event_log, since, state.event_streams, user(request.scope), state.slow_seconds)


class EventStream(StreamingResponse):
    """Stream that reads the log at its own pace; an event that is overwritten before it is sent is lost to this
    reader only."""

    def __init__(
        self, event_log: EventLog, last_id: int, streams: Shares[EventStream], user: str, slow_seconds: float
    ) -> None:
        super().__init__(
            messages(event_log, last_id), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )
        self._streams, self._user, self._slow_seconds = streams, user, slow_seconds
        self._ended = False

    def end(self) -> None:
        """End the stream. Its reader may reconnect, and resumes with Last-Event-ID."""
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


async def messages(
    event_log: EventLog, last_id: int, heartbeat_seconds: float = HEARTBEAT_SECONDS
) -> AsyncGenerator[bytes, None]:
    """Yield the kept events after ``last_id``, then new events as they are published."""
    yield f"retry: {RETRY_MILLISECONDS}\n\n".encode()
    while True:
        if last_id < event_log.before_id:
            last_id = event_log.before_id
            yield b": some events are no longer kept\n\n"
        for event in event_log.after(last_id):
            last_id = event.id
            data = EVENT.dump_json(event).decode()
            yield f"id: {event.id}\nevent: {event.kind}\ndata: {data}\n\n".encode()
        if not await event_log.wait(heartbeat_seconds):
            yield b": alive\n\n"
