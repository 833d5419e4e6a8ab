"""Requests to the daemon in threads, so that neither the screen nor the exit of the program waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from typing import Any, Protocol, TypeVar

from textual.message_pump import MessagePump

from gpumond.errors import DaemonError
from gpumond.top.view import View, view

T = TypeVar("T")


class DaemonClient(Protocol):
    """The HTTP API of a daemon. Both methods raise DaemonError."""

    url: str

    def get(self, path: str) -> Any: ...
    def post(self, path: str, body: object, timeout: float) -> Any: ...


def ask(asker: MessagePump, question: Callable[[], T], then: Callable[[T | DaemonError], None]) -> None:
    """Call the function in a new thread; ``then`` is called with the result or the error in the application's."""

    def run() -> None:
        answer: T | DaemonError
        try:
            answer = question()
        except DaemonError as error:
            answer = error
        except (HTTPException, OSError) as error:
            answer = DaemonError(f"the daemon closed the connection: {type(error).__name__}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            answer = DaemonError(f"the response is not from gpumond ({type(error).__name__}: {error}); check --url")
        with suppress(RuntimeError):  # the application has ended in the meantime
            asker.call_later(then, answer)

    threading.Thread(target=run, name="gpumond-top", daemon=True).start()


def look(daemon: DaemonClient) -> View:
    return view(daemon.get("/api/v1/frame"))
