"""Keeps the GIL while the agent's thread reads objects that the program's other threads use.

- A thread fails to build a tuple, with SystemError, if something else refers to it, such as the list of all objects.
- A thread that resets a gradient (``parameter.grad = None``) frees it first, may release the GIL meanwhile, and only
  then clears the reference: a reader would use freed memory, and crash the program. In a backward pass, PyTorch's own
  threads replace gradients without the GIL.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from opcode import opmap
from types import FrameType

from gpumond.agent.allocators.adapters import TensorsBusy

WAIT_SECONDS = 2.0
"""Longest wait for the end of a backward pass."""
POLL_SECONDS = 0.001
SWITCH_INTERVAL_SECONDS = 1.0
"""Time for which other threads let this one keep the GIL, longer than a search of the heap takes."""
ATTRIBUTE_CHANGES = frozenset(opmap[name] for name in ("STORE_ATTR", "DELETE_ATTR"))


def has_gil() -> bool:
    """Return False in a free-threaded Python (3.13 and later)."""
    return getattr(sys, "_is_gil_enabled", lambda: True)()


@contextmanager
def gil_held() -> Iterator[None]:
    """Let no other thread run Python, and run no finalizers. The code inside may do no I/O, which releases the GIL.

    Raises TensorsBusy in a free-threaded Python.
    """
    if not has_gil():
        raise TensorsBusy("this Python runs without the GIL, so objects can't be read while the program changes them")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    try:
        time.sleep(0)  # threads that already wait for the GIL would request it after the previous interval
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
    finally:
        sys.setswitchinterval(interval)


@contextmanager
def tensors_unchanged(seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Hold the GIL from a moment on at which no other thread changes gradients. ``seconds``: the longest wait for it.

    Raises TensorsBusy.
    """
    deadline = time.monotonic() + seconds
    while True:
        with gil_held():
            if not _are_gradients_changing():
                yield
                return
        if time.monotonic() > deadline:
            raise TensorsBusy("the program changes its gradients (a backward pass is in progress); try again")
        time.sleep(POLL_SECONDS)


def _are_gradients_changing() -> bool:
    """Return whether another thread is in a backward pass, or resets a gradient."""
    this_thread = threading.get_ident()
    return any(
        _changes_gradients(frame)
        for ident, innermost in sys._current_frames().items()
        if ident != this_thread
        for frame in _callers(innermost)
    )


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _changes_gradients(frame: FrameType) -> bool:
    names = frame.f_code.co_names
    return "run_backward" in names or ("grad" in names and frame.f_code.co_code[frame.f_lasti] in ATTRIBUTE_CHANGES)
