"""A call in a forked process, with which its imports end. Not a verb."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from typing import IO, Any, NoReturn, TypeVar

from gpumond.errors import ConfigError, GpumondError, SourceUnavailable

T = TypeVar("T")


def call_in_fork(function: Callable[[], T], meanwhile: Callable[[], object]) -> T:
    """Return the result of ``function``, which a forked process calls while this one calls ``meanwhile``.

    Raises its ConfigError, SourceUnavailable or ImportError, and GpumondError if the process ends otherwise. The
    function is called in this process if it cannot fork: it has several threads, or a limit of processes is reached.
    """
    if threading.active_count() > 1:
        return function()
    reader, writer = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
    with reader, writer:
        try:
            child = os.fork()
        except OSError:
            return function()
        if child == 0:
            _answer(function, writer)
        writer.close()
        try:
            meanwhile()
            content = reader.read()
        finally:
            os.kill(child, signal.SIGKILL)  # it has ended, unless this process is interrupted
            _, status = os.waitpid(child, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise GpumondError(f"the configuration was not loaded: its process ended with exit code {code}; start again")
    result: Any = pickle.loads(content)  # noqa: S301  # from this program
    if isinstance(result, Exception):
        raise result
    return result  # type: ignore[no-any-return]


def _answer(function: Callable[[], object], writer: IO[bytes]) -> NoReturn:
    """Write the result of the function, and end this process without the cleanup of its parent."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # of a terminal; the parent receives it, too
        try:
            result = function()
        except (ConfigError, SourceUnavailable, ImportError) as error:
            result = error
        pickle.dump(result, writer)
        writer.flush()
        code = 0
    except BrokenPipeError:
        pass  # the parent has ended
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)
