"""Agents that use the wire protocol over plain sockets, one in each process, valid or hostile.

python -m tests.helpers.agents SOCKET OPTIONS

OPTIONS is a JSON object with fields of ``Options``. Each line of standard input is a JSON object that replaces some of
them (with one process only); the end of the input ends the program. Each line of standard output is a JSON object:
``started``, ``flushed`` or ``left``, with the pid.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpumond.facts.errors import ProtocolError
from gpumond.facts.messages import (
    MAX_MESSAGE_BYTES,
    MAX_TEXT_LENGTH,
    FlushCommand,
    FlushResult,
    Hello,
    PoolChange,
    Report,
    decode,
    encode,
)
from gpumond.facts.pools import ExpectedRelease, PoolUsage, Reclaimable

GIB = 1 << 30
LARGE = 60 * GIB
LONG_TEXT = "\U0001f600" * MAX_TEXT_LENGTH
"""Twelve bytes a character in JSON, and in each receipt."""
RETRY_SECONDS = 0.2
FULL = '{"v":1,"type":"report","pools":[%s]}\n'


@dataclass(frozen=True)
class Options:
    """``answers``: requests that the program allows. ``answer`` to a flush: ``release`` at most ``release_bytes``,
    ``silence``, ``gain`` (the agent claims to hold 60 GiB more afterwards) or ``many`` (``changes`` pools that it never
    reported). ``full``: as many pools as a message can have. ``numbered``: the live bytes grow by one with each report,
    which is written to the output as ``sent``.
    """

    processes: int = 1
    workload: str = ""
    device_uuid: str = ""
    live_bytes: int = GIB
    cached_bytes: int = 0
    ooms: int | None = None
    allocators: int = 1
    full: bool = False
    numbered: bool = False
    seconds: float = 0.25
    answers: tuple[str, ...] = ()
    answer: str = "release"
    release_bytes: int = GIB
    changes: int = 60


class Agent:
    def __init__(self, path: str, options: Options, frames: Sequence[bytes] = ()) -> None:
        """``frames``: reports that are sent one after another instead of those of the options."""
        self._path, self.options, self._frames = path, options, frames
        self._cached = options.cached_bytes
        self._number = 0
        self._buffer = b""
        self._socket: socket.socket | None = None

    def run(self, control: int, commands: bool) -> None:
        """Run until ``control`` ends. Lines of ``commands`` replace options."""
        due, pending = 0.0, b""
        while True:
            if self._socket is None:
                self._connect()
            wait = [control, self._socket] if self._socket else [control]
            ready, _, _ = select.select(wait, [], [], max(0.0, due - time.monotonic()))
            if control in ready:
                chunk = os.read(control, 65536)
                if not chunk:
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines if commands else ():
                    self._change(json.loads(line))
                    due = 0.0
            if self._socket in ready:
                self._read()
            if time.monotonic() >= due:
                self._send(self.report())
                if self.options.numbered:
                    write_event("sent", number=self._number)
                due = time.monotonic() + self.options.seconds

    def _change(self, fields: dict[str, Any]) -> None:
        self.options = replace(self.options, **fields)
        self._cached = fields.get("cached_bytes", self._cached)

    def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(30)
        try:
            connection.connect(self._path)
        except OSError:
            connection.close()
            time.sleep(RETRY_SECONDS)
            return
        self._socket, self._buffer = connection, b""
        self._send(encode(Hello(self.options.workload, answers=tuple(self.options.answers))))
        self._send(self.report())
        write_event("started", held_bytes=self.held_bytes)

    def _send(self, frame: bytes) -> None:
        try:
            if self._socket:
                self._socket.sendall(frame)
        except OSError:
            self._leave()

    def _read(self) -> None:
        assert self._socket
        try:
            chunk = self._socket.recv(65536)
        except OSError:
            chunk = b""
        if not chunk:
            self._leave()
            return
        *frames, self._buffer = (self._buffer + chunk).split(b"\n")
        for frame in frames:
            try:
                message = decode(frame)
            except ProtocolError:
                continue
            if isinstance(message, FlushCommand):
                self._answer(message)

    def _leave(self) -> None:
        if self._socket:
            self._socket.close()
            self._socket = None
            write_event("left")

    @property
    def held_bytes(self) -> int:
        return self.options.live_bytes + (self._number if self.options.numbered else 0) + self._cached

    def report(self) -> bytes:
        self._number += 1
        if self._frames:
            return self._frames[self._number % len(self._frames)]
        return encode(Report(pools=tuple(self._pool(f"torch-{each}") for each in range(self.options.allocators))))

    def _pool(self, allocator: str) -> PoolUsage:
        flush = Reclaimable(self._cached, self._cached, self._cached)
        held = self.held_bytes
        return PoolUsage(
            allocator=allocator,
            device_uuid=self.options.device_uuid,
            live_bytes=held - self._cached,
            held_bytes=held,
            reclaimable=flush,
            stranded_bytes=0,
            ooms=self.options.ooms,
        )

    def _answer(self, asked: FlushCommand) -> None:
        before = self._pool(asked.allocator)
        expected = ExpectedRelease(*(min(self._cached, self.options.release_bytes),) * 3)
        if self.options.answer == "silence":
            write_event("flushed", dry_run=asked.dry_run)
            return
        if self.options.answer == "many":
            changes = tuple(many(asked.allocator, self.options.changes))
            self._send(encode(FlushResult(asked.id, "freed", LONG_TEXT, changes)))
            return
        if self.options.answer == "gain":
            after = replace(before, live_bytes=before.live_bytes + LARGE, held_bytes=before.held_bytes + LARGE)
        elif asked.dry_run:
            after = before
        else:
            self._cached -= expected.likely
            after = self._pool(asked.allocator)
            self._send(self.report())
        write_event("flushed", dry_run=asked.dry_run, held_bytes=self.held_bytes)
        outcome = "planned" if asked.dry_run else "freed"
        self._send(encode(FlushResult(asked.id, outcome, "", (PoolChange(before, after, expected),))))


def many(allocator: str, number: int) -> Iterator[PoolChange]:
    """Return changes of pools that no report contained."""
    for each in range(number):
        before = PoolUsage(
            allocator=allocator,
            device_uuid=f"GPU-unknown-{each}",
            live_bytes=0,
            held_bytes=0,
            reclaimable=Reclaimable(0, 0, 0),
            stranded_bytes=0,
        )
        yield PoolChange(before, before, ExpectedRelease(0, 0, 0))


def full_report(device_uuid: str, variant: int) -> bytes:
    """Return a report of nearly 64 KiB with the maximum of pools."""
    pools: list[str] = []
    size = len(FULL)
    while True:
        pool = json.dumps(
            {
                "allocator": f"a{len(pools)}",
                "device_uuid": device_uuid,
                "live_bytes": 1 + variant,
                "held_bytes": 2,
                "reclaimable": {"low": 0, "likely": 1 - variant, "high": 1},
                "stranded_bytes": 0,
            },
            separators=(",", ":"),
        )
        size += len(pool) + 1
        if size > MAX_MESSAGE_BYTES:
            return (FULL % ",".join(pools)).encode()
        pools.append(pool)


def write_event(event: str, **fields: object) -> None:
    os.write(1, json.dumps({"event": event, "pid": os.getpid(), **fields}).encode() + b"\n")


def main() -> None:
    path, options = sys.argv[1], Options(**json.loads(sys.argv[2]))
    frames = [full_report(options.device_uuid, variant) for variant in (0, 1)] if options.full else []
    if options.processes == 1:
        Agent(path, options, frames).run(0, commands=True)
        return
    alive, parent = os.pipe()
    for _ in range(options.processes):
        if os.fork() == 0:
            os.close(parent)
            Agent(path, options, frames).run(alive, commands=False)
            os._exit(0)
    while os.read(0, 4096):
        pass


if __name__ == "__main__":
    main()
