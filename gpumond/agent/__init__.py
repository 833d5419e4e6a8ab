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
    from gpumond.agent.settings import Hook
    from gpumond.agent.thread import AgentThread
    from gpumond.facts.pools import FlushPolicy, PoolUsage, Receipt
    from gpumond.facts.program import AppliedLimit, Dump, Program

    HookFunction = TypeVar("HookFunction", bound=Callable[[], int | None])
    Estimate = int | Callable[[], int | None] | None
    FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
    EndFunction = TypeVar("EndFunction", bound=Callable[[], object])
    SmallerArguments = tuple[Any, ...] | dict[str, Any] | None
else:

    def overload(function):
        return function


__all__ = [
    "flush",
    "limit",
    "on_end_request",
    "on_flush",
    "oom_pool",
    "program",
    "report",
    "retry_on_oom",
    "scope",
    "snapshot",
    "start",
    "step",
    "stop",
]

READ_TIMEOUT_SECONDS = 0.1
"""Longest wait of `report` for a reading of the agent's own thread."""

_thread: AgentThread | None = None
_hooks: list[Hook] = []
_end_functions: list[Callable[[], object]] = []
_mark_step: Callable[[], None] | None = None


def start(
    workload: str | None = None,
    flush_policy: FlushPolicy | None = None,
    socket: str | None = None,
    main_thread: bool | None = None,
    allow_limit: bool | None = None,
    suspendable: bool | None = None,
) -> None:
    """Start the agent in this program, or change its settings.

    Call it once, as early as you like; a later call changes only what it passes. None keeps a setting or, at the start,
    takes it from the environment variable in parentheses. Without a daemon, the agent waits silently for one.

    Args:
        workload: Name to show the program's memory under, such as ``llama:70b@node`` (``GPUMOND_WORKLOAD``).
        flush_policy: ``"allow"`` flushes whenever the daemon asks, ``"step"`` only inside `step`, ``"never"`` refuses
            (``GPUMOND_FLUSH_POLICY``; default ``"allow"``).
        socket: Path of the daemon's Unix socket (``GPUMOND_SOCKET``).
        main_thread: Permit flush steps that are safe in the main thread only; a flush then interrupts it between two
            bytecodes (``GPUMOND_MAIN_THREAD=1``).
        allow_limit: Permit you, administrators and quotas to limit the program from outside
            (``GPUMOND_ALLOW_LIMIT=1``).
        suspendable: Permit the daemon to suspend the program while it is idle: its GPU memory moves to the host, and
            its CUDA calls wait until it is resumed (``GPUMOND_SUSPENDABLE=1``).

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``workload`` or ``socket`` is empty, or ``flush_policy`` is unknown.

    Example:
        >>> import gpumond.agent
        >>> gpumond.agent.start(workload="llama-finetune")
    """
    from gpumond.agent.settings import AgentSettings

    global _thread
    settings = _thread.settings if _thread is not None else AgentSettings(_hooks, _end_functions)
    settings.change(workload, flush_policy, socket, main_thread, allow_limit, suspendable)
    if not hasattr(os, "register_at_fork"):
        return  # a system without Unix sockets and fork
    if _thread is None:
        from gpumond.agent.thread import AgentThread

        _thread = AgentThread(settings)
    _thread.start()


def stop() -> None:
    """Stop the agent, and notify the daemon. `start` starts it again.

    Example:
        >>> gpumond.agent.stop()
    """
    if _thread is not None:
        _thread.stop()


def step() -> None:
    """Mark the end of one step of your program, such as a training step.

    Call it between two steps. With ``flush_policy="step"``, flushes run here and nowhere else. It costs less than a
    microsecond, and once a second a reading of the allocators, from which the daemon derives the steps per second and
    the memory that each step retains.

    Example:
        >>> for batch in loader:
        ...     train(batch)
        ...     gpumond.agent.step()
    """
    global _mark_step
    if _mark_step is None:
        from gpumond.agent.measure.steps import STEPS

        _mark_step = STEPS.mark
    _mark_step()
    if _thread is not None and _thread.has_waiting_commands:
        _thread.on_training_step()


