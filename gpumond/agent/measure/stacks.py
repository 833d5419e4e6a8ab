"""Python stacks: file, line and function of each call, and no values. Nothing here runs the program's code."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from types import CodeType, FrameType

import gpumond
from gpumond.agent.allocators.adapters import ADAPTERS, MAX_FUNCTION, to_call
from gpumond.facts.messages import printable_text
from gpumond.facts.program import Call, ThreadStack

MAX_END_CALLS = 16
"""Number of innermost, and of outermost calls of a stack; those between them are omitted."""
MAX_THREADS = 4
MAX_THREAD_CALLS = 12
MAX_DEPTH = 512
MAX_SEARCHED_THREADS, MAX_SEARCHED_CALLS = 64, 32

AGENT_DIRECTORY = os.path.join(os.path.dirname(os.path.abspath(gpumond.__file__)), "agent", "")
LIBRARIES = tuple(spec.library for spec in ADAPTERS if spec.library != "gpumond.agent.allocators.cuda")


def of_error(error: BaseException) -> tuple[tuple[Call, ...], int]:
    """Return the calls that led to an error, innermost first, and the number of omitted ones."""
    traceback = error.__traceback__
    if traceback is None:
        return (), 0
    outer = traceback.tb_frame.f_back
    inner: list[tuple[CodeType, int]] = []
    while traceback is not None and len(inner) < MAX_DEPTH:
        inner.append((traceback.tb_frame.f_code, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _shorten([*reversed(inner), *_walk(outer)])


def of_thread(ident: int | None) -> tuple[tuple[Call, ...], int]:
    """Return the present calls of another thread, innermost first, and the number of omitted ones."""
    return _shorten(list(_walk(None if ident is None else sys._current_frames().get(ident))))


def of_allocating_threads() -> tuple[ThreadStack, ...]:
    """Return the stacks of other threads that are inside a library with an allocator, those deepest in it first."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # a frame that refers to itself would keep the program's variables
    names: dict[int, str] = {ident: thread.name for ident, thread in dict(getattr(threading, "_active", {})).items()}
    threads: list[tuple[int, str, FrameType]] = []
    for ident, frame in islice(frames.items(), MAX_SEARCHED_THREADS):
        depth = _library_depth(frame)
        if depth is not None:
            threads.append((depth, names.get(ident, "unnamed"), frame))
    threads.sort(key=lambda entry: entry[:2])
    return tuple(
        ThreadStack(
            printable_text(name)[:MAX_FUNCTION], tuple(_call(*call) for call in islice(_walk(frame), MAX_THREAD_CALLS))
        )
        for _, name, frame in threads[:MAX_THREADS]
    )


def _library_depth(frame: FrameType | None) -> int | None:
    """Return the number of calls above the innermost one in a library with an allocator; None without one."""
    for depth in range(MAX_SEARCHED_CALLS):
        if frame is None:
            return None
        module = frame.f_globals.get("__name__")
        if type(module) is str and any(module == name or module.startswith(f"{name}.") for name in LIBRARIES):
            return depth
        frame = frame.f_back
    return None


def _walk(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    for _ in range(MAX_DEPTH):
        if frame is None:
            return
        yield frame.f_code, frame.f_lineno or 0
        frame = frame.f_back


def _shorten(calls: list[tuple[CodeType, int]]) -> tuple[tuple[Call, ...], int]:
    calls = [(code, line) for code, line in calls if not code.co_filename.startswith(AGENT_DIRECTORY)]
    omitted = max(0, len(calls) - 2 * MAX_END_CALLS)
    if omitted:
        calls = calls[:MAX_END_CALLS] + calls[-MAX_END_CALLS:]
    return tuple(_call(code, line) for code, line in calls), omitted


def _call(code: CodeType, line: int) -> Call:
    function = getattr(code, "co_qualname", code.co_name)  # 3.11
    return to_call(code.co_filename, line, function)
