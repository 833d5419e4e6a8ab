"""The agent: reports this program's GPU allocators to gpumond's daemon, and flushes them on its request.

It imports no library that the program has not imported, initializes nothing, and creates no CUDA context. Its functions
raise only for wrong arguments. Without a daemon, `flush` and `report` work all the same, and nothing is logged.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # an import of typing would add to the cost of importing this module
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TypeVar, overload

    from gpumond.agent.measure.scopes import Scope
    from gpumond.agent.settings import Hook as RegisteredHook
    from gpumond.agent.thread import AgentThread
    from gpumond.facts.pools import FlushPolicy, PoolUsage, Receipt
    from gpumond.facts.program import AppliedLimit, Dump, Program

    Hook = TypeVar("Hook", bound=Callable[[], int | None])
    Estimate = int | Callable[[], int | None] | None
    F = TypeVar("F", bound=Callable[..., Any])
    End = TypeVar("End", bound=Callable[[], object])
    Smaller = tuple[Any, ...] | dict[str, Any] | None
else:

    def overload(function):
        return function


__all__ = [
    "flush",
    "limit",
    "on_end_request",
    "on_flush",
    "program",
    "report",
    "retry_on_oom",
    "scope",
    "snapshot",
    "start",
    "step",
    "stop",
]

REPORT_SECONDS = 0.1
"""Longest wait of `report` for a reading of the agent's own thread."""

_thread: AgentThread | None = None
_hooks: list[RegisteredHook] = []
_end_functions: list[Callable[[], object]] = []
_mark_step: Callable[[], None] | None = None


def start(
    workload: str | None = None,
    flush_policy: FlushPolicy | None = None,
    socket: str | None = None,
    main_thread: bool | None = None,
    allow_limit: bool | None = None,
    observe_ooms: bool | None = None,
    suspendable: bool | None = None,
) -> None:
    """Start the agent, or change its settings. A value of None keeps the setting, or takes it from the environment.

    ``workload`` (``GPUMOND_WORKLOAD``) is the name under which the program's memory is shown, such as
    ``llama:70b@node``. ``flush_policy`` (``GPUMOND_FLUSH_POLICY``): ``allow`` flushes whenever the
    daemon requests it, ``step`` only inside `step`, ``never`` refuses. ``socket`` (``GPUMOND_SOCKET``) is the daemon's
    path. ``main_thread`` (``GPUMOND_MAIN_THREAD=1``) permits steps that are safe in the main thread only: a flush
    interrupts it between two bytecodes. ``allow_limit`` (``GPUMOND_ALLOW_LIMIT=1``) permits an administrator to call
    `limit` from outside. ``observe_ooms`` (``GPUMOND_OBSERVE_OOMS=1``) registers for out-of-memory errors with PyTorch,
    for a snapshot of the memory before each error is raised; PyTorch has no way to unregister.
    ``suspendable`` (``GPUMOND_SUSPENDABLE=1``) permits the daemon to suspend the program while it is idle: its device
    memory moves to the host, and its calls of CUDA wait until it is resumed.
    """
    from gpumond.agent.settings import Settings

    global _thread
    settings = _thread.settings if _thread is not None else Settings(_hooks, _end_functions)
    settings.change(workload, flush_policy, socket, main_thread, allow_limit, observe_ooms, suspendable)
    if not hasattr(os, "register_at_fork"):
        return  # a system without Unix sockets and fork
    if _thread is None:
        from gpumond.agent.thread import AgentThread

        _thread = AgentThread(settings)
    _thread.start()


def stop() -> None:
    """Stop the agent and notify the daemon. `start` starts it again."""
    if _thread is not None:
        _thread.stop()


def step() -> None:
    """Mark the end of a step of the program's work. With flush_policy ``step``, flushes run here and nowhere else.

    Call it between two steps. It costs less than a microsecond, and once a second a reading of the allocators, from
    which the reports compute the steps per second and the memory that each step keeps.
    """
    global _mark_step
    if _mark_step is None:
        from gpumond.agent.measure.steps import STEPS

        _mark_step = STEPS.mark
    _mark_step()
    if _thread is not None and _thread.waiting:
        _thread.step()


@overload
def on_flush(function: Hook, *, estimate: Estimate = None) -> Hook: ...
@overload
def on_flush(function: None = None, *, estimate: Estimate = None) -> Callable[[Hook], Hook]: ...  # noqa: F811
def on_flush(function: Any = None, *, estimate: Estimate = None) -> Any:  # noqa: F811
    """Register a function that empties a cache of the program: ``on_flush(drop)``, or the decorators ``@on_flush`` and
    ``@on_flush(estimate=cache_size)``.

    It runs in the flush step ``hooks``, in the thread that flushes, and returns the number of bytes that it freed, or
    None. ``estimate`` is the number of bytes that it will free, or a function that returns this number; plans contain
    it. Without an estimate, a plan with the step ``hooks`` is an interval from 0 to all bytes that the allocators hold.
    """
    if estimate is not None and not callable(estimate):
        if not isinstance(estimate, int) or isinstance(estimate, bool):
            raise TypeError(f"on_flush: estimate: expected bytes as int, or a function, got {type(estimate).__name__}")
        if estimate < 0:
            raise ValueError(f"on_flush: estimate: expected at least 0 bytes, got {estimate}")
    if function is None:
        return lambda function: on_flush(function, estimate=estimate)
    if not callable(function):
        raise TypeError(f"on_flush: expected a function without arguments, got {type(function).__name__}")
    _hooks.append((function, estimate))
    return function