@overload
def on_flush(function: HookFunction, *, estimate: Estimate = None) -> HookFunction: ...
@overload
def on_flush(function: None = None, *, estimate: Estimate = None) -> Callable[[HookFunction], HookFunction]: ...  # noqa: F811
def on_flush(function: Any = None, *, estimate: Estimate = None) -> Any:  # noqa: F811
    """Register a function that empties a cache of your program when it is flushed.

    It runs in the flush step ``hooks``, in the thread that flushes, and returns the bytes that it freed, or None.

    Args:
        function: A function without arguments.
        estimate: Bytes that it will free, or a function that returns them, for the prediction of a flush. Without one,
            a prediction with ``hooks`` is an interval from 0 to all bytes that the allocators hold.

    Returns:
        The function, or a decorator if ``function`` is omitted.

    Raises:
        TypeError: ``function`` can't be called, or ``estimate`` is neither an int nor a function.
        ValueError: ``estimate`` is negative.

    Example:
        >>> @gpumond.agent.on_flush(estimate=lambda: cache.nbytes)
        ... def drop_cache():
        ...     freed = cache.nbytes
        ...     cache.clear()
        ...     return freed
    """
    if estimate is not None and not callable(estimate):
        if not isinstance(estimate, int) or isinstance(estimate, bool):
            raise TypeError(f"on_flush: estimate: expected bytes as int, or a function, got {type(estimate).__name__}")
        if estimate < 0:
            raise ValueError(f"on_flush: estimate must be at least 0 bytes, got {estimate}")
    if function is None:
        return lambda function: on_flush(function, estimate=estimate)
    if not callable(function):
        raise TypeError(f"on_flush: expected a function without arguments, got {type(function).__name__}")
    _hooks.append((function, estimate))
    return function


def on_end_request(function: EndFunction) -> EndFunction:
    """Register a function that is called when the daemon asks your idle program to exit.

    The function decides: it may end the program, or ignore the request. It runs in a thread of its own. Without such a
    function the daemon doesn't ask; gpumond itself terminates no program.

    Args:
        function: A function without arguments.

    Returns:
        The function, so this is a decorator, too.

    Raises:
        TypeError: ``function`` can't be called.

    Example:
        >>> stop = threading.Event()
        >>> gpumond.agent.on_end_request(stop.set)
    """
    if not callable(function):
        raise TypeError(f"on_end_request: expected a function without arguments, got {type(function).__name__}")
    _end_functions.append(function)
    return function


def flush(steps: Sequence[str] = ("ipc", "cache", "trim"), dry_run: bool = False) -> list[Receipt]:
    """Flush every allocator of this process in the calling thread, whatever the flush policy.

    Args:
        steps: Flush steps to run: ``gc``, ``hooks``, ``spill``, ``ipc``, ``workspaces``, ``plans``, ``cache``,
            ``trim``, ``host``. They run in this order.
        dry_run: Only predict what a flush would release.

    Returns:
        One `gpumond.facts.pools.Receipt` for each pool, without the driver-reported usage, which only the daemon has.

    Raises:
        TypeError: ``steps`` is not a sequence of names.
        ValueError: A step is unknown.

    Example:
        >>> sum(receipt.released_bytes for receipt in gpumond.agent.flush())
        42949672960
    """
    from gpumond.agent import loaded_allocators

    loaded_allocators.check_steps(steps)
    workload, main_thread = (_thread.settings.workload, _thread.settings.main_thread) if _thread else ("", False)
    return loaded_allocators.flush_all(steps, bool(dry_run), _hooks, workload, main_thread)


def scope(name: str, flush: bool = False, gc: bool = False, borrow: bool = False) -> Scope:
    """Measure the bytes that a block of your program retains, and its peak.

    Use it as a context manager or a decorator. Nested blocks have names such as ``epoch/forward``.

    Args:
        name: 1 to 64 characters of ``[A-Za-z0-9._/-]``.
        flush: Flush at the end of the block.
        gc: With ``flush``: collect garbage first, for memory that only reference cycles hold.
        borrow: When the block runs out of memory, ask the daemon for room, as `retry_on_oom` does. A decorated function
            is then repeated once; after a ``with`` block the error is raised, and a later attempt may succeed.

    Returns:
        A context manager. ``with scope("epoch") as entry`` gives you a `gpumond.agent.measure.scopes.ScopeEntry`; its
        ``retained_bytes`` and ``peak_bytes`` are known when the block has ended.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``name`` has other characters or another length, or ``gc`` is given without ``flush``.

    Example:
        >>> with gpumond.agent.scope("validation") as block:
        ...     validate(model)
        >>> block.retained_bytes
        0
    """
    from gpumond.agent.measure.scopes import Scope, check_arguments

    check_arguments(name, flush, gc, borrow)
    return Scope(name, (_collect_and_flush if gc else _flush_all) if flush else None, _flush_all if borrow else None)


