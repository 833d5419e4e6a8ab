"""Calls that are repeated after an out-of-memory error, if wanted with memory that other programs have released."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from gpumond.agent.allocators.borrowing import BORROWING
from gpumond.agent.measure import is_async, refuse_generators
from gpumond.agent.measure.oom_record import OOMS, error_chain, is_oom, request_bytes

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Shrink = Callable[..., "tuple[Any, ...] | dict[str, Any] | None"]
Flush = Callable[[], object]


def check_retry(shrink: object, attempts: object, gc: object, borrow: object) -> None:
    """Raise TypeError or ValueError for wrong arguments of `gpumond.agent.retry_on_oom`."""
    if shrink is not None and not callable(shrink):
        raise TypeError(f"retry_on_oom: shrink: expected a function of the arguments, got {type(shrink).__name__}")
    if not isinstance(attempts, int) or isinstance(attempts, bool):
        raise TypeError(f"retry_on_oom: attempts: expected int, got {type(attempts).__name__}")
    if attempts < 1:
        raise ValueError(f"retry_on_oom: attempts must be at least 1, got {attempts}")
    if not isinstance(gc, bool):
        raise TypeError(f"retry_on_oom: gc: expected bool, got {type(gc).__name__}")
    if not isinstance(borrow, bool):
        raise TypeError(f"retry_on_oom: borrow: expected bool, got {type(borrow).__name__}")


def wrap_retry(
    function: FunctionT, shrink: Shrink | None, attempts: int, flush: Flush, final_flush: Flush, borrow: bool
) -> FunctionT:
    """Return the function with its retries; for a coroutine function, a coroutine function.

    ``flush`` is called before each attempt but the first, and ``final_flush`` instead of it before the last one. With
    ``borrow``, the first attempt is repeated once with the same arguments, after a request to the daemon.
    """
    refuse_generators("retry_on_oom", function)

    if is_async(function):

        @functools.wraps(function)
        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            call = _Attempts(shrink, attempts, flush, final_flush, args, kwargs, borrow)
            while True:
                try:
                    result = await function(*call.args, **call.kwargs)
                    break
                except Exception as error:
                    if not call.try_again(error):
                        raise
                call.make_room()
            call.record_success()
            return result

        return async_wrapper  # type: ignore[return-value]

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = _Attempts(shrink, attempts, flush, final_flush, args, kwargs, borrow)
        while True:
            try:
                result = function(*call.args, **call.kwargs)
                break
            except Exception as error:
                if not call.try_again(error):
                    raise
            call.make_room()  # here Python has released the error and the objects that its frames hold
        call.record_success()
        return result

    return wrapper  # type: ignore[return-value]


class _Attempts:
    """One call and its retries."""

    def __init__(
        self,
        shrink: Shrink | None,
        attempts: int,
        flush: Flush,
        final_flush: Flush,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        borrow: bool,
    ) -> None:
        self.args, self.kwargs = args, kwargs
        self._shrink, self._remaining_attempts = shrink, attempts - 1
        self._flush, self._final_flush = flush, final_flush
        self._error_of_caller = sys.exc_info()[1]
        self._retry_count = 0
        self._may_borrow = borrow
        self._borrow_bytes: int | None = None
        """The bytes to request before the next attempt, None for no request."""

    def try_again(self, error: Exception) -> bool:
        """Return whether to retry. The arguments are then smaller, and the error no longer refers to what its frames
        held.
        """
        if not is_oom(error):
            return False
        may_retry = self._may_borrow or self._remaining_attempts > 0
        if may_retry:
            # Before the record, which takes time: a report in between must not have the error without its retry.
            OOMS.add_retry()
        OOMS.record_error(error, "retry")  # before `shrink`, which may free memory
        if not may_retry:
            return False
        if self._may_borrow:
            self._may_borrow, self._borrow_bytes = False, request_bytes(error)
        else:
            is_shrunk = False
            try:
                is_shrunk = self._shrink_arguments()
            finally:
                if not is_shrunk:
                    OOMS.withdraw_retry()
            if not is_shrunk:
                return False
            self._remaining_attempts -= 1
        self._retry_count += 1
        clear_frames(error, self._error_of_caller)
        return True

    def make_room(self) -> None:
        try:
            (self._flush if self._remaining_attempts else self._final_flush)()
        except Exception:  # the next attempt will raise the cause
            pass
        if self._borrow_bytes is not None:
            BORROWING.request(OOMS.newest_device(), self._borrow_bytes)
            self._borrow_bytes = None

    def record_success(self) -> None:
        if self._retry_count:
            OOMS.add_recovery()

    def _shrink_arguments(self) -> bool:
        if self._shrink is None:
            return True
        smaller = self._shrink(*self.args, **self.kwargs)
        if smaller is None:
            return False
        if isinstance(smaller, dict):
            self.kwargs = {**self.kwargs, **smaller}
        elif isinstance(smaller, tuple):
            self.args = smaller
        else:
            raise TypeError(
                "retry_on_oom: shrink: expected a tuple of positional arguments, a dict of keyword arguments, or None "
                f"when they can't be smaller; got {type(smaller).__name__}"
            )
        return True


def clear_frames(error: BaseException, excluded: BaseException | None) -> None:
    """Clear the frames of the traceback of an error and of its causes: their variables refer to tensors.

    ``excluded``: the exception that was being handled before the call; it belongs to the caller.
    """
    for cause in error_chain(error, excluded):
        traceback, cause.__traceback__ = cause.__traceback__, None
        while traceback is not None:
            try:
                traceback.tb_frame.clear()
            except RuntimeError:  # a frame that still runs
                pass
            traceback = traceback.tb_next
