"""Requests of the daemon that the program ends: its own functions decide. Nothing here ends a program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

UNREGISTERED = "this program has no function for requests to end; register one with gpumond.agent.on_end_request"


class EndRequests:
    """Calls the program's functions in a thread of their own, so that they may wait. At most one call at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def call(self, functions: Sequence[Callable[[], object]]) -> str:
        """Start the functions. Return the reason if nothing was started. Never raises."""
        if not functions:
            return UNREGISTERED
        if self._thread is not None and self._thread.is_alive():
            return "the functions of an earlier request to end are still running"
        thread = threading.Thread(target=_call, args=(tuple(functions),), name="gpumond-end", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the thread limit, or an interpreter that is about to exit
            return "no thread can be started for the function"
        self._thread = thread
        return ""


def _call(functions: Sequence[Callable[[], object]]) -> None:
    for function in functions:
        try:
            function()
        except BaseException:  # the program's error, or its SystemExit: a thread has no caller that could handle it
            pass
