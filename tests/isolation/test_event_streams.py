"""Readers of events while one user follows them from many loopback addresses."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from tests.isolation.machine import Machine
from tests.isolation.users import VICTIM
from tests.serving import connect

REQUEST = b"GET /api/v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n"
VIEWERS = 100


@contextlib.contextmanager
def streams(machine: Machine, number: int) -> Iterator[list[bytes]]:
    """The first bytes of so many streams that are open at once."""
    with contextlib.ExitStack() as stack:
        yield [first_bytes(stack.enter_context(connect(machine.daemon))) for _ in range(number)]


def first_bytes(connection: socket.socket) -> bytes:
    connection.sendall(REQUEST)
    heard = b""
    while b"retry:" not in heard and (chunk := connection.recv(4096)):
        heard += chunk
    return heard


def test_a_reader_gets_a_stream_when_another_user_has_many(machine: Machine):
    machine.attack("event_streams", port=machine.port, sources=4, each=8)
    with streams(machine, 4) as heard:
        assert [text.split(b"\r\n")[0] for text in heard] == [b"HTTP/1.1 200 OK"] * 4


def test_a_user_gets_a_stream_over_the_api_socket(machine: Machine):
    machine.attack("event_streams", port=machine.port, sources=4, each=8)
    status, text = machine.stream(VICTIM)
    assert status == 200
    assert text.startswith("retry:")


def test_a_hundred_viewers_behind_one_address_each_have_a_stream(machine: Machine):
    with streams(machine, VIEWERS) as heard:
        assert all(text.startswith(b"HTTP/1.1 200 OK") for text in heard)
        assert machine.daemon.request("/metrics")[0] == 200
