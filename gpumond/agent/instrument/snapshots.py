"""``snapshot(path)``: a framework's own memory snapshot, as it writes it itself, in a file of the program's user.

It goes through a pipe, so that the file cannot grow beyond its bound, and appears under its name only when it is
whole. gpumond writes it down and never reads it: PyTorch's is a pickle.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from typing import Protocol

from gpumond.agent.adapters import FlushRefused
from gpumond.agent.registry import REGISTRY
from gpumond.model.program import Dump
from gpumond.protocol.messages import clean

MAX_BYTES = 256 << 20
CHUNK_BYTES = 1 << 20
ASKED_SECONDS = 10.0
"""Between two that were asked for from outside."""

KEPT = 4
"""Files of this process that were asked for from outside; the oldest makes room."""


class Dumper(Protocol):
    """An adapter whose library has a snapshot of its own."""

    name: str
    suffix: str

    def dump(self, path: str, guarded: bool) -> None:
        """Writes to a path that can only be appended to. ``guarded``: refuse what would hold the program for long.

        Raises Refused.
        """


def write(path: str, max_bytes: int = MAX_BYTES, guarded: bool = False) -> Dump:
    """The first allocator's that has one. Never raises: ``reason`` says why there is no file."""
    reasons = []
    for adapter in REGISTRY.adapters():
        if not hasattr(adapter, "dump"):
            continue
        dumper: Dumper = adapter  # type: ignore[assignment]
        try:
            return Dump(dumper.name, path, _write(dumper, path, max_bytes, guarded))
        except FlushRefused as refusal:
            reasons.append(f"{dumper.name}: {refusal}")
        except Exception as error:  # of the file, or the library's own
            return Dump(dumper.name, None, 0, clean(f"{type(error).__name__}: {error}"))
    return Dump(None, None, 0, clean("; ".join(reasons) or "no allocator of this program has a snapshot of its own"))


class Asked:
    """Those that an administrator asks for: into the user's own directory, not often, and not many."""

    def __init__(self) -> None:
        self._at = -ASKED_SECONDS
        self._files: list[str] = []

    def write(self, workload: str) -> Dump:
        now = time.monotonic()
        if now - self._at < ASKED_SECONDS:
            return Dump(None, None, 0, f"asked for a moment ago; once in {ASKED_SECONDS:g} s is enough")
        self._at = now
        try:
            folder = directory()
        except OSError as error:
            return Dump(None, None, 0, clean(f"no directory for it: {error}"))
        suffix = next((str(a.suffix) for a in REGISTRY.adapters() if hasattr(a, "suffix")), "")
        name = f"{workload.replace('/', '-') or 'program'}-{os.getpid()}-{time.time():.0f}{suffix}"
        dump = write(os.path.join(folder, name), guarded=True)
        if dump.path is not None:
            self._files.append(dump.path)
            for old in self._files[:-KEPT]:
                _remove(old)
            del self._files[:-KEPT]
        return dump


def directory() -> str:
    """Of this user alone: below XDG_STATE_HOME, the home, or TMPDIR. Raises OSError."""
    state, home = os.environ.get("XDG_STATE_HOME"), os.environ.get("HOME")
    if state or home:
        folder = os.path.join(state or os.path.join(str(home), ".local", "state"), "gpumond", "snapshots")
    else:
        folder = os.path.join(os.environ.get("TMPDIR") or "/tmp", f"gpumond-{os.geteuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a directory of this user")
    return folder


def _write(dumper: Dumper, path: str, max_bytes: int, guarded: bool) -> int:
    """Its size. Raises OSError, Refused, and what the library raises; there is no file then."""
    partial = f"{path}.{os.getpid()}.partial"
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            copy = _Copy(file, max_bytes)
            try:
                dumper.dump(f"/proc/self/fd/{copy.entrance}", guarded)
            finally:
                copy.end()
        finally:
            os.close(file)
        if copy.failure is not None:
            raise copy.failure
        os.replace(partial, path)
        return copy.size
    except BaseException:
        _remove(partial)
        raise


class _Copy:
    """A thread that carries what comes through a pipe into a file. What is too much is read and dropped: a pipe that
    is closed early sends a signal that could end the program."""

    def __init__(self, file: int, max_bytes: int) -> None:
        self.size = 0
        self.failure: OSError | None = None
        self._file, self._max_bytes = file, max_bytes
        self._exit, self.entrance = os.pipe()
        self._thread = threading.Thread(target=self._run, name="gpumond-snapshot", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            os.close(self._exit)
            os.close(self.entrance)
            raise

    def end(self) -> None:
        os.close(self.entrance)
        self._thread.join()
        os.close(self._exit)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the host's threads
        while chunk := os.read(self._exit, CHUNK_BYTES):
            self.size += len(chunk)
            if self.failure is None and self.size > self._max_bytes:
                self.failure = OSError(f"it is larger than {self._max_bytes} bytes; nothing was kept")
            if self.failure is None:
                try:
                    _write_all(self._file, chunk)
                except OSError as error:
                    self.failure = error


def _write_all(file: int, chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[os.write(file, rest) :]


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
