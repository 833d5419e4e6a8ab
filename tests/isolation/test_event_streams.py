"""Readers of events while one user follows them from many loopback addresses."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from tests.helpers.serving import connect
from tests.helpers.users import VICTIM
from tests.isolation.machine import Machine

REQUEST = b"GET /api/v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n"
VIEWERS = 100


@contextlib.contextmanager
def streams(machine: Machine, number: int) -> Iterator[list[tuple[socket.socket, bytes]]]:
    """Open a number of streams at once, and read the head of each response."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(connect(machine.daemon)) for _ in range(number)]
        yield [(connection, head(connection)) for connection in opened]


def head(connection: socket.socket) -> bytes:
    connection.sendall(REQUEST)
    received = b""
    while b"\r\n\r\n" not in received and (chunk := connection.recv(4096)):
        received += chunk
    return received.partition(b"\r\n")[0]


def closed(connection: socket.socket) -> bool:
    """Read until the daemon has closed the connection."""
    connection.settimeout(0.0)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def test_stream_is_available_when_another_user_has_many(machine: Machine):
    machine.attack("event_streams", port=machine.port, sources=4, each=8)
    with streams(machine, 4) as opened:
        assert [answer for _, answer in opened] == [b"HTTP/1.1 200 OK"] * 4


def test_stream_is_available_over_the_api_socket(machine: Machine):
    machine.attack("event_streams", port=machine.port, sources=4, each=8)
    status, text = machine.stream(VICTIM)
    assert status == 200
    assert text.startswith("retry:")


def test_hundred_viewers_of_one_address_each_keep_their_stream(machine: Machine):
    with streams(machine, VIEWERS) as opened:
        assert {answer for _, answer in opened} == {b"HTTP/1.1 200 OK"}
        assert machine.daemon.request("/metrics")[0] == 200
        assert sum(closed(connection) for connection, _ in opened) == 0
