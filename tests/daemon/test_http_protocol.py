"""Connections of the HTTP server: unsent answers, pipelined requests, and invalid heads."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpumond.config.web_file import WebSettings
from gpumond.daemon.server import _Server
from gpumond.serve.authentication import Tokens
from gpumond.serve.guard import Guard, Policy
from gpumond.serve.http import (
    LARGE_PIECE_BYTES,
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    MAX_UNSENT_BYTES_OF_USER,
    PIECE_BYTES,
    HttpProtocol,
)
from tests.helpers.running import RunningDaemon, until
from tests.helpers.serving import connect, exchange, rejected, start_daemon, statuses

BODY_BYTES = 4 << 20
OVERRIDDEN = {
    "connection_made": ("transport",),
    "connection_lost": ("exc",),
    "data_received": ("data",),
    "pause_writing": (),
    "resume_writing": (),
    "on_message_begin": (),
    "on_url": ("url",),
    "on_header": ("name", "value"),
    "on_headers_complete": (),
    "on_message_complete": (),
    "on_response_complete": (),
    "send_400_response": ("msg",),
}
"""Methods of uvicorn that `HttpProtocol` overrides, and their parameters."""
START = b"GET /-/healthy HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with start_daemon(tmp_path_factory.mktemp("receiving")) as daemon:
        yield daemon
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log.read_text()


def test_overridden_methods_are_those_of_uvicorn():
    """A version of uvicorn that renames one, or changes its parameters, would silently disable a deadline."""
    own = {name for name in vars(HttpProtocol) if hasattr(HttpToolsProtocol, name) and name[:2] != "__"}
    assert own == OVERRIDDEN.keys()
    for name, parameters in OVERRIDDEN.items():
        assert tuple(inspect.signature(getattr(HttpToolsProtocol, name)).parameters)[1:] == parameters, name


async def large(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-length", b"%d" % BODY_BYTES)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(BODY_BYTES)})


def test_unread_answers_are_bounded_per_user():
    """Each reader requests 4 MiB and reads nothing; the readers with the oldest answers are closed."""
    room = MAX_UNSENT_BYTES_OF_USER // BODY_BYTES
    reasons: list[str] = []

    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(Guard(large, Tokens("t"), Policy()), lifespan="off", log_config=None)
        config.load()
        server = _Server(config, WebSettings, reasons.append)
        server.lifespan = config.lifespan_class(config)
        await server.startup([listener])
        with ExitStack() as readers:
            for _ in range(room + 3):
                reader = readers.enter_context(socket.socket())
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reader.connect(listener.getsockname())
                reader.sendall(b"GET /api/v1/frame HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            while reasons != ["unread"] * 3:
                await asyncio.sleep(0.01)
            while len(server.server_state.connections) != room:
                await asyncio.sleep(0.01)
            unsent = [each.transport.get_write_buffer_size() for each in server.server_state.connections]  # type: ignore[union-attr]
            assert all(0 < size <= LARGE_PIECE_BYTES for size in unsent)
        server.servers[0].close()
        while server.server_state.connections:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_slowly_read_answer_is_complete(daemon: RunningDaemon):
    whole = daemon.request("/openapi.json")[1]
    assert len(whole) > 4 * PIECE_BYTES
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.settimeout(20)
        reader.connect(("127.0.0.1", int(daemon.url.rpartition(":")[2])))
        reader.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        received = b""
        while piece := reader.recv(1500):
            received += piece
    assert received.partition(b"\r\n\r\n")[2] == whole


def test_oversized_head_in_one_piece_is_refused(daemon: RunningDaemon):
    for length, status in ((MAX_HEAD_BYTES - 200, 200), (MAX_HEAD_BYTES, 431), (2 * MAX_HEAD_BYTES - 500, 431)):
        assert statuses(exchange(daemon, START + b"X: " + b"x" * length + b"\r\n\r\n")) == [status]
    target = b"GET /-/healthy?" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    assert statuses(exchange(daemon, target)) == [431]


@pytest.mark.parametrize("apart", [False, True])
def test_trailer_is_not_a_header(daemon: RunningDaemon, apart: bool):
    token = (daemon.directory / "token").read_bytes().strip()
    body = b'{"name":"trailed","scope":"process","value":"used_bytes","above":1}'
    head = b"POST /api/v1/rules HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n"
    trailer = b"Authorization: Bearer " + token + b"\r\n\r\n"
    with connect(daemon) as connection:
        connection.sendall(head if apart else head + trailer)
        if apart:
            connection.sendall(trailer)
        received = b""
        while piece := connection.recv(4096):
            received += piece
    assert statuses(received) == [401]


def test_pipelined_requests_are_limited(daemon: RunningDaemon):
    request = START + b"\r\n"
    assert statuses(exchange(daemon, request * MAX_PIPELINED)) == [200] * MAX_PIPELINED
    before = rejected(daemon, "pipelined")
    assert len(statuses(exchange(daemon, request * 1000))) <= MAX_PIPELINED
    until(lambda: rejected(daemon, "pipelined") == before + 1)


def test_hundred_viewers_of_one_address_are_served(daemon: RunningDaemon):
    """Each follows the events on one connection and requests frames on another."""
    before = rejected(daemon, "crowd")
    with ExitStack() as viewers:
        streams = [viewers.enter_context(connect(daemon)) for _ in range(100)]
        frames = [viewers.enter_context(connect(daemon)) for _ in range(100)]
        for stream in streams:
            stream.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        for stream in streams:
            assert b"200 OK" in stream.recv(4096)
        for _ in range(2):
            for frame in frames:
                frame.sendall(b"HEAD /api/v1/frame HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            for frame in frames:
                assert statuses(frame.recv(4096)) == [200]
        for stream in streams:
            stream.setblocking(False)
            try:
                while stream.recv(4096):
                    pass
                raise AssertionError("a stream was closed")
            except BlockingIOError:
                pass
    assert rejected(daemon, "crowd") == before


def test_request_that_is_refused_before_its_body_is_read_to_its_end(daemon: RunningDaemon):
    """A client that sends its body after the refusal would otherwise see a reset connection instead of the reason."""
    client = HTTPConnection(daemon.url.removeprefix("http://"), timeout=60)
    for _ in range(3):
        client.putrequest("POST", "/-/reload")
        client.putheader("Content-Type", "application/json")
        client.putheader("Content-Length", "2")
        client.endheaders()
        answer = client.getresponse()
        assert (answer.status, answer.read()[:1]) == (401, b"{")
        assert not answer.will_close
        client.send(b"{}")
    client.request("GET", "/-/healthy")
    assert client.getresponse().status == 200
    client.close()