@overload
def retry_on_oom(
    function: FunctionT,
    *,
    shrink: Callable[..., SmallerArguments] | None = None,
    attempts: int = 3,
    gc: bool = True,
    borrow: bool = False,
) -> FunctionT: ...
@overload
def retry_on_oom(  # noqa: F811
    function: None = None,
    *,
    shrink: Callable[..., SmallerArguments] | None = None,
    attempts: int = 3,
    gc: bool = True,
    borrow: bool = False,
) -> Callable[[FunctionT], FunctionT]: ...
def retry_on_oom(  # noqa: F811
    function: Any = None, *, shrink: Any = None, attempts: int = 3, gc: bool = True, borrow: bool = False
) -> Any:
    """Retry a function after a flush when it runs out of GPU memory.

    Args:
        function: The function; omit it to get a decorator.
        shrink: Called with the arguments, returns smaller ones: a tuple of positional arguments, a dict of keyword
            arguments to replace, or None if they can't be smaller.
        attempts: Number of attempts in total. The last error is raised unchanged.
        gc: Collect garbage before the last attempt, for memory that only reference cycles hold.
        borrow: Before anything shrinks, ask the daemon for the missing bytes, for at most 2 s, and repeat the call once
            with the same arguments. The daemon flushes caches of your other programs on the GPU, and those of other
            users only if its setting ``reclaim`` is ``all``.

    Returns:
        The function with retries, or a decorator if ``function`` is omitted.

    Raises:
        TypeError: An argument has the wrong type, or ``function`` is a generator.
        ValueError: ``attempts`` is less than 1.

    Example:
        >>> @gpumond.agent.retry_on_oom(shrink=lambda batch: (batch[: len(batch) // 2],))
        ... def train(batch):
        ...     return model(batch).loss
    """
    from gpumond.agent.measure.retry import check_retry, wrap_retry

    check_retry(shrink, attempts, gc, borrow)
    final_flush = _collect_and_flush if gc else _flush_all
    if function is None:
        return lambda function: wrap_retry(function, shrink, attempts, _flush_all, final_flush, borrow)
    return wrap_retry(function, shrink, attempts, _flush_all, final_flush, borrow)


def limit(bytes: int | None, device: str | int | None = None) -> tuple[AppliedLimit, ...]:
    """Limit the memory that each of this program's allocators may hold.

    Above the limit, an allocator flushes, then raises its own out-of-memory error, as if the GPU were smaller. Memory
    that it already holds isn't released; call `flush` first for an immediate effect. PyTorch and CuPy can be limited.

    Args:
        bytes: The limit of each allocator on each device; None removes the limit.
        device: A UUID, the program's own device number, or None for all devices in use.

    Returns:
        One `gpumond.facts.program.AppliedLimit` for each allocator and device. ``reason`` shows why a limit isn't
        applied, for example because the program hasn't used a device yet: then call `limit` again after its
        first allocation.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``bytes`` is less than 1.

    Example:
        >>> gpumond.agent.limit(40 << 30)[0].applied
        True
    """
    from gpumond.agent.loaded_allocators import apply_limit, check_limit

    check_limit(bytes, device)
    return apply_limit(bytes, device)


def snapshot(path: str | os.PathLike[str]) -> Dump:
    """Write the framework's own memory snapshot, at most 256 MiB, readable only by you.

    PyTorch's is for https://pytorch.org/memory_viz.

    Args:
        path: The file to write.

    Returns:
        A `gpumond.facts.program.Dump`. If no file was written, its ``path`` is None, and ``reason`` shows why.

    Raises:
        TypeError: ``path`` is not a path as text.
        ValueError: ``path`` can't be the path of a file.

    Example:
        >>> gpumond.agent.snapshot("memory.pickle").size_bytes
        1048576
    """
    from gpumond.agent.measure import snapshots

    return snapshots.write(snapshots.check_path(path))


def oom_pool(bytes: int, device: int | None = None) -> str:
    """Set memory aside that PyTorch uses when an allocation would fail, and report its use before a later crash.

    Call it after your program has used its GPU.

    Args:
        bytes: Size of the pool.
        device: The program's own device number; None for the current device.

    Returns:
        An empty string, or the reason why nothing was set aside.

    Raises:
        TypeError: ``device`` has the wrong type.
        ValueError: ``bytes`` isn't a positive integer.

    Example:
        >>> gpumond.agent.oom_pool(2 << 30)
        ''
    """
    if not isinstance(bytes, int) or isinstance(bytes, bool) or bytes <= 0:
        raise ValueError(f"oom_pool: bytes: expected a positive int, got {bytes!r:.80}")
    if device is not None and (not isinstance(device, int) or isinstance(device, bool)):
        raise TypeError(f"oom_pool: device: expected int or None, got {type(device).__name__}")
    from gpumond.agent.measure.oom_pool import OOM_POOLS

    return OOM_POOLS.open(bytes, device)


def program() -> Program:
    """Return the totals of this program's scopes, steps and out-of-memory errors.

    Returns:
        A `gpumond.facts.program.Program`, as the agent reports it.

    Example:
        >>> gpumond.agent.program().step.steps
        1200
    """
    from gpumond.agent.program_report import is_distributed, program_report

    return program_report(is_distributed())


def report() -> tuple[PoolUsage, ...]:
    """Return the allocators' current pools.

    Returns:
        One `gpumond.facts.pools.PoolUsage` for each allocator and device; empty while a flush is in progress.

    Example:
        >>> [(pool.allocator, pool.live_bytes) for pool in gpumond.agent.report()]
        [('torch', 33285996544)]
    """
    from gpumond.agent import loaded_allocators

    loaded_allocators.ALLOCATORS.find_adapters()
    return loaded_allocators.ALLOCATORS.read(READ_TIMEOUT_SECONDS) or ()


def _flush_all() -> None:
    flush()


def _collect_and_flush() -> None:
    import gc

    gc.collect()
    flush()
