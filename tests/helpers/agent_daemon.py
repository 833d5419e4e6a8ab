"""Fake daemon at the agent's socket: it records the messages of agents and sends those of a test."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from gpumond.facts.messages import Message, decode, encode

FAKES = Path(__file__).parents[1] / "agent" / "fakes"
SECONDS = 30

M = TypeVar("M")


@dataclass
class Peer:
    """One connection. ``pid`` is that of the kernel."""

    pid: int
    connection: socket.socket
    messages: list[Message] = field(default_factory=list)
    gone: bool = False

    def send(self, *messages: Message) -> None:
        self.connection.sendall(b"".join(map(encode, messages)))


class FakeDaemon:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.peers: list[Peer] = []
        self._news = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(os.fspath(path))
        self._listener.listen(128)
        self._start(self._accept)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for peer in list(self.peers):
            with_errors_ignored(lambda peer=peer: peer.connection.shutdown(socket.SHUT_RDWR))
        for thread in self._threads:
            thread.join(SECONDS)
        self._listener.close()

    def wait(self, found: Callable[[FakeDaemon], M | None]) -> M:
        """Wait until ``found`` returns a value, and return it."""
        with self._news:
            assert self._news.wait_for(lambda: found(self), SECONDS), f"not in time; received {self.peers}"
            value = found(self)
        assert value is not None
        return value

    def wait_message(self, kind: type[M], pid: int | None = None) -> M:
        """Wait for a message of this kind, from this process if one is given, and return the newest."""
        return self.wait(lambda _: next(reversed(self.received(kind, pid)), None))

    def wait_peer(self, pid: int | None = None) -> Peer:
        """Wait for a connection that has sent a message, from this process if one is given, and return the newest."""
        peers = reversed
        return self.wait(lambda _: next((p for p in peers(self.peers) if p.messages and pid in (None, p.pid)), None))

    def received(self, kind: type[M], pid: int | None = None) -> list[M]:
        return [m for p in self.peers if pid in (None, p.pid) for m in p.messages if isinstance(m, kind)]

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            peer = Peer(pid, connection)
            with self._news:
                self.peers.append(peer)
            self._start(self._read, peer)

    def _read(self, peer: Peer) -> None:
        with peer.connection, peer.connection.makefile("rb") as lines:
            while line := with_errors_ignored(lines.readline):
                with self._news:
                    peer.messages.append(decode(line.rstrip(b"\n")))
                    self._news.notify_all()
        with self._news:
            peer.gone = True
            self._news.notify_all()


def with_errors_ignored(call: Callable[[], M]) -> M | None:
    try:
        return call()
    except OSError:
        return None


def environment(path: Path | str, *import_paths: Path, **values: str) -> dict[str, str]:
    """Environment of a program with the agent: few threads, no bytecode, no settings of the caller."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("GPUMOND_", "PYTHON"))}
    search = {"PYTHONPATH": os.pathsep.join(map(os.fspath, import_paths))} if import_paths else {}
    return {**own, "GPUMOND_SOCKET": os.fspath(path), **search, **values}


@contextmanager
def host(code: str, environ: dict[str, str], *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program with its input open; it is killed at the end of the block."""
    command = [sys.executable, *options, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environ, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def finished(process: subprocess.Popen[str], status: int = 0) -> str:
    """Return the output of a program after it has ended with this status and an empty stderr."""
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (status, "")
    return out


def eventually(condition: Callable[[], object]) -> None:
    """Wait until the condition is true, at most ``SECONDS``."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run_in_program(process: subprocess.Popen[str], line: str) -> None:
    """Execute a line in the program and wait until it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == f"did {line}\n"
