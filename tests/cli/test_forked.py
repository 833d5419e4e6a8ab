"""A call in a forked process: its result and its errors arrive, and no process remains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from gpumond.cli.forked import call_in_fork
from gpumond.errors import ConfigError, GpumondError, SourceUnavailable


def fail(error: Exception) -> None:
    raise error


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def check_results() -> None:
    done: list[int] = []
    result = call_in_fork(lambda: (os.getpid(), os.getppid(), "x" * 1_000_000), lambda: done.append(1))
    assert result[0] != os.getpid() == result[1]
    assert (len(result[2]), done) == (1_000_000, [1])


def check_errors() -> None:
    for error in (ConfigError("listen: wrong"), SourceUnavailable("no_driver", "load it"), ImportError("no", name="y")):
        with pytest.raises(type(error), match=str(error)) as caught:
            call_in_fork(lambda error=error: fail(error), list)
        assert vars(caught.value) == vars(error)
    for ends, code in ((die, -9), (lambda: fail(KeyError("a bug")), 1)):
        with pytest.raises(GpumondError, match=f"exit code {code};"):
            call_in_fork(ends, list)


def check_interruption() -> None:
    with pytest.raises(KeyboardInterrupt):
        call_in_fork(lambda: time.sleep(60), lambda: signal.raise_signal(signal.SIGINT))


def check_threads() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    assert call_in_fork(os.getpid, list) == os.getpid()
    ended.set()
    thread.join()


@pytest.mark.parametrize("check", [check_results, check_errors, check_interruption, check_threads])
def test_call_in_fork(check: Callable[[], None]):
    """In a process of its own, because that of the tests has several threads."""
    program = f"""
import os
from tests.cli.test_forked import {check.__name__}
{check.__name__}()
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no child remains")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "no child remains\n", done.stderr
