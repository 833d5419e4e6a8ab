"""Client of the stream of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any


class Reader:
    """One connection to the application. With ``stuck``, it accepts no more bytes."""

    def __init__(self, app: Any, user: str = "loopback", path: str = "/api/v1/events", **headers: str) -> None:
        self.received = bytearray()
        self.status = 0
        self.stuck = False
        self.blocked: asyncio.Event | None = None
        self.more = True
        self.disconnect = asyncio.Event()
        named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": named,
            "state": {"user": user},
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self.disconnect.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self.stuck:
            await asyncio.Event().wait()
        if self.blocked:
            await self.blocked.wait()
        self.status = message.get("status", self.status)
        self.received += message.get("body", b"")
        self.more = message.get("more_body", True)

    async def wait(self, found: Callable[[str], object]) -> str:
        for _ in range(2000):
            if found(text := self.received.decode()):
                return text
            await asyncio.sleep(0.005)
        raise AssertionError(f"not in time: {self.received!r}")

    def events(self) -> list[dict[str, Any]]:
        lines = self.received.decode().split("\n")
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
