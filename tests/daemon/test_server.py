"""The daemon's port with raw bytes, slow and many connections, and few descriptors."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.faults import descriptors, descriptors_at_the_limit, slow_connections
from gpumond.serve.http import MAX_HEAD_BYTES
from tests.helpers.running import START_SECONDS, RunningDaemon, until
from tests.helpers.serving import connect, exchange, rejected, start_daemon, statuses


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with start_daemon(tmp_path_factory.mktemp("server")) as daemon:
        yield daemon
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log.read_text()


HEAD = b"Host: 127.0.0.1\r\nContent-Type: application/json\r\nAuthorization: Bearer @TOKEN@\r\n"
BODY = b'{"name":"hog","scope":"process","value":"used_bytes","above":"40GiB"}'
POST_RULE = b"POST /api/v1/rules HTTP/1.1\r\n" + HEAD
SMUGGLED = POST_RULE + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"

MALFORMED = {
    "length and chunked": POST_RULE + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    "chunked and length": POST_RULE + b"Transfer-Encoding: chunked\r\n" + LENGTH + b"\r\n" + CHUNKED,
    "two lengths": POST_RULE + LENGTH + b"Content-Length: 1\r\n\r\n" + BODY,
    "two lengths in one": POST_RULE + b"Content-Length: 1, 1\r\n\r\n" + BODY,
    "a signed length": POST_RULE + b"Content-Length: +%d\r\n\r\n" % len(BODY) + BODY,
    "a negative length": POST_RULE + b"Content-Length: -1\r\n\r\n" + BODY,
    "a hexadecimal length": POST_RULE + b"Content-Length: 0x45\r\n\r\n" + BODY,
    "chunked twice removed": POST_RULE + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKED,
    "chunked and more": POST_RULE + b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKED,
    "chunked in another line": POST_RULE + b"Transfer-Encoding:\n chunked\r\n\r\n" + CHUNKED,
    "a space before the colon": POST_RULE + b"Content-Length : %d\r\n\r\n" % len(BODY) + BODY,
    "a folded header": POST_RULE + b"X: a\r\n b\r\n" + b"Content-Length\r\n : 69\r\n\r\n" + BODY,
    "a bare line feed in a header": POST_RULE + b"X: a\nContent-Length: 69\r\r\n\r\n" + BODY,
    "a chunk of a wrong size": POST_RULE + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk longer than its size": POST_RULE + b"Transfer-Encoding: chunked\r\n\r\n1\r\n" + BODY + b"\r\n0\r\n\r\n",
    "absolute form": POST_RULE.replace(b"POST /", b"POST http://127.0.0.1/") + LENGTH + b"\r\n" + BODY,
    "absolute form of another": POST_RULE.replace(b"POST /", b"POST http://evil.com/") + LENGTH + b"\r\n" + BODY,
    "authority form": b"CONNECT 127.0.0.1:9917 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "no host": POST_RULE.replace(b"Host: 127.0.0.1\r\n", b"") + LENGTH + b"\r\n" + BODY,
    "two hosts": POST_RULE + b"Host: 127.0.0.1\r\n" + LENGTH + b"\r\n" + BODY,
    "no version": POST_RULE.replace(b" HTTP/1.1", b"") + LENGTH + b"\r\n" + BODY,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "a null in a header": POST_RULE + b"X: a\0b\r\n" + LENGTH + b"\r\n" + BODY,
}


@pytest.mark.parametrize("case", MALFORMED)
def test_ambiguous_requests_are_refused(daemon: RunningDaemon, case: str):
    token = (daemon.directory / "token").read_bytes().strip()
    received = exchange(daemon, MALFORMED[case].replace(b"@TOKEN@", token) + SMUGGLED.replace(b"@TOKEN@", token))
    assert statuses(received) == [400], received
    assert [rule["name"] for rule in daemon.get("rules") if rule["origin"] == "api"] == []


def test_well_formed_requests_are_accepted(daemon: RunningDaemon):
    """Shows that the requests above are refused for their lengths, not for another mistake."""
    token = (daemon.directory / "token").read_bytes().strip()
    made = exchange(daemon, SMUGGLED.replace(b"@TOKEN@", token))
    remove = b"DELETE /api/v1/rules/hog HTTP/1.1\r\n" + HEAD.replace(b"@TOKEN@", token) + b"\r\n"
    chunked = (POST_RULE + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED).replace(b"@TOKEN@", token)
    assert statuses(made) == [201]
    assert statuses(exchange(daemon, remove + chunked + remove)) == [204, 201, 204]


def test_request_after_a_close_is_ignored(daemon: RunningDaemon):
    token = (daemon.directory / "token").read_bytes().strip()
    first = b"GET /-/healthy HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    received = exchange(daemon, first + SMUGGLED.replace(b"@TOKEN@", token))
    assert statuses(received) == [200]
    assert [rule["name"] for rule in daemon.get("rules") if rule["origin"] == "api"] == []


def test_target_with_two_slashes_does_not_change_the_host(daemon: RunningDaemon):
    assert statuses(exchange(daemon, b"GET //evil.com/metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")) == [404]


def test_endless_headers_and_bodies_are_refused(daemon: RunningDaemon):
    start = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    assert statuses(exchange(daemon, start + b"X: " + b"x" * (MAX_HEAD_BYTES + 300_000))) == [431]
    assert statuses(exchange(daemon, start + b"X: y\r\n" * 100_000)) == [431]
    endless = (
        b"GET /-/healthy HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 400_000
    )
    assert statuses(exchange(daemon, endless)) in ([200], [])
    assert statuses(exchange(daemon, POST_RULE + b"Content-Length: 70000\r\n\r\n" + bytes(70_000)))[:1] == [413]


def test_slow_connections_are_closed_and_scrapes_continue(daemon: RunningDaemon):
    """300 connections from ten addresses, each with a byte now and then, are closed after ten seconds."""
    before = rejected(daemon, "slow")
    slow = [connect(daemon, f"127.0.0.{10 + n % 10}") for n in range(300)]
    body = POST_RULE.replace(b"@TOKEN@", b"x") + b"Content-Length: 6000\r\n\r\n{"
    starts = (b"", b"GET / HTTP/1.1\r\nX: ", body, b"GET /")
    for number, connection in enumerate(slow):
        connection.setblocking(False)
        connection.sendall(starts[number % 4])
    numbers = {connection: number for number, connection in enumerate(slow)}
    waiting = {connection.fileno(): connection for connection in slow}
    watch = selectors.DefaultSelector()
    for connection in slow:
        watch.register(connection, selectors.EVENT_READ)
    began = time.monotonic()
    while waiting and time.monotonic() - began < START_SECONDS:
        assert daemon.request("/metrics")[0] == 200
        for key, _ in watch.select(0.5):
            try:
                received = key.fileobj.recv(4096)  # type: ignore[union-attr]
            except ConnectionError:
                received = b""
            if not received:
                watch.unregister(key.fileobj)
                waiting.pop(key.fd)
        for connection in list(waiting.values()):
            try:
                connection.send(b"\r\n" if numbers[connection] % 4 == 0 else b"x")
            except OSError:
                pass
    for connection in slow:
        connection.close()
    assert not waiting
    until(lambda: rejected(daemon, "slow") - before > 200)
    assert len(daemon.log.read_text().splitlines()) < 100


def test_keep_alive_connection_has_the_same_deadline_for_its_next_request(daemon: RunningDaemon):
    with connect(daemon) as connection:
        connection.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert statuses(connection.recv(4096)) == [200]
        connection.settimeout(0.5)

        def ended() -> bool:
            try:
                connection.sendall(b"\r\n")
                return not connection.recv(4096)
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        until(ended)


def test_idle_connections_do_not_prevent_scrapes(daemon: RunningDaemon):
    idle = [connect(daemon) for _ in range(200)]
    try:
        for _ in range(20):
            assert daemon.request("/metrics")[0] == 200
    finally:
        for connection in idle:
            connection.close()


def test_sigterm_with_thousands_of_slow_connections_is_an_orderly_end(tmp_path: Path):
    """Incomplete heads and bodies, streams, unread answers, and agents without a hello."""
    with start_daemon(tmp_path) as daemon:
        with slow_connections(daemon, connections=5000, agents=1000):
            until(lambda: descriptors_at_the_limit(daemon))
            assert daemon.stop() == 0
        assert "Traceback" not in daemon.log.read_text()
        assert not daemon.socket.exists()


def test_event_stream_ends_with_the_daemon(tmp_path: Path):
    with start_daemon(tmp_path) as daemon:
        with connect(daemon) as stream:
            stream.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            received = b""
            while b"retry:" not in received:
                received += stream.recv(4096)
            assert daemon.stop() == 0
        assert "ERROR" not in daemon.log.read_text()


def test_scrapes_and_changes_continue_with_few_descriptors(tmp_path: Path):
    with start_daemon(tmp_path, around=("prlimit", "--nofile=256:256")) as daemon:
        connections = []
        for address in range(8):
            connections += [connect(daemon, f"127.0.1.{address + 1}") for _ in range(100)]
        agents = []
        for _ in range(300):
            agent = socket.socket(socket.AF_UNIX)
            agent.setblocking(False)
            agent.connect_ex(str(daemon.socket))
            agents.append(agent)
        for _ in range(20):
            assert daemon.request("/metrics")[0] == 200
        assert daemon.flush(target={"all": True})[0] == 404
        assert descriptors(daemon) < 256
        for connection in (*connections, *agents):
            connection.close()
        until(lambda: descriptors(daemon) < 60)
        assert len(daemon.log.read_text().splitlines()) < 60
