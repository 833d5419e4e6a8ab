"""The agent: reports this program's GPU allocators to gpumond's daemon, and flushes them when told.

It is a guest. It imports no library that the program has not imported, initialises nothing, creates no
CUDA context, and its calls raise only for wrong arguments. Without a daemon it is quiet, and `flush` and
`report` work all the same.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # typing's own costs an import, and this module must cost nothing
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from gpumond.agent.loop import Loop
    from gpumond.model import FlushPolicy, PoolUsage, Receipt

    Hook = TypeVar("Hook", bound=Callable[[], int | None])

__all__ = ["flush", "on_flush", "report", "start", "step", "stop"]

POLICIES: tuple[FlushPolicy, ...] = ("allow", "step", "never")
MAX_WORKLOAD = 64
REPORT_SECONDS = 0.1
"""So long `report` waits for a reading of the agent's own thread."""
_WORKLOAD = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._/-")

_loop: Loop | None = None
_hooks: list[Callable[[], int | None]] = []


def start(workload: str | None = None, flush_policy: FlushPolicy | None = None, socket: str | None = None) -> None:
    """Starts the agent, or changes what it was started with; what is None stays, or is taken from the environment.

    ``workload`` is the name under which the program's memory is shown (``GPUMOND_WORKLOAD``): 1 to 64 of
    ``[A-Za-z0-9._/-]``. ``flush_policy`` (``GPUMOND_FLUSH_POLICY``): ``allow`` flushes whenever the daemon asks,
    ``step`` only inside `step`, ``never`` refuses. ``socket`` (``GPUMOND_SOCKET``) is the daemon's path.
    """
    if workload is not None:
        check_workload(workload)
    if flush_policy is not None and flush_policy not in POLICIES:
        raise ValueError(f"flush_policy: expected one of {', '.join(POLICIES)}, got {flush_policy!r}")
    if socket is not None:
        if not isinstance(socket, str):
            raise TypeError(f"socket: expected a path as str, got {type(socket).__name__}")
        if not socket or "\0" in socket:
            raise ValueError("socket: expected the path of a Unix socket")
    if not hasattr(os, "register_at_fork"):
        return  # not a system with Unix sockets and fork
    global _loop
    if _loop is None:
        from gpumond.agent.loop import Loop

        _loop = Loop(_hooks)
    _loop.start(workload, flush_policy, socket)


def stop() -> None:
    """Ends the agent and tells the daemon so. `start` starts it again."""
    if _loop is not None:
        _loop.stop()


def step() -> None:
    """A moment at which a flush disturbs nothing; with flush_policy ``step``, flushes happen here and only here.

    Call it between two steps of the program's work. Without a flush to do it costs less than a microsecond.
    """
    if _loop is not None and _loop.waiting:
        _loop.step()


def on_flush(function: Hook) -> Hook:
    """Registers a function that empties a cache of the program's own; can be used as a decorator.

    It runs in the flush step ``hooks``, in the thread that flushes, and returns the bytes that it let go of, or None.
    """
    if not callable(function):
        raise TypeError(f"on_flush: expected a function without arguments, got {type(function).__name__}")
    _hooks.append(function)
    return function


def flush(steps: Sequence[str] = ("ipc", "cache", "trim"), dry_run: bool = False) -> list[Receipt]:
    """Flushes every allocator of this process, here and now, whatever the policy; ``dry_run`` only predicts.

    One receipt per pool, without the driver's count, which only the daemon has.
    """
    from gpumond.agent import levers

    levers.check_steps(steps)
    return levers.receipts(steps, bool(dry_run), _hooks, _loop.workload if _loop else "")


def report() -> tuple[PoolUsage, ...]:
    """The allocators' pools as they are now; empty while a flush is under way."""
    from gpumond.agent import levers

    return levers.LEVERS.read(REPORT_SECONDS) or ()


def check_workload(workload: str) -> str:
    """The name, if it can be one. Raises TypeError, ValueError."""
    if not isinstance(workload, str):
        raise TypeError(f"workload: expected str, got {type(workload).__name__}")
    if not 1 <= len(workload) <= MAX_WORKLOAD or not _WORKLOAD.issuperset(workload):
        raise ValueError(f"workload: expected 1 to {MAX_WORKLOAD} characters of [A-Za-z0-9._/-], got {workload!r:.80}")
    return workload
