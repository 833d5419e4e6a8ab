"""Attacks by one user of the machine on its daemon, for tests and for ``bench.survival``.

python -m tests.isolation.attacks NAME ARGUMENTS

ARGUMENTS is a JSON object. An attack writes ``ready`` once it is in full effect and continues until its input ends. It
runs at the lowest priority, so its effect is the daemon's work and not a lack of processor time.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import select
import socket
import sys
import threading
import time
from collections.abc import Callable

RECEIVE_BYTES = 4096
PAUSE_SECONDS = 0.05
RULE = {"name": "try", "scope": "pool", "value": "held_bytes", "above": 0}


def slow_readers(port: int, paths: list[str], connections: int, sources: int, requests: int) -> None:
    """Keep connections from many loopback addresses that send requests and never read. Closed ones are replaced."""
    held: dict[int, socket.socket] = {}
    poll, opened = select.poll(), 0
    while True:
        while len(held) < connections:
            connection = _connected(port, f"127.0.1.{opened % sources + 1}", RECEIVE_BYTES)
            opened += 1
            if connection is None:
                break
            asked = f"GET {paths[opened % len(paths)]} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode() * requests
            with contextlib.suppress(OSError):
                connection.sendall(asked)
            held[connection.fileno()] = connection
            poll.register(connection, select.POLLRDHUP)
        if opened >= connections:
            _ready()
        for descriptor, _ in poll.poll(1000 * PAUSE_SECONDS):
            poll.unregister(descriptor)
            held.pop(descriptor).close()
        time.sleep(PAUSE_SECONDS)


def silent_agents(path: str, connections: int, first: str = "") -> None:
    """Keep silent connections to the agents' socket, as many as its backlog accepts. Closed ones are replaced.

    ``first``: what each connection sends before it is silent.
    """
    held: dict[int, socket.socket] = {}
    poll, opened = select.poll(), 0
    while True:
        while len(held) < connections:
            connection = socket.socket(socket.AF_UNIX)
            connection.setblocking(False)
            if connection.connect_ex(path) != 0:
                connection.close()
                _ready()  # the backlog is full
                break
            opened += 1
            with contextlib.suppress(OSError):
                connection.sendall(first.encode())
            held[connection.fileno()] = connection
            poll.register(connection, select.POLLRDHUP)
            if opened >= connections:
                _ready()
        for descriptor, _ in poll.poll(1000 * PAUSE_SECONDS):
            poll.unregister(descriptor)
            held.pop(descriptor).close()


def flushes(path: str, body: dict[str, object], pause: float) -> None:
    """Repeat a flush or plan over the API's socket as soon as it is answered."""
    while True:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.sock.connect(path)
            connection.request("POST", "/api/v1/flushes", json.dumps(body), {"Content-Type": "application/json"})
            _ready()
            connection.getresponse().read()
        connection.close()
        time.sleep(pause)


def previews(port: int, clients: int) -> None:
    """Preview a rule on pools endlessly, with several clients of 127.0.0.1."""

    def ask() -> None:
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            with contextlib.suppress(OSError, http.client.HTTPException):
                while True:
                    connection.request(
                        "POST", "/api/v1/rules/preview", json.dumps(RULE), {"Content-Type": "application/json"}
                    )
                    _ready()
                    connection.getresponse().read()
            connection.close()
            time.sleep(PAUSE_SECONDS)

    for _ in range(clients):
        threading.Thread(target=ask, daemon=True).start()
    threading.Event().wait()


def event_streams(port: int, sources: int, each: int) -> None:
    """Keep readers of events from several loopback addresses. A closed stream is opened again."""
    request = b"GET /api/v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n"
    held: dict[int, socket.socket] = {}
    poll, opened = select.poll(), 0
    while True:
        while len(held) < sources * each:
            connection = _connected(port, f"127.0.1.{opened % sources + 1}")
            opened += 1
            if connection is None:
                break
            connection.sendall(request)
            held[connection.fileno()] = connection
            poll.register(connection, select.POLLIN)
        for descriptor, _ in poll.poll(1000 * PAUSE_SECONDS):
            try:
                over = not held[descriptor].recv(65536)
            except OSError:
                over = True
            if over:
                poll.unregister(descriptor)
                held.pop(descriptor).close()
        if opened >= sources * each:
            _ready()
        time.sleep(PAUSE_SECONDS)


def bad_text(port: int, path: str) -> None:
    """Send previews of rules, and flushes, with a lone surrogate as their text."""
    posts = (
        ("127.0.0.1", "/api/v1/rules/preview", {**RULE, "labels": {"a": "\ud800"}}),
        ("localhost", "/api/v1/flushes", {"target": {"workload": "\ud800"}}),
    )
    while True:
        for host, route, body in posts:
            connection = http.client.HTTPConnection(host, port, timeout=60)
            with contextlib.suppress(OSError, http.client.HTTPException):
                if host == "localhost":
                    connection.sock = socket.socket(socket.AF_UNIX)
                    connection.sock.connect(path)
                connection.request("POST", route, json.dumps(body), {"Content-Type": "application/json"})
                connection.getresponse().read()
            connection.close()
        _ready()
        time.sleep(1)


ATTACKS: dict[str, Callable[..., None]] = {
    attack.__name__: attack for attack in (slow_readers, silent_agents, flushes, previews, event_streams, bad_text)
}


def _connected(port: int, source: str, receive_bytes: int = 0) -> socket.socket | None:
    connection = socket.socket()
    connection.settimeout(10)
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    try:
        connection.bind((source, 0))
        connection.connect(("127.0.0.1", port))
    except OSError:
        connection.close()
        return None
    return connection


_ready_written = threading.Lock()


def _ready() -> None:
    """Write ``ready`` once."""
    if _ready_written.acquire(blocking=False):
        os.write(1, b"ready\n")


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> None:
    os.nice(19)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.Thread(target=_end_with_input, daemon=True).start()
    ATTACKS[sys.argv[1]](**json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
