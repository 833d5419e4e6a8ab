"""HTTP receiver on a real socket, with the answers that a test defines."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest

from gpumond.features.alerts.receivers.base import HttpReceiver, NotSent, post

Answer = bytes | Callable[[socket.socket], None]

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def answer(status: int, **headers: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} X\r\n{lines}Content-Length: 0\r\n\r\n".encode()


class Request(NamedTuple):
    line: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Listener:
    """HTTP receiver. ``answer`` is the answer to the next requests: bytes, or a function that gets the connection."""

    def __init__(self) -> None:
        self.answer: Answer = OK
        self.requests: list[Request] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve_quietly, args=(connection,), daemon=True).start()

    def _serve_quietly(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        except OSError:
            pass  # the peer has ended or closed the connection

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            data = b""
            while b"\r\n\r\n" not in data:
                if not (more := connection.recv(65536)):
                    return
                data += more
            head, _, body = data.partition(b"\r\n\r\n")
            line, *lines = head.decode().split("\r\n")
            headers = {name.lower(): value for name, value in (each.split(": ", 1) for each in lines)}
            while len(body) < int(headers["content-length"]):
                body += connection.recv(65536)
            self.requests.append(Request(line, headers, body))
            if isinstance(self.answer, bytes):
                connection.sendall(self.answer)
            else:
                self.answer(connection)


def failure(receiver: HttpReceiver, timeout_seconds: float = 5.0) -> NotSent:
    with pytest.raises(NotSent) as failed:
        asyncio.run(post(receiver, "", b"{}", timeout_seconds=timeout_seconds))
    assert "127.0.0.1" not in str(failed.value), "an address is a secret"
    return failed.value


def stall(connection: socket.socket) -> None:
    connection.recv(1)


def drip(connection: socket.socket) -> None:
    """Send a header that never ends, one byte at a time."""
    try:
        while True:
            connection.sendall(b"H")
            time.sleep(0.01)
    except OSError:
        pass
