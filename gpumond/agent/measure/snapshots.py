"""``snapshot(path)``: a framework's own memory snapshot, written by the framework to a file of the program's user.

It passes through a pipe, so the file cannot exceed its size limit, and is renamed to its final name when it is
complete. gpumond never reads it: PyTorch's is a pickle.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from gpumond.agent.allocators.adapters import FlushRefused
from gpumond.agent.loaded_allocators import ALLOCATORS
from gpumond.facts.messages import printable_text
from gpumond.facts.program import Dump
from gpumond.facts.units import size_text

MAX_BYTES = 256 << 20
CHUNK_BYTES = 1 << 20
REQUEST_INTERVAL_SECONDS = 10.0
"""Shortest time between two requests of the daemon."""

MAX_FILES = 4
"""Number of files that this process keeps for requests of the daemon; the oldest are removed."""


def check_path(path: object) -> str:
    """Return the argument of `gpumond.agent.snapshot` as text. Raises TypeError and ValueError."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"snapshot: path: expected str or PathLike, got {type(path).__name__}")
    name = os.fspath(path)
    if not isinstance(name, str):
        raise TypeError("snapshot: path: expected text, got bytes")
    if not name or "\0" in name:
        raise ValueError("snapshot: path: expected the path of a file to write")
    return name


def write(path: str, max_bytes: int = MAX_BYTES, must_be_fast: bool = False) -> Dump:
    """Write the snapshot of the first allocator that has one. Never raises: ``reason`` explains a missing file."""
    reasons = []
    for adapter in ALLOCATORS.find_adapters():
        if not adapter.snapshot_suffix:
            continue
        try:
            return Dump(adapter.name, path, _write(partial(adapter.dump, must_be_fast=must_be_fast), path, max_bytes))
        except FlushRefused as refusal:
            reasons.append(f"{adapter.name}: {refusal}")
        except Exception as error:  # of the file system or the library
            return Dump(adapter.name, None, 0, _failure_reason(error))
    return Dump(
        None, None, 0, printable_text("; ".join(reasons) or "no allocator of this program can write a snapshot")
    )


class RequestedSnapshots:
    """Snapshots that a user or administrator requests: in the user's directory, at a limited rate and number."""

    def __init__(self) -> None:
        self._last_request_at = -REQUEST_INTERVAL_SECONDS
        self._last_id = 0
        self._files: dict[int, str] = {}

    def write(self, workload: str) -> Dump:
        now = time.monotonic()
        if now - self._last_request_at < REQUEST_INTERVAL_SECONDS:
            return Dump(
                None,
                None,
                0,
                f"too many requests: a program writes at most one snapshot in {REQUEST_INTERVAL_SECONDS:g} s",
            )
        self._last_request_at = now
        suffix = next(
            (adapter.snapshot_suffix for adapter in ALLOCATORS.find_adapters() if adapter.snapshot_suffix), ""
        )
        return self._write_to_directory(workload, suffix, lambda path: write(path, must_be_fast=True))

    def save(self, workload: str, suffix: str, allocator: str, write_file: Callable[[str], object]) -> Dump:
        """Write a file of a recording. ``write_file`` writes to a path that can only be appended to. Never raises."""

        def save(path: str) -> Dump:
            try:
                return Dump(allocator, path, _write(write_file, path, MAX_BYTES))
            except Exception as error:  # of the file system or the library
                return Dump(allocator, None, 0, _failure_reason(error))

        return self._write_to_directory(workload, suffix, save)

    def read_part(self, snapshot_id: int, offset: int, size: int) -> tuple[bytes, int]:
        """Return bytes of a kept file, and its size. Raises OSError with the reason."""
        path = self._files.get(snapshot_id)
        if path is None:
            available = ", ".join(map(str, self._files)) or "none"
            raise FileNotFoundError(f"snapshot {snapshot_id} doesn't exist; available: {available}")
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return os.pread(file, size, offset), os.fstat(file).st_size
        finally:
            os.close(file)

    def _write_to_directory(self, workload: str, suffix: str, write: Callable[[str], Dump]) -> Dump:
        try:
            folder = snapshot_directory()
        except OSError as error:
            return Dump(None, None, 0, printable_text(f"no directory for the snapshot: {os_error_text(error)}"))
        name = f"{_file_name(workload) or 'program'}-{os.getpid()}-{time.time():.0f}{suffix}"
        dump = write(os.path.join(folder, name))
        if dump.path is None:
            return dump
        self._last_id += 1
        self._files[self._last_id] = dump.path
        for old in list(self._files)[:-MAX_FILES]:
            _remove(self._files.pop(old))
        return replace(dump, id=self._last_id)


def os_error_text(error: OSError) -> str:
    """Return the system's text for an error and the file concerned, without its number; else the error's own text."""
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else error.strerror or str(error)


def _failure_reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return printable_text(f"the file can't be written: {os_error_text(error)}")
    return printable_text(f"{type(error).__name__}: {error}")


def _file_name(workload: str) -> str:
    return "".join(each if each.isascii() and (each.isalnum() or each in "._") else "-" for each in workload[:64])


def snapshot_directory() -> str:
    """Return a directory of this user alone: below XDG_STATE_HOME, the home, or TMPDIR. Raises OSError."""
    state_home, home = os.environ.get("XDG_STATE_HOME"), os.environ.get("HOME")
    if state_home or home:
        folder = os.path.join(state_home or os.path.join(str(home), ".local", "state"), "gpumond", "snapshots")
    else:
        folder = os.path.join(os.environ.get("TMPDIR") or "/tmp", f"gpumond-{os.geteuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} isn't a directory that this user owns")
    return folder


def _write(write_file: Callable[[str], object], path: str, max_bytes: int) -> int:
    """Return the size. Raises OSError, FlushRefused, and errors of the library; the file does not exist then."""
    partial_path = f"{path}.{os.getpid()}.partial"
    file = os.open(partial_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            copy = _PipeCopy(file, max_bytes)
            try:
                write_file(f"/proc/self/fd/{copy.inlet}")
            finally:
                copy.end()
        finally:
            os.close(file)
        if copy.failure is not None:
            raise copy.failure
        os.replace(partial_path, path)
        return copy.size
    except BaseException:
        _remove(partial_path)
        raise


class _PipeCopy:
    """A thread that copies from a pipe to a file. Bytes beyond the limit are read and dropped: closing the pipe early
    would send a signal that could end the program.
    """

    def __init__(self, file: int, max_bytes: int) -> None:
        self.size = 0
        self.failure: OSError | None = None
        self._file, self._max_bytes = file, max_bytes
        self._outlet, self.inlet = os.pipe()
        self._thread = threading.Thread(target=self._run, name="gpumond-snapshot", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            os.close(self._outlet)
            os.close(self.inlet)
            raise

    def end(self) -> None:
        os.close(self.inlet)
        self._thread.join()
        os.close(self._outlet)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals are for the program's threads
        while chunk := os.read(self._outlet, CHUNK_BYTES):
            self.size += len(chunk)
            if self.failure is None and self.size > self._max_bytes:
                self.failure = OSError(f"it would be larger than {size_text(self._max_bytes)}")
            if self.failure is None:
                try:
                    _write_all(self._file, chunk)
                except OSError as error:
                    self.failure = error


def _write_all(file: int, chunk: bytes) -> None:
    remaining = memoryview(chunk)
    while remaining:
        remaining = remaining[os.write(file, remaining) :]


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