def on_end_request(function: End) -> End:
    """Register a function that is called when the daemon asks an idle program to end: ``on_end_request(stop.set)``, or
    the decorator ``@on_end_request``.

    It runs in a thread of its own, and decides: it may end the program, or ignore the request. Without such a function,
    the daemon does not ask. gpumond itself ends no program.
    """
    if not callable(function):
        raise TypeError(f"on_end_request: expected a function without arguments, got {type(function).__name__}")
    _end_functions.append(function)
    return function


def flush(steps: Sequence[str] = ("ipc", "cache", "trim"), dry_run: bool = False) -> list[Receipt]:
    """Flush every allocator of this process in the calling thread, whatever the policy; ``dry_run`` only predicts.

    Returns one receipt for each pool, without the driver's count, which only the daemon has.
    """
    from gpumond.agent import registry

    registry.check_steps(steps)
    workload, main_thread = (_thread.settings.workload, _thread.settings.main_thread) if _thread else ("", False)
    return registry.receipts(steps, bool(dry_run), _hooks, workload, main_thread)


def scope(name: str, flush: bool = False, gc: bool = False) -> Scope:
    """Measure the bytes that a block keeps and its peak: a context manager and decorator.

    Nested blocks have names such as ``epoch/forward``. ``with scope("epoch") as block``: the `Block` contains the
    result when it has ended. ``flush`` flushes at the end of the block; with ``gc``, after a garbage collection, for
    memory that only reference cycles hold. ``name``: 1 to 64 characters of ``[A-Za-z0-9._/-]``.
    """
    from gpumond.agent.measure.scopes import Scope, check

    check(name, flush, gc)
    return Scope(name, (_collect_and_flush if gc else _flush_all) if flush else None)


@overload
def retry_on_oom(
    function: F, *, shrink: Callable[..., Smaller] | None = None, attempts: int = 3, gc: bool = True
) -> F: ...
@overload
def retry_on_oom(  # noqa: F811
    function: None = None, *, shrink: Callable[..., Smaller] | None = None, attempts: int = 3, gc: bool = True
) -> Callable[[F], F]: ...
def retry_on_oom(  # noqa: F811
    function: Any = None, *, shrink: Any = None, attempts: int = 3, gc: bool = True
) -> Any:
    """Retry a function after a flush when it runs out of device memory: ``retry_on_oom(train)(batch)``, or the
    decorators ``@retry_on_oom`` and ``@retry_on_oom(shrink=halve)``.

    ``shrink`` is called with the arguments and returns smaller ones: a tuple of positional arguments, a dict of keyword
    arguments to replace, or None if they cannot be smaller. After ``attempts`` attempts the last error is raised
    unchanged. ``gc`` collects garbage before the last attempt, for memory that only reference cycles hold.
    """
    from gpumond.agent.measure.oom import check_retry, wrap_retry

    check_retry(shrink, attempts, gc)
    last = _collect_and_flush if gc else _flush_all
    if function is None:
        return lambda function: wrap_retry(function, shrink, attempts, _flush_all, last)
    return wrap_retry(function, shrink, attempts, _flush_all, last)


def limit(bytes: int | None, device: str | int | None = None) -> tuple[AppliedLimit, ...]:
    """Limit each of the program's own allocators on each device; None removes the limit. Returns the results.

    ``device``: a UUID, the program's own device number, or None for all devices in use. PyTorch and CuPy can be
    limited; the result of another allocator contains the reason.
    """
    from gpumond.agent.registry import apply_limit, check_limit

    check_limit(bytes, device)
    return apply_limit(bytes, device)


def snapshot(path: str | os.PathLike[str]) -> Dump:
    """Write the framework's own memory snapshot, at most 256 MiB, readable by this user alone.

    PyTorch's is for https://pytorch.org/memory_viz. If no file was written, ``path`` of the result is None and
    ``reason`` explains it.
    """
    from gpumond.agent.measure import snapshots

    return snapshots.write(snapshots.checked_path(path))


def program() -> Program:
    """Return the totals of this program's scopes, steps and out-of-memory errors."""
    from gpumond.agent.program_report import is_rank, program_report

    return program_report(is_rank())


def report() -> tuple[PoolUsage, ...]:
    """Return the allocators' current pools; empty while a flush is in progress."""
    from gpumond.agent import registry

    registry.REGISTRY.adapters()
    return registry.REGISTRY.read(REPORT_SECONDS) or ()


def _flush_all() -> None:
    flush()


def _collect_and_flush() -> None:
    import gc

    gc.collect()
    flush()
