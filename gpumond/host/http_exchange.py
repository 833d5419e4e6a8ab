"""One HTTP exchange in a thread that delays nothing: the caller's deadline closes the connection.

``http.client`` follows no redirect and reads no proxy from the environment.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPMessage
from threading import Thread
from typing import NamedTuple

CONNECT_SECONDS = 30.0
"""Limit of one attempt to connect, which nothing else can end."""


class HttpAnswer(NamedTuple):
    """Status, headers, and at most the requested number of bytes of the body."""

    status: int
    headers: HTTPMessage
    body: bytes


class Connection(HTTPConnection):
    """A connection that another thread can end, from the moment it exists to the last byte of an answer.

    ``http.client`` drops its own reference to the socket when the headers of an answer have arrived. ``path`` is that
    of a Unix socket. ``tls`` adds TLS, with ``server_name`` as the name in the certificate if it is not the host.
    ``seconds`` is the longest wait for the next bytes; None if only `end` limits it.
    """

    def __init__(
        self,
        host: str,
        port: int | None = None,
        *,
        path: str = "",
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
        seconds: float | None = None,
    ) -> None:
        self.default_port = 443 if tls else 80
        super().__init__(host, port or self.default_port)
        self._path, self._tls, self._server_name, self._seconds = path, tls, server_name, seconds
        self._opened: socket.socket | None = None
        self._ended = False

    def connect(self) -> None:
        if self._path:
            opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._keep(opened)
            opened.settimeout(self._seconds)
            opened.connect(self._path)
        else:
            seconds = CONNECT_SECONDS if self._seconds is None else min(self._seconds, CONNECT_SECONDS)
            opened = socket.create_connection((self.host, self.port), seconds)
            opened.settimeout(self._seconds)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls:
            name = self._server_name or self.host
            opened = self._tls.wrap_socket(opened, server_hostname=name, do_handshake_on_connect=False)
        self._keep(opened)
        if isinstance(opened, ssl.SSLSocket):
            opened.do_handshake()

    def end(self) -> None:
        """Make the call on the socket return, which another thread waits for, and each later one fail."""
        self._ended = True
        if self._opened is not None:
            with suppress(OSError):  # closed in the meantime
                socket.socket.shutdown(self._opened, socket.SHUT_RDWR)  # that of TLS would drop its state

    def _keep(self, opened: socket.socket) -> None:
        self.sock = self._opened = opened
        if self._ended:
            raise ConnectionAbortedError


async def exchange(
    connection: Connection,
    method: str,
    target: str,
    body: bytes | None,
    headers: Mapping[str, str],
    max_body_bytes: int = 0,
) -> HttpAnswer:
    """Return the answer to one request. Raises OSError, ValueError or HTTPException.

    The exchange runs in a thread, since a resolver may block for minutes; the connection is closed when this coroutine
    ends, whatever the thread waits for. A request that was not sent by then is never sent.
    """
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[HttpAnswer] = loop.create_future()

    def settle(answer: HttpAnswer | None, error: Exception | None) -> None:
        if error and not answered.done():
            answered.set_exception(error)
        elif answer and not answered.done():
            answered.set_result(answer)

    def work() -> None:
        answer, failure = None, None
        try:
            _connect(connection)
            if answered.done():
                return
            connection.request(method, target, body, dict(headers))
            with connection.getresponse() as response:
                answer = HttpAnswer(response.status, response.headers, response.read(max_body_bytes))
        except Exception as error:
            failure = error
        finally:
            connection.close()
        with suppress(RuntimeError):  # the daemon has ended in the meantime
            loop.call_soon_threadsafe(settle, answer, failure)

    Thread(target=work, name="gpumond-http", daemon=True).start()
    try:
        return await answered
    finally:
        connection.end()


def _connect(connection: Connection) -> None:
    try:
        connection.connect()
    except UnicodeError:
        raise socket.gaierror(socket.EAI_NONAME, "not a name") from None
