"""Calls that the main thread makes between two of its bytecodes (Py_AddPendingCall).

It makes none while it waits inside a library, so the requester sets a deadline. Exceptions that a signal handler
of the program raises during a call are passed on to the program.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, TypeVar

from gpumond.agent.interpreter import is_main_interpreter

ResultT = TypeVar("ResultT")

_pending_calls: deque[Callable[[], None]] = deque()
_c_callback: Any = None


class MainThreadBusy(Exception):
    """The main thread did not make the call in time, or cannot. Nothing was done, and nothing will be."""


def add_pending_call(call: Callable[[], None]) -> bool:
    """Add a call that the main thread makes once, soon; return False if it cannot."""
    global _c_callback
    try:
        import ctypes
    except ImportError:  # not every interpreter has it
        return False
    if not is_main_interpreter():
        return False
    if _c_callback is None:
        _c_callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_make_next_call)  # global: it may be on the stack
    _pending_calls.append(call)
    if ctypes.pythonapi.Py_AddPendingCall(_c_callback, None) == 0:
        return True
    _pending_calls.remove(call)
    return False


def run_in_main_thread(call: Callable[[], ResultT], seconds: float) -> ResultT:
    """Return the call's result from the main thread, or raise its error. Raises MainThreadBusy."""
    if threading.current_thread() is threading.main_thread():
        return call()
    pending = _PendingCall(call)
    if not add_pending_call(pending.make):
        raise MainThreadBusy("the main thread has too many pending calls")
    return pending.wait(seconds)


class _PendingCall(Generic[ResultT]):
    def __init__(self, call: Callable[[], ResultT]) -> None:
        self._call, self._pid = call, os.getpid()
        self._start_lock, self._end_event = threading.Lock(), threading.Event()
        self._values: list[ResultT] = []
        self._error: Exception | None = None

    def make(self) -> None:
        if self._pid != os.getpid() or not self._start_lock.acquire(blocking=False):
            return  # a call of the parent of a forked child, or too late
        try:
            self._values.append(self._call())
        except BaseException as error:
            if _is_from_signal_handler(error):
                self._error = MainThreadBusy("a signal handler of the program interrupted the step")
                raise
            self._error = error if isinstance(error, Exception) else MainThreadBusy(repr(error))
        finally:
            self._end_event.set()

    def wait(self, seconds: float) -> ResultT:
        if not self._end_event.wait(seconds) and self._start_lock.acquire(blocking=False):
            raise MainThreadBusy(f"the main thread was busy and didn't run the step in {seconds:g} s")
        self._end_event.wait()
        if self._error is not None:
            raise self._error
        return self._values[0]


def _make_next_call(_: object) -> int:
    try:
        _pending_calls.popleft()()
    except BaseException as error:
        if _is_from_signal_handler(error):
            threading.Thread(target=_raise_in_main_thread, args=(error,), daemon=True).start()
    return 0


def _is_from_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler of the program raised it: handlers run in this thread, at any moment."""
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(handler, "__code__", None) for handler in handlers} - {None}
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code not in codes:
        frame = frame.tb_next
    return frame is not None


def _raise_in_main_thread(error: BaseException) -> None:
    """Raise this error in the main thread when it has returned to the program: ctypes would only print it."""
    import ctypes

    kind, main_ident = type(error), threading.main_thread().ident or 0
    # The interpreter accepts a class and creates the instance. Only KeyboardInterrupt itself ends a program as such.
    exception = kind if kind is KeyboardInterrupt else type(kind.__name__, (kind,), {"__new__": lambda *_: error})
    while _is_making_call(sys._current_frames().get(main_ident)):
        time.sleep(0.001)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main_ident), ctypes.py_object(exception))


def _is_making_call(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _make_next_call.__code__:
        frame = frame.f_back
    return frame is not None
