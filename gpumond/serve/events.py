"""GET /api/v1/events: a stream of server-sent events, or the newest events as a list."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import TypeAdapter

from gpumond.events import Event, EventLog
from gpumond.facts.text import accepts
from gpumond.serve import examples
from gpumond.serve.dependencies import kernel_of
from gpumond.serve.streams import EVENTS, RETRY, EventStream

router = APIRouter(prefix="/api/v1", tags=["facts"])

HEARTBEAT_SECONDS = 15.0

EVENT: TypeAdapter[Event] = TypeAdapter(Event)

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
    event_log = kernel_of(request).events
    accept = request.headers.get("accept", "")
    last_id = request.headers.get("last-event-id", "")
    known_id = int(last_id) if last_id.isdecimal() and len(last_id) < 20 else None
    if accepts(accept, "application/json") and not accepts(accept, "text/event-stream"):
        return Response(EVENTS.dump_json(list(event_log.after(known_id or 0))), media_type="application/json")
    since = event_log.last_id if known_id is None else known_id
    return EventStream(request.scope, request.app.state, messages(event_log, since))


async def messages(
    event_log: EventLog, last_id: int, heartbeat_seconds: float = HEARTBEAT_SECONDS
) -> AsyncGenerator[bytes, None]:
    """Yield the kept events after ``last_id``, then new events as they are published.

    An event that is overwritten before it is sent is lost to this reader only.
    """
    yield RETRY
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
