"""NvmlSource in a separate process with a clock that the test controls.

Each line on stdin is a time and a request; the answer on stdout is the reading at that time, or the reason why there
is none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpumond.devices import ReadProgress
from gpumond.devices.child.pipe import ReadRequest, ReadResponse
from gpumond.devices.nvml.source import NvmlSource
from gpumond.facts.errors import SourceUnavailable
from gpumond.facts.messages import from_json, to_json
from gpumond.facts.snapshot import CgroupLimitChange, DeviceReading, Reading


class NvmlChild:
    """Create the source. ``proc`` replaces /proc; with ``no_device_access``, a device cgroup refuses the device
    nodes."""

    def __init__(self, env: dict[str, str], proc: Path | str = "/proc", no_device_access: bool = False) -> None:
        command = [sys.executable, "-m", __name__, str(proc), "EPERM" if no_device_access else ""]
        self._process = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> NvmlChild:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=60)

    def answer(self, at: float = 0.0, *changes: CgroupLimitChange) -> ReadResponse:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(b"%f %s\n" % (at, to_json(ReadRequest(limit_changes=changes))))
        self._process.stdin.flush()
        return from_json(ReadResponse, self._process.stdout.readline())

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def read(self, at: float = 0.0, *changes: CgroupLimitChange) -> Reading:
        answer = self.answer(at, *changes)
        assert answer.reading is not None, answer
        return answer.reading


def by_uuid(reading: Reading) -> dict[str, DeviceReading]:
    return {device.uuid: device for device in reading.devices}


def used_by_pid(device: DeviceReading) -> dict[int, int | None]:
    assert device.processes is not None
    return {process.pid: process.used_bytes for process in device.processes}


def kinds(reading: Reading) -> set[tuple[str | None, str]]:
    """Return the kinds of the faults with their devices."""
    return {(fault.device_uuid, fault.kind) for fault in reading.faults}


def main(proc: str, access: str) -> None:
    now = 0.0

    def refuse(path: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted", path)

    source = NvmlSource(lambda: now, proc, refuse if access else os.open, wall=lambda: now)
    opened, progress = False, ReadProgress()
    source.set_progress(progress)
    for line in sys.stdin:
        moment, _, request = line.partition(" ")
        now, progress.limit_changes = float(moment), from_json(ReadRequest, request.encode()).limit_changes
        try:
            if not opened:
                source.open()
                opened = True
            answer = ReadResponse(source.read())
        except SourceUnavailable as error:
            answer = ReadResponse(reason=error.reason, message=str(error))
            source.close()
            opened = False
        sys.stdout.buffer.write(to_json(answer) + b"\n")
        sys.stdout.buffer.flush()
    source.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
