"""An exchange that is given up leaves neither a thread nor a connection, wherever the server stalls."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpumond.facts.errors import HttpError
from gpumond.host.http import Connection, HttpRequest, HttpResponse, exchange, exchange_async
from tests.helpers.running import until

STALLS = {
    "before the headers": b"",
    "in the headers": b"HTTP/1.1 200 OK\r\nConnection: close\r\n",
    "in the body": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{",
    "in a body of known length": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{",
}


class Stalling:
    """A server that sends its beginning of an answer and keeps the connection."""

    def __init__(self, listener: socket.socket, beginning: bytes) -> None:
        self.listener, self.beginning = listener, beginning
        self.connections: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                self.connections.append(connection)
                connection.sendall(self.beginning)

    def ended(self) -> int:
        """Connections that the client has ended."""
        return sum(map(_ended, self.connections))

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        for each in (self.listener, *self.connections):
            each.close()


def _ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def threads() -> int:
    return sum(thread.name == "gpumond-http" for thread in threading.enumerate())


def give_up(connection: Connection, waits: bool = False) -> None:
    def ask() -> HttpResponse:
        request = HttpRequest("GET", "/")
        return exchange(connection, request, 0.1) if waits else asyncio.run(exchange_async(connection, request, 0.1))

    with pytest.raises(HttpError, match=r"no response within 0\.1 s") as failed:
        ask()
    assert failed.value.reason == "timeout"


@pytest.mark.parametrize("where", STALLS)
def test_stalled_answer_leaves_no_thread_and_no_connection(listener: socket.socket, where: str):
    server = Stalling(listener, STALLS[where])
    for waits in (True, False):
        give_up(Connection("127.0.0.1", listener.getsockname()[1]), waits)
    until(lambda: threads() == 0 and server.ended() == 2)
    server.close()


def test_stalled_tls_handshake_leaves_no_thread_and_no_connection(listener: socket.socket):
    server = Stalling(listener, b"")
    port, tls = listener.getsockname()[1], ssl.create_default_context()
    for _ in range(3):
        give_up(Connection("127.0.0.1", port, tls=tls))
    until(lambda: threads() == 0 and server.ended() == 3)
    server.close()


def test_stalled_answer_over_a_unix_socket_leaves_no_thread(tmp_path: Path):
    path = str(tmp_path / "s")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    server = Stalling(listener, STALLS["in the body"])
    give_up(Connection("localhost", socket_path=path))
    until(lambda: threads() == 0 and server.ended() == 1)
    server.close()


def test_answer_to_a_request_whose_body_is_not_read_is_returned(tmp_path: Path):
    path = str(tmp_path / "s")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def refuse() -> None:
        connection, _ = listener.accept()
        connection.recv(1)
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}")
        connection.close()
        listener.close()

    threading.Thread(target=refuse, daemon=True).start()
    request = HttpRequest("POST", "/", {}, bytes(1 << 23))
    answer = exchange(Connection("localhost", socket_path=path), request, 20)
    assert (answer.status, answer.body) == (404, b"{}")


def test_default_port_is_not_a_part_of_the_host():
    assert (Connection("a").port, Connection("a", tls=ssl.create_default_context()).port) == (80, 443)
    assert Connection("::1", 8000).host == "::1"
