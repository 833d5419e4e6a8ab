"""Streams of server-sent events: frames, whose messages are encoded once for all readers, and events."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import count
from operator import attrgetter
from typing import Any, TypedDict

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import TypeAdapter
from pydantic_core import to_json
from starlette.datastructures import State
from starlette.types import Message, Scope, Send

from gpumond.core import Core
from gpumond.events import Event, EventLog
from gpumond.facts.frame import Frame, FullFrame
from gpumond.facts.units import accepts
from gpumond.host.tasks import Broadcast
from gpumond.serve import examples
from gpumond.serve.authentication import counted_user
from gpumond.serve.full_frame import full_frame
from gpumond.serve.identity import Tenant, tenant_frame
from gpumond.serve.limits import SharedResource
from gpumond.serve.resources import EXAMPLE_FRAME, tenant_of
from gpumond.serve.routes import BODY_TYPE_KEY, core_of, json_response, problem_responses, require_frame

READER_TIMEOUT_SECONDS = 30.0
"""Time without progress after which a reader is disconnected; it can connect again."""

MAX_STREAMS = 256
"""Limit of streams. Above it, the oldest stream of the user with the most streams ends; its reader may reconnect."""

RETRY_MILLISECONDS = 3000
RETRY = f"retry: {RETRY_MILLISECONDS}\n\n".encode()
"""First message of each stream."""
EVENTS_ADAPTER: TypeAdapter[list[Event]] = TypeAdapter(list[Event])


class EventStream(StreamingResponse):
    """Stream of ``content`` to the reader that made the request ``scope``. ``state``: that of the application."""

    media_type = "text/event-stream"

    def __init__(
        self, scope: Scope, state: State, content: AsyncIterator[bytes], headers: Mapping[str, str] = {}
    ) -> None:
        super().__init__(content, headers={"Cache-Control": "no-store"} | dict(headers))
        self._streams: SharedResource[EventStream] = state.event_streams
        self._user, self._reader_timeout_seconds = counted_user(scope), state.reader_timeout_seconds
        self._ended = False

    def end(self) -> None:
        """End the stream. Its reader may reconnect."""
        self._streams.remove(self._user, self)
        self._ended = True
        self._task.cancel()

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            await asyncio.wait_for(send(message), self._reader_timeout_seconds)

        if not self._streams.admits(self._user):
            self._streams.claims(self._streams.users()[0])[0].end()
        self._streams.add(self._user, self)
        self._task = asyncio.ensure_future(super().stream_response(send_in_time))
        with suppress(asyncio.TimeoutError):  # the server closes the connection
            try:
                await self._task
            except asyncio.CancelledError:
                if not self._ended:
                    raise
                await send_in_time({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                self._streams.remove(self._user, self)


HEARTBEAT_SECONDS = 2.0
"""Maximum time between two messages. A reader that receives none for longer knows that the daemon does not answer."""
MAX_KEPT_MESSAGES = 32
"""Number of messages that a slow reader can still receive. One that needs older ones receives a complete frame."""
EVENTS_SENT = 200
"""Number of events that a complete frame contains, the newest."""
GZIP_LEVEL, FRAME_GZIP_LEVEL = 6, 3
"""Compression of changes, which are many, and of a complete frame, whose reader waits for it."""
GZIP_HEADER = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"

FULL_FRAME_ADAPTER = TypeAdapter(FullFrame)


@dataclass(frozen=True, slots=True)
class LiveMessage:
    """``compressed``: complete deflate blocks that refer to no earlier ones, so they fit into any stream."""

    number: int
    plain: bytes
    compressed: bytes


class FrameStream:
    """The messages of all streams. Nothing is computed or kept while there is no reader."""

    def __init__(self, core: Core, heartbeat_seconds: float = HEARTBEAT_SECONDS) -> None:
        self._core, self._heartbeat_seconds = core, heartbeat_seconds
        self._readers = 0
        self._has_readers, self._published = asyncio.Event(), Broadcast()
        self._encoding = asyncio.Lock()
        self.number = 0
        """Number of the newest message."""
        self._forget()

    def _forget(self) -> None:
        self._frame: Frame | None = None
        self._full_frame: FullFrame | None = None
        self._frame_message: LiveMessage | None = None
        """The complete frame, if a reader has needed it."""
        self._kept_messages: deque[LiveMessage] = deque(maxlen=MAX_KEPT_MESSAGES)
        self._last_event = 0

    async def run(self) -> None:
        """Write a message for each frame while there are readers. Does not return."""
        while True:
            await self._has_readers.wait()
            if self._core.frame is self._frame and not await self._core.await_frame(self._heartbeat_seconds):
                self._publish(_compressed_message(self.number + 1, b": alive\n\n"))
            else:
                await self._advance()

    async def messages(self, compressed: bool) -> AsyncGenerator[bytes, None]:
        """Yield the parts of one stream."""
        self._readers += 1
        self._has_readers.set()
        try:
            yield GZIP_HEADER + RETRY_MESSAGE.compressed if compressed else RETRY_MESSAGE.plain
            number = -1
            while True:
                for message in await self._messages_after(number):
                    number = message.number
                    yield message.compressed if compressed else message.plain
                if number == self.number:
                    await self._published.wait()
        finally:
            self._readers -= 1
            if not self._readers:
                self._has_readers.clear()
                self._forget()

    async def _messages_after(self, number: int) -> Iterable[LiveMessage]:
        """Return the messages that follow ``number``; the complete frame if these are no longer kept."""
        if self._kept_messages and self._kept_messages[0].number - 1 <= number:
            return [message for message in self._kept_messages if message.number > number]
        async with self._encoding:
            if self._full_frame is None:
                self._start_from(self._core.frame)
            if self._frame_message is None and self._full_frame is not None:
                newest = self._core.events.newest()[-EVENTS_SENT:]
                events = EVENTS_ADAPTER.dump_json([event for event in newest if event.id <= self._last_event])
                self._frame_message = encode_message(
                    self.number, "frame", FULL_FRAME_ADAPTER.dump_json(self._full_frame), events
                )
            return [replace(self._frame_message, number=self.number)] if self._frame_message else []

    async def _advance(self) -> None:
        async with self._encoding:
            before, last_event = self._full_frame, self._last_event
            self._start_from(self._core.frame)
            if before is None or self._full_frame is None:
                return
            events: list[Event] = [e for e in self._core.events.after(last_event) if e.id <= self._last_event]
            found = frame_changes(before, self._full_frame)
            body = to_json(found, inf_nan_mode="null")
            message = encode_message(self.number + 1, "changes", body, EVENTS_ADAPTER.dump_json(events))
            self._publish(message)

    def _start_from(self, frame: Frame | None) -> None:
        self._frame, self._frame_message = frame, None
        self._full_frame = live_frame(full_frame(frame)) if frame else None
        self._last_event = self._core.events.last_id

    def _publish(self, message: LiveMessage) -> None:
        self.number = message.number
        self._kept_messages.append(message)
        self._published.send()


def encode_message(number: int, kind: str, body: bytes, events: bytes) -> LiveMessage:
    """Return a message: an object's JSON with ``events`` added."""
    plain = b"".join((f"event: {kind}\ndata: ".encode(), body[:-1], b',"events":', events, b"}\n\n"))
    return _compressed_message(number, plain, FRAME_GZIP_LEVEL if kind == "frame" else GZIP_LEVEL)


