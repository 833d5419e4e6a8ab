"""Requests of this program for room on a device, which the daemon gets from other programs."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable

from gpumond.facts.messages import BorrowRequest, BorrowResponse

BORROW_SECONDS = 2.0
"""Longest wait of a program for an answer. The daemon answers before."""
PAUSE_SECONDS = 10.0
"""Time without requests after one that the daemon did not answer in time."""


class Borrowing:
    """The requests of this process for room on a device: after a failed allocation, the daemon flushes other programs
    for this one. The program's thread waits for the answer, and the agent's thread sends the request.

    ``wake`` makes the agent's thread send them; set while a daemon is connected.
    """

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self.wake: Callable[[], None] | None = None
        self._outgoing: deque[BorrowRequest] = deque()
        self._waiting: dict[str, tuple[threading.Event, list[BorrowResponse]]] = {}
        self._paused_until = 0.0

    def request(self, device_uuid: str | None, size_bytes: int | None) -> BorrowResponse | None:
        """Ask for room and wait for the answer; None without one. Never raises.

        ``device_uuid``: None if it is unknown; the daemon then takes the only device of the program.
        """
        wake = self.wake
        is_agent_thread = threading.current_thread().name == "gpumond-agent"
        if wake is None or not size_bytes or is_agent_thread or time.monotonic() < self._paused_until:
            return None
        request = BorrowRequest(uuid.uuid4().hex, size_bytes, device_uuid or "")
        answer_event, answers = self._waiting[request.id] = threading.Event(), list[BorrowResponse]()
        self._outgoing.append(request)
        try:
            wake()
            if not answer_event.wait(BORROW_SECONDS):
                self._paused_until = time.monotonic() + PAUSE_SECONDS
        finally:
            self._waiting.pop(request.id, None)
        return answers[0] if answers else None

    def take_outgoing(self) -> list[BorrowRequest]:
        """Return the requests to send, once."""
        requests: list[BorrowRequest] = []
        while self._outgoing:
            requests.append(self._outgoing.popleft())
        return [request for request in requests if request.id in self._waiting]

    def deliver(self, answer: BorrowResponse) -> None:
        """Pass an answer to the thread that waits for it."""
        wait = self._waiting.get(answer.id)
        if wait is not None:
            wait[1].append(answer)
            wait[0].set()

    def cancel_waits(self) -> None:
        """End all waits: no answer will arrive."""
        self.wake = None
        self._outgoing.clear()
        for answer_event, _ in list(self._waiting.values()):
            answer_event.set()


BORROWING = Borrowing()
