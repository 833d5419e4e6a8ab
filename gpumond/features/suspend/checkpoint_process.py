"""The checkpoint process: it calls the driver for one program, writes one JSON object to its stdout, and ends.

The driver's calls may block for minutes, and a program that is restored into too little memory is lost
(cuda-checkpoint#44). That is why they are made in a process of their own, which takes the program's user and outlives
the daemon. Standard library only.

    RUNNING --lock--> LOCKED --checkpoint--> CHECKPOINTED --restore--> LOCKED --unlock--> RUNNING
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gpumond.facts.messages import from_json, to_json
from gpumond.host.machine import read_or_empty, read_start_ticks

RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
STATES = ("running", "locked", "checkpointed", "failed")
"""CUprocessState; drivers from CUDA 13.4 have more, which are unknown here."""
MISSING = "missing"
"""Result of a call that the driver does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequest:
    """What the checkpoint process does. ``settle`` reads the state, and unlocks a program that is only locked."""

    action: Literal["suspend", "resume", "settle"]
    pid: int
    start_ticks: int
    uid: int
    lock_milliseconds: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointResponse:
    """What the process found. ``state``: the driver's state of the program afterwards; ``gone`` if it has ended, empty
    if unknown. ``error``: the call that failed and its result. ``steps``: seconds of each call.
    """

    state: str = ""
    error: str = ""
    steps: tuple[tuple[str, float], ...] = ()
    host_bytes: int | None = None


class Driver(Protocol):
    """Each method returns an empty text, or the driver's error. ``resident_bytes``: host memory of a program, in which
    its device memory is while it is suspended; None if unknown.
    """

    def init(self) -> str: ...
    def state(self, pid: int) -> tuple[int, str]: ...
    def lock(self, pid: int, milliseconds: int) -> str: ...
    def checkpoint(self, pid: int) -> str: ...
    def restore(self, pid: int) -> str: ...
    def unlock(self, pid: int) -> str: ...
    def resident_bytes(self, pid: int) -> int | None: ...


