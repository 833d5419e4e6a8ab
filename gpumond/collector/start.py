"""Start of a process that reads the driver (``worker.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import BinaryIO, NamedTuple

from gpumond.collector import DevicePosition
from gpumond.sources import NOWHERE

GRACE_SECONDS = 0.5


class Worker(NamedTuple):
    """A started process, its pipes, and the descriptor of its DevicePosition."""

    process: subprocess.Popen[bytes]
    stdin: BinaryIO
    stdout: BinaryIO
    place: int

    def open(self, source: str) -> None:
        """Name the source, which the process opens at once."""
        with suppress(BrokenPipeError):  # it has exited; the end of its stdout reports that
            self.stdin.write(source.encode() + b"\n")

    def end(self) -> None:
        """End the process of a daemon that cannot start: hang up, wait, send SIGTERM; never SIGKILL (decision 001)."""
        self.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_SECONDS)
        self.process.terminate()


def start_worker(environ: Mapping[str, str] | None = None) -> Worker:
    """Start a process that waits for the name of its source. It exits when its stdin is closed. Raises OSError."""
    place = os.memfd_create("place", 0)
    try:
        DevicePosition(place).at(NOWHERE)
        process = subprocess.Popen(
            [sys.executable, "-m", "gpumond.collector.worker", str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            bufsize=0,
            pass_fds=(place,),
            start_new_session=True,  # Ctrl-C is handled by the parent, which stops the child in order
        )
    except OSError:
        os.close(place)
        raise
    assert process.stdin is not None
    assert process.stdout is not None
    return Worker(process, process.stdin, process.stdout, place)  # type: ignore[arg-type]