def _compressed_message(number: int, plain: bytes, level: int = GZIP_LEVEL) -> LiveMessage:
    packer = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
    return LiveMessage(number, plain, packer.compress(plain) + packer.flush(zlib.Z_SYNC_FLUSH))


RETRY_MESSAGE = _compressed_message(0, RETRY)


PROCESS_KEY = ("pid", "start_ticks")
TABLE_KEYS = {
    "snapshot.devices": ("uuid",),
    "snapshot.reports": PROCESS_KEY,
    "ledger.lines": ("device_uuid", "share", "workload", *PROCESS_KEY),
    "processes": ("device_uuid", *PROCESS_KEY),
    "verdicts": ("device_uuid", "kind", *PROCESS_KEY),
    "alerts": ("rule", "labels", *PROCESS_KEY),
}
"""The fields that identify a row of each table, by the path of the table in a frame."""
ROUNDED_FIELD = "idle_seconds"
"""The field whose changes are sent in whole seconds, rounded down: it would otherwise change in each frame."""
FRAME_PARTS = ("snapshot", "ledger")
"""Parts of a frame whose fields are compared one by one."""


class TableChanges(TypedDict, total=False):
    """``rows``: for each row now its place before, -1 for a new one; absent if the rows and their order are the same.
    ``added``: the new rows. ``cells``: by path in a row (``sensors.power_watts``), the places of the rows now and their
    values.
    """

    rows: list[int]
    added: list[Any]
    cells: dict[str, tuple[list[int], list[Any]]]


