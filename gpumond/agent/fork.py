"""Restart of a thread after a fork, without Python's warning of a fork with threads (since 3.12).

Python counts the threads after the at-fork functions have run, so that such a function must not start one. The main
thread starts it later, between two of its bytecodes (Py_AddPendingCall), when it has returned to or left the frame that
forked.
"""

from __future__ import annotations

import os
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

WARNS = sys.version_info >= (3, 12)
SECONDS = 0.05


def wait_until_ended(thread: threading.Thread) -> None:
    """Wait until the system has also ended a thread that was joined: before 3.13 join() returned early."""
    deadline = time.monotonic() + SECONDS
    while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < deadline:
        time.sleep(0)


def call_soon(call: Callable[[], None], forking: FrameType | None) -> None:
    """Call it when the fork in the frame is over; at once if there is no warning, or no other way."""
    if not WARNS or threading.current_thread() is not threading.main_thread():
        call()
        return
    from gpumond.agent.pending_calls import add

    deadline = time.monotonic() + SECONDS
    called = False

    def pending() -> None:
        nonlocal called
        if not called and not (_inside(forking) and time.monotonic() < deadline and add(pending)):
            called = True
            call()

    added = add(pending)
    # Twice: from 3.13 on, a call that is added by the last call in the queue is lost.
    if not (add(pending) or added):
        call()


def _inside(frame: FrameType | None) -> bool:
    """Return whether the interrupted code was called from that frame, as at-fork functions are."""
    caller = sys._getframe(3)  # skips this frame, the pending call and its caller
    outer = caller.f_back
    while outer is not None and outer is not frame:
        outer = outer.f_back
    return outer is not None and caller is not frame
