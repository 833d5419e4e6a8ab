"""Python stacks: file, line and function of each call, and no values. Nothing here runs the program's code."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from types import CodeType, FrameType

import gpumond
from gpumond.agent.allocators.adapters import ADAPTERS
from gpumond.facts.messages import printable_text
from gpumond.facts.program import Call, ThreadStack

ENDS = 16
"""Number of innermost, and of outermost calls of a stack; those between them are omitted."""
MAX_THREADS = 4
THREAD_CALLS = 12
MAX_DEPTH = 512
SEARCHED_THREADS, SEARCHED_CALLS = 64, 32
MAX_FILE, MAX_FUNCTION = 160, 80

OWN = os.path.join(os.path.dirname(os.path.abspath(gpumond.__file__)), "agent", "")
LIBRARIES = tuple(spec.library for spec in ADAPTERS if spec.library != "gpumond.agent.allocators.cuda")


def of_error(error: BaseException) -> tuple[tuple[Call, ...], int]:
    """Return the calls that led to an error, innermost first, and the number of omitted ones."""
    at = error.__traceback__
    if at is None:
        return (), 0
    outer = at.tb_frame.f_back
    inner: list[tuple[CodeType, int]] = []
    while at is not None and len(inner) < MAX_DEPTH:
        inner.append((at.tb_frame.f_code, at.tb_lineno))
        at = at.tb_next
    return _shortened([*reversed(inner), *_walk(outer)])


def of_thread(ident: int | None) -> tuple[tuple[Call, ...], int]:
    """Return the present calls of another thread, innermost first, and the number of omitted ones."""
    return _shortened(list(_walk(None if ident is None else sys._current_frames().get(ident))))


def of_allocating_threads() -> tuple[ThreadStack, ...]:
    """Return the stacks of other threads that are inside a library with an allocator, those deepest in it first."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # a frame that refers to itself would keep the program's variables
    names: dict[int, str] = {ident: thread.name for ident, thread in dict(getattr(threading, "_active", {})).items()}
    found: list[tuple[int, str, FrameType]] = []
    for ident, frame in islice(frames.items(), SEARCHED_THREADS):
        depth = _library_depth(frame)
        if depth is not None:
            found.append((depth, names.get(ident, "unnamed"), frame))
    found.sort(key=lambda one: one[:2])
    return tuple(
        ThreadStack(printable_text(name)[:MAX_FUNCTION], tuple(_call(*at) for at in islice(_walk(frame), THREAD_CALLS)))
        for _, name, frame in found[:MAX_THREADS]
    )


def _library_depth(frame: FrameType | None) -> int | None:
    """Return the number of calls above the innermost one in a library with an allocator; None without one."""
    for depth in range(SEARCHED_CALLS):
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


def _shortened(calls: list[tuple[CodeType, int]]) -> tuple[tuple[Call, ...], int]:
    calls = [(code, line) for code, line in calls if not code.co_filename.startswith(OWN)]
    omitted = max(0, len(calls) - 2 * ENDS)
    if omitted:
        calls = calls[:ENDS] + calls[-ENDS:]
    return tuple(_call(code, line) for code, line in calls), omitted


def _call(code: CodeType, line: int) -> Call:
    function = getattr(code, "co_qualname", code.co_name)  # 3.11
    return Call(printable_text(code.co_filename[-MAX_FILE:]), line, printable_text(function[-MAX_FUNCTION:]))