@dataclass(frozen=True, slots=True)
class FrameChanges:
    """``values``: by path, the values that are in no table. ``tables``: by path."""

    values: dict[str, Any]
    tables: dict[str, TableChanges]


def live_frame(frame: FullFrame) -> FullFrame:
    """Return a frame without the driver's lists of processes, the ledger's lines of processes and the agents' reports:
    ``processes`` has what a table shows of them. The reports of workloads that it doesn't contain stay.
    """
    devices = (
        device if device.processes is None else replace(device, processes=()) for device in frame.snapshot.devices
    )
    lines = tuple(line for line in frame.ledger.lines if line.pid is None)
    listed = {process.workload for process in frame.processes}
    reports = tuple(report for report in frame.snapshot.reports if report.workload not in listed)
    snapshot = replace(frame.snapshot, devices=tuple(devices), reports=reports)
    return replace(frame, snapshot=snapshot, ledger=replace(frame.ledger, lines=lines))


def frame_changes(before: FullFrame, after: FullFrame) -> FrameChanges:
    """Return what makes ``after`` of ``before``."""
    values: dict[str, Any] = {}
    for part in ("", *FRAME_PARTS):
        old, new = (attrgetter(part)(frame) if part else frame for frame in (before, after))
        for field in fields(new):
            path = f"{part}.{field.name}" if part else field.name
            value = getattr(new, field.name)
            if path not in TABLE_KEYS and path not in FRAME_PARTS and value != getattr(old, field.name):
                values[path] = value
    tables: dict[str, TableChanges] = {}
    for path, key in TABLE_KEYS.items():
        if found := _table_changes(attrgetter(path)(before), attrgetter(path)(after), attrgetter(*key)):
            tables[path] = found
    return FrameChanges(values, tables)


def _table_changes(before: Sequence[Any], after: Sequence[Any], key: Callable[[Any], Any]) -> TableChanges:
    found = TableChanges()
    keys_before, keys_after = [*map(key, before)], [*map(key, after)]
    pairs: Iterable[tuple[int, Any, Any]] = zip(count(), before, after, strict=False)
    if keys_before != keys_after:
        indexes = {each: index for index, each in enumerate(keys_before)}
        are_unique = len(indexes) == len(keys_before) and len(set(keys_after)) == len(keys_after)
        rows = [indexes.get(each, -1) if are_unique else -1 for each in keys_after]
        found["rows"] = rows
        found["added"] = [row for row, index in zip(after, rows, strict=True) if index < 0]
        pairs = ((position, before[index], after[position]) for position, index in enumerate(rows) if index >= 0)
    cells: dict[str, tuple[list[int], list[Any]]] = {}
    for position, old, new in pairs:
        if old is not new and old != new:
            for path, value in _differences(old, new):
                changed = cells.setdefault(path, ([], []))
                changed[0].append(position)
                changed[1].append(value)
    if cells:
        found["cells"] = cells
    return found


