"""One HTTP exchange in a thread that delays nothing: the caller's deadline closes the connection.

``http.client`` follows no redirect and reads no proxy from the environment.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPMessage
from threading import Thread
from typing import NamedTuple


class HttpAnswer(NamedTuple):
    """Status, headers, and at most the requested number of bytes of the body."""

    status: int
    headers: HTTPMessage
    body: bytes


async def exchange(
    connection: HTTPConnection,
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
            response = connection.getresponse()
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
        _abort(connection)


def _connect(connection: HTTPConnection) -> None:
    try:
        connection.connect()
    except UnicodeError:
        raise socket.gaierror(socket.EAI_NONAME, "not a name") from None


def _abort(connection: HTTPConnection) -> None:
    """Make the thread's call on the socket return."""
    with suppress(AttributeError, OSError):  # not connected, or closed
        connection.sock.shutdown(socket.SHUT_RDWR)
