"""Reads tensors while no other thread of the program changes them.

The agent's thread must not read a gradient while another thread resets it (``parameter.grad = None``): PyTorch frees
the old gradient first, may release the GIL meanwhile, and only then clears the reference, so a reader would use freed
memory and crash the program. In a backward pass, PyTorch's own threads replace gradients without the GIL.
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


@contextmanager
def threads_paused(seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Keep the GIL from a moment on at which no other thread changes gradients, and run no finalizers.

    The code inside may do nothing that releases the GIL, such as I/O. Raises TensorsBusy after ``seconds``.
    """
    deadline, interval = time.monotonic() + seconds, sys.getswitchinterval()
    try:
        while True:
            sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
            time.sleep(0)  # threads that already wait for the GIL would request it after the previous interval
            if not _are_gradients_changing():
                break
            sys.setswitchinterval(interval)
            if time.monotonic() > deadline:
                raise TensorsBusy("the program changes its gradients (a backward pass is in progress); try again")
            time.sleep(POLL_SECONDS)
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
    finally:
        sys.setswitchinterval(interval)


def _are_gradients_changing() -> bool:
    """Return whether another thread is in a backward pass, or resets a gradient."""
    own = threading.get_ident()
    return any(
        _changes_gradients(frame)
        for ident, innermost in sys._current_frames().items()
        if ident != own
        for frame in _callers(innermost)
    )


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _changes_gradients(frame: FrameType) -> bool:
    names = frame.f_code.co_names
    return "run_backward" in names or ("grad" in names and frame.f_code.co_code[frame.f_lasti] in ATTRIBUTE_CHANGES)