class LockArguments(ctypes.Structure):
    _fields_ = (
        ("timeout", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    )


class CudaDriver:
    """The driver API of ``libcuda.so.1``."""

    def __init__(self) -> None:
        try:
            self._library: ctypes.CDLL | None = ctypes.CDLL("libcuda.so.1")
        except OSError:
            self._library = None

    def init(self) -> str:
        return self._call("cuInit", ctypes.c_uint(0))

    def state(self, pid: int) -> tuple[int, str]:
        state = ctypes.c_int(-1)
        error = self._call("cuCheckpointProcessGetState", ctypes.c_int(pid), ctypes.byref(state))
        return state.value, error

    def lock(self, pid: int, milliseconds: int) -> str:
        arguments = LockArguments(milliseconds)
        return self._call("cuCheckpointProcessLock", ctypes.c_int(pid), ctypes.byref(arguments))

    def checkpoint(self, pid: int) -> str:
        return self._call("cuCheckpointProcessCheckpoint", ctypes.c_int(pid), None)

    def restore(self, pid: int) -> str:
        return self._call("cuCheckpointProcessRestore", ctypes.c_int(pid), None)

    def unlock(self, pid: int) -> str:
        return self._call("cuCheckpointProcessUnlock", ctypes.c_int(pid), None)

    def resident_bytes(self, pid: int) -> int | None:
        return resident_bytes(pid)

    def _call(self, name: str, *arguments: object) -> str:
        function = getattr(self._library, name, None)
        if function is None:
            return f"{name}: {MISSING}"
        status = function(*arguments)
        if status == 0:
            return ""
        text = ctypes.c_char_p()
        error_name = getattr(self._library, "cuGetErrorName", None)
        if error_name is not None:
            error_name(ctypes.c_int(status), ctypes.byref(text))
        return f"{name}: {text.value.decode() if text.value else status}"


@dataclass
class _CheckpointRun:
    """One request, and what was found so far."""

    request: CheckpointRequest
    driver: Driver
    error: str = ""
    steps: list[tuple[str, float]] = field(default_factory=list)
    host_bytes: int | None = None

    def carry_out(self) -> CheckpointResponse:
        if self.is_gone():
            return CheckpointResponse(state="gone")
        self.error = self.driver.init()
        if self.error:
            return self.response("")
        state_before, self.error = self.driver.state(self.request.pid)
        if self.error:
            return self.response("")
        if self.request.action == "suspend" and state_before == RUNNING:
            self.suspend()
        elif self.request.action == "resume" and state_before == CHECKPOINTED:
            if self.step("restore", lambda: self.driver.restore(self.request.pid)):
                self.step("unlock", lambda: self.driver.unlock(self.request.pid))
        elif state_before == LOCKED:
            self.step("unlock", lambda: self.driver.unlock(self.request.pid))
        state_after, error = self.driver.state(self.request.pid)
        self.error = self.error or error
        return self.response("" if error else STATES[state_after] if 0 <= state_after < len(STATES) else "")

    def suspend(self) -> None:
        request, driver, bytes_before = self.request, self.driver, self.driver.resident_bytes(self.request.pid)
        if not self.step("lock", lambda: driver.lock(request.pid, request.lock_milliseconds)):
            return
        if self.step("checkpoint", lambda: driver.checkpoint(request.pid)):
            bytes_after = driver.resident_bytes(request.pid)
            self.host_bytes = (
                None if bytes_before is None or bytes_after is None else max(0, bytes_after - bytes_before)
            )
            return
        error = self.error  # that of the unlock is of less use
        self.step("unlock", lambda: driver.unlock(request.pid))
        self.error = error

    def step(self, name: str, call: Callable[[], str]) -> bool:
        """Make a call unless the program has exited, and return whether it succeeded."""
        if self.is_gone():
            return False
        began = time.monotonic()
        self.error = call()
        self.steps.append((name, time.monotonic() - began))
        return not self.error

    def is_gone(self) -> bool:
        return read_start_ticks(self.request.pid) != self.request.start_ticks

    def response(self, state: str) -> CheckpointResponse:
        state = "gone" if self.is_gone() else state
        return CheckpointResponse(state=state, error=self.error, steps=tuple(self.steps), host_bytes=self.host_bytes)


def carry_out(request: CheckpointRequest, driver: Driver) -> CheckpointResponse:
    """Carry out a request. A program is left running, or with its memory on the host; locked only if both fail."""
    return _CheckpointRun(request, driver).carry_out()


def resident_bytes(pid: int) -> int | None:
    """Return the bytes of a process in memory and swap, None if unknown."""
    lines = dict(line.partition(":")[::2] for line in read_or_empty(f"/proc/{pid}/status").splitlines())
    try:
        return sum(int(lines[name].split()[0]) << 10 for name in ("VmRSS", "VmSwap"))
    except (KeyError, ValueError, IndexError):
        return None


def become_user(request: CheckpointRequest) -> None:
    """Take groups, gid, user namespace and uid of the program, if this process may. Raises OSError.

    The kernel lets a user access the own programs in its user namespace only.
    """
    if os.geteuid() != 0 or request.uid == 0:
        return
    process = f"/proc/{request.pid}"
    ids = _ids(process)
    if "Gid" not in ids:
        raise ProcessLookupError(request.pid)
    os.setgroups(ids.get("Groups", []))
    os.setresgid(*[ids["Gid"][1]] * 3)
    uid = request.uid
    with suppress(PermissionError):  # without CAP_SYS_PTRACE, which it needs to enter as well
        if os.stat(f"{process}/ns/user").st_ino != os.stat("/proc/self/ns/user").st_ino:
            _enter_namespace(f"{process}/ns/user")
            uid = _ids(process)["Uid"][1]  # as the namespace has it
    os.setresuid(*[uid] * 3)


def _ids(process: str) -> dict[str, list[int]]:
    lines = dict(line.partition(":")[::2] for line in read_or_empty(f"{process}/status").splitlines())
    return {name: [int(word) for word in lines[name].split()] for name in ("Uid", "Gid", "Groups") if name in lines}


def _enter_namespace(namespace: str) -> None:
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):  # os.setns is new in Python 3.12
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), namespace)
    finally:
        os.close(descriptor)


def driver_of(pid: int) -> Driver:
    """Return the driver of a process: that of simulated devices if it uses one that suspends programs, else CUDA's."""
    root = os.environ.get("GPUMOND_SIM_DIR")
    if root:
        from gpumond.sim.device import SimDriver

        simulated = SimDriver(root, pid)
        if simulated.devices:
            return simulated
    return CudaDriver()


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # the daemon may end first
    request = from_json(CheckpointRequest, arguments[0].encode())
    try:
        become_user(request)
        answer = carry_out(request, driver_of(request.pid))
    except (OSError, OverflowError) as error:
        answer = CheckpointResponse(error=f"{type(error).__name__}: {error}")
    with suppress(OSError):
        os.write(sys.stdout.fileno(), to_json(answer) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
