"""Work for the main thread, which it does between two of its bytecodes (Py_AddPendingCall).

It does none while it waits inside a library, so that whoever asks sets a deadline. What a signal handler of the
program raises meanwhile goes on to the program.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_calls: deque[Callable[[], None]] = deque()
_function: Any = None


class Busy(Exception):
    """The main thread did not come round in time, or cannot be asked. Nothing was done, and nothing will be."""


def ask(call: Callable[[], None]) -> bool:
    """Has the main thread make the call once, soon; False if it will not."""
    global _function
    try:
        import ctypes
    except ImportError:  # not every interpreter has it
        return False
    if not _is_main_interpreter():
        return False
    if _function is None:
        _function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_next)  # kept: it may be on the stack
    _calls.append(call)
    if ctypes.pythonapi.Py_AddPendingCall(_function, None) == 0:
        return True
    _calls.remove(call)
    return False


def run(call: Callable[[], T], seconds: float) -> T:
    """The call's own answer, or error, from the main thread. Raises Busy."""
    if threading.current_thread() is threading.main_thread():
        return call()
    task = _Task(call)
    if not ask(task.carry_out):
        raise Busy("the main thread cannot be asked")
    return task.answer(seconds)


class _Task(Generic[T]):
    def __init__(self, call: Callable[[], T]) -> None:
        self._call, self._pid = call, os.getpid()
        self._begun, self._over = threading.Lock(), threading.Event()
        self._values: list[T] = []
        self._error: Exception | None = None

    def carry_out(self) -> None:
        if self._pid != os.getpid() or not self._begun.acquire(blocking=False):
            return  # a forked child's queue is its parent's; or it is too late
        try:
            self._values.append(self._call())
        except BaseException as error:
            if _is_the_programs(error):
                self._error = Busy("the program interrupted it")
                raise
            self._error = error if isinstance(error, Exception) else Busy(repr(error))
        finally:
            self._over.set()

    def answer(self, seconds: float) -> T:
        if not self._over.wait(seconds) and self._begun.acquire(blocking=False):
            raise Busy(f"main thread busy: it did not come round in {seconds:g} s")
        self._over.wait()
        if self._error is not None:
            raise self._error
        return self._values[0]


def _is_main_interpreter() -> bool:
    """It is that one which makes the call, whichever has asked for it."""
    import ctypes

    api = ctypes.pythonapi
    main, this = api.PyInterpreterState_Main, api.PyInterpreterState_Get
    main.restype = this.restype = ctypes.c_void_p
    return bool(main() == this())


def _next(_: object) -> int:
    try:
        _calls.popleft()()
    except BaseException as error:
        if _is_the_programs(error):
            threading.Thread(target=_raise_in_main, args=(error,), daemon=True).start()
    return 0


def _is_the_programs(error: BaseException) -> bool:
    """Whether one of its signal handlers raised it: they run in this thread, and at any moment."""
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code not in handlers:
        frame = frame.tb_next
    return frame is not None


def _code(handler: Any) -> CodeType | None:
    return getattr(handler, "__code__", None)  # a bound method hands on its function's


def _raise_in_main(error: BaseException) -> None:
    """Raises this very error in the main thread, once it is back in the program: ctypes would only print it."""
    import ctypes

    kind, main = type(error), threading.main_thread().ident or 0
    # The interpreter takes a class, and makes the instance itself. An interrupt ends a program by its very class.
    again = kind if kind is KeyboardInterrupt else type(kind.__name__, (kind,), {"__new__": lambda *_: error})
    while _is_in_next(sys._current_frames().get(main)):
        time.sleep(0.001)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(again))


def _is_in_next(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _next.__code__:
        frame = frame.f_back
    return frame is not None
