"""Asking the daemon without making anybody wait: neither the screen nor the end of the program."""

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
    """Its HTTP API. Both raise DaemonError."""

    url: str

    def get(self, path: str) -> Any: ...
    def post(self, path: str, body: object, timeout: float) -> Any: ...


def ask(asker: MessagePump, question: Callable[[], T], then: Callable[[T | DaemonError], None]) -> None:
    """Puts the question in a thread of its own; ``then`` gets the answer, or the error, in the asker's."""

    def run() -> None:
        answer: T | DaemonError
        try:
            answer = question()
        except DaemonError as error:
            answer = error
        except (HTTPException, OSError) as error:
            answer = DaemonError(f"the daemon broke off: {type(error).__name__}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            answer = DaemonError(f"that is no answer of gpumond ({type(error).__name__}: {error})")
        with suppress(RuntimeError):  # the asker has ended meanwhile
            asker.call_later(then, answer)

    threading.Thread(target=run, name="gpumond-top", daemon=True).start()


def look(daemon: DaemonClient) -> View:
    return view(daemon.get("/api/v1/frame"))