def _differences(before: Any, after: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each field of a dataclass that differs, and of those of its objects."""
    for field in fields(after):
        name, old, new = field.name, getattr(before, field.name), getattr(after, field.name)
        if name == ROUNDED_FIELD and old is not None and new is not None:
            old, new = int(old), int(new)
        if old == new:
            continue
        if type(old) is type(new) and is_dataclass(new):
            yield from _differences(old, new, f"{prefix}{name}.")
        else:
            yield prefix + name, new


router = APIRouter(prefix="/api/v1", tags=["facts"])

_LIVE_OK: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Messages `frame` and `changes`",
        "content": {
            "text/event-stream": {
                "example": f"event: frame\ndata: {FULL_FRAME_ADAPTER.dump_json(EXAMPLE_FRAME).decode()[:-1]},"
                f'"events":{EVENTS_ADAPTER.dump_json([examples.EVENT]).decode()}}}\n\n'
            }
        },
    },
}


@router.get(
    "/live", summary="Stream of frames", response_class=StreamingResponse, responses=_LIVE_OK | problem_responses(503)
)
async def live(request: Request) -> Response:
    """Sends the current frame as a `frame` message, then one `changes` message for each later frame.

    `frame` is the response of `/frame`, with the latest `events`. The processes that the driver lists are only in the
    `processes` table, `ledger.lines` contains only memory without a process, and `reports` only workloads without GPU
    memory. `/agents/PID` returns one process's report.

    A `changes` message contains `values` (by path in the frame, the values that replace the previous ones), `tables`
    (by path) and the new `events`. In a table, `rows` has each row's index in the previous table, or -1 for the next
    row of `added`; it's absent if no row has moved. `cells` has, by path in a row, two lists: indexes of rows in the
    new table, and their new values.

    If you read too slowly, you get a `frame` again.
    """
    state, tenant = request.app.state, tenant_of(request)
    require_frame(state.core.frame)
    compressed = accepts(request.headers.get("accept-encoding", ""), "gzip")
    headers = {"Vary": "Accept-Encoding"} | ({"Content-Encoding": "gzip"} if compressed else {})
    content = None if tenant is None else tenant_messages(state.core, tenant, compressed)
    return EventStream(request.scope, state, content or state.live.messages(compressed), headers)


async def tenant_messages(core: Core, tenant: Tenant, compressed: bool) -> AsyncGenerator[bytes, None]:
    """Yield the parts of a tenant's stream: its part of each frame as a complete frame, without events."""
    yield GZIP_HEADER + RETRY_MESSAGE.compressed if compressed else RETRY_MESSAGE.plain
    sent, name = None, f"live {tenant} {compressed}"
    while True:
        if core.frame is not None and core.frame is not sent:
            sent = core.frame
            if name not in core.responses:
                frame = live_frame(full_frame(tenant_frame(sent, tenant)))
                message = encode_message(0, "frame", FULL_FRAME_ADAPTER.dump_json(frame), b"[]")
                core.responses[name] = message.compressed if compressed else message.plain
            yield core.responses[name]
        elif not await core.await_frame(HEARTBEAT_SECONDS):
            alive = _compressed_message(0, b": alive\n\n")
            yield alive.compressed if compressed else alive.plain


EVENT_HEARTBEAT_SECONDS = 15.0

EVENT_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event)

_EVENTS_OK: dict[int | str, dict[str, Any]] = {
    200: {
        BODY_TYPE_KEY: list[Event],
        "content": {
            "application/json": {"example": EVENTS_ADAPTER.dump_python([examples.EVENT], mode="json")},
            "text/event-stream": {
                "example": f"id: {examples.EVENT.id}\nevent: {examples.EVENT.kind}\n"
                f"data: {EVENT_ADAPTER.dump_json(examples.EVENT).decode()}\n\n"
            },
        },
    }
}


@router.get("/events", summary="Stream or list of events", responses=_EVENTS_OK, response_model=None)
async def events(request: Request) -> Response:
    """Sends events as server-sent events, starting now or, with `Last-Event-ID`, after that event.

    With `Accept: application/json`, you get the latest 1,000 as a list, most recent last.
    """
    event_log = core_of(request).events
    accept = request.headers.get("accept", "")
    last_id = request.headers.get("last-event-id", "")
    known_id = int(last_id) if last_id.isdecimal() and len(last_id) < 20 else None
    if accepts(accept, "application/json") and not accepts(accept, "text/event-stream"):
        return json_response(list[Event], list(event_log.after(known_id or 0)))
    since = event_log.last_id if known_id is None else known_id
    return EventStream(request.scope, request.app.state, event_messages(event_log, since))


async def event_messages(
    event_log: EventLog, last_id: int, heartbeat_seconds: float = EVENT_HEARTBEAT_SECONDS
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
            data = EVENT_ADAPTER.dump_json(event).decode()
            yield f"id: {event.id}\nevent: {event.kind}\ndata: {data}\n\n".encode()
        if not await event_log.wait(heartbeat_seconds):
            yield b": alive\n\n"
