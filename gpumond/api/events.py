"""GET /api/v1/events: what happened, as it happens (server-sent events), or the newest as a list."""

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
from gpumond.engine.events import Event

router = APIRouter(tags=["facts"])

HEARTBEAT_SECONDS = 15.0
SLOW_SECONDS = 30.0
"""A reader that takes nothing for so long is let go; with Last-Event-ID it goes on where it was."""

MAX_STREAMS = 256
"""In all. Beyond it the oldest stream of the user with most streams ends, and its reader may come again."""

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


@router.get("/events", summary="What happened, as it happens", responses=_OK, response_model=None)
async def events(request: Request) -> Response:
    """Server-sent events, from now on or, with `Last-Event-ID`, from where the reader was, as far as the newest 1000
    reach. With `Accept: application/json` those 1000 as a list, newest last; with `Last-Event-ID` too, only those
    after it. Of more than 256 streams the oldest of the user with most streams ends.
    """
    ring: EventLog = request.app.state.view.events
    accept = request.headers.get("accept", "")
    last_id = request.headers.get("last-event-id", "")
    known = int(last_id) if last_id.isdecimal() and len(last_id) < 20 else None
    if "application/json" in accept and "text/event-stream" not in accept:
        return Response(EVENTS.dump_json(list(ring.after(known or 0))), media_type="application/json")
    since = ring.last_id if known is None else known
    state = request.app.state
    return EventStream(ring, since, state.event_streams, user(request.scope), state.slow_seconds)


class EventStream(StreamingResponse):
    """Reads the ring at its own pace: what is overwritten before it is sent is lost to this reader alone."""

    def __init__(
        self, ring: EventLog, last_id: int, streams: Shares[EventStream], user: str, slow_seconds: float
    ) -> None:
        super().__init__(frames(ring, last_id), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._streams, self._user, self._slow_seconds = streams, user, slow_seconds
        self._ended = False

    def end(self) -> None:
        """Its reader may come again, and with Last-Event-ID goes on where it was."""
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


async def frames(
    ring: EventLog, last_id: int, heartbeat_seconds: float = HEARTBEAT_SECONDS
) -> AsyncGenerator[bytes, None]:
    """What happened after ``last_id``, then what happens."""
    yield f"retry: {RETRY_MILLISECONDS}\n\n".encode()
    while True:
        if last_id < ring.before_id:
            last_id = ring.before_id
            yield b": some events are no longer kept\n\n"
        for event in ring.after(last_id):
            last_id = event.id
            data = EVENT.dump_json(event).decode()
            yield f"id: {event.id}\nevent: {event.kind}\ndata: {data}\n\n".encode()
        if not await ring.wait(heartbeat_seconds):
            yield b": alive\n\n"
