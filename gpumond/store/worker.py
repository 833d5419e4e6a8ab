"""Thread of the store, which runs its work in order. It does not block the process's end if the disk hangs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[[], Any]]


class Worker(Executor):
    """Executor with one daemon thread: ThreadPoolExecutor waits for its threads when the interpreter ends, this
    does not.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop after the submitted work; never waits."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del job, future, work
