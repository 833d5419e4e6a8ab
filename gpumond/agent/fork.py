"""How to start a thread again after a fork without Python's warning of a fork with threads (since 3.12).

Python counts the threads when the at-fork functions have run, so that one of them is too early to start one.
The main thread is then asked to do it between two of its bytecodes (Py_AddPendingCall), once it is back in the
frame that forked, or out of it.
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


def gone(thread: threading.Thread) -> None:
    """Waits until the system, too, has ended a thread that has been joined: before 3.13 join() was early."""
    deadline = time.monotonic() + SECONDS
    while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < deadline:
        time.sleep(0)


def call_soon(call: Callable[[], None], forking: FrameType | None) -> None:
    """Calls it when the fork that the frame is at is over; at once where nothing warns, or there is no other way."""
    if not WARNS or threading.current_thread() is not threading.main_thread():
        call()
        return
    from gpumond.agent.pending_calls import ask

    deadline = time.monotonic() + SECONDS
    called = False

    def pending() -> None:
        nonlocal called
        if not called and not (_inside(forking) and time.monotonic() < deadline and ask(pending)):
            called = True
            call()

    asked = ask(pending)
    # Twice: from 3.13 on, what the last call in the queue asks for is forgotten.
    if not (ask(pending) or asked):
        call()


def _inside(frame: FrameType | None) -> bool:
    """Whether the interrupted code was called from that frame, as at-fork functions are."""
    caller = sys._getframe(3)  # behind this one, the pending call, and who makes it
    above = caller.f_back
    while above is not None and above is not frame:
        above = above.f_back
    return above is not None and caller is not frame
