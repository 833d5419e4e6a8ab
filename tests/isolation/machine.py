"""Fake driver, a daemon of an unprivileged user on it, and the programs of two other users."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any

from tests.fakenvml import Device, FakeDriver, Process
from tests.helpers.running import RunningDaemon, series_of, until
from tests.helpers.users import ATTACKER, SERVICE, VICTIM, Request, as_user, python, python_path, start

GIB = 1 << 30
MIB = 1 << 20
DEVICE = "GPU-00000000-1111-2222-3333-444455556666"
SETTINGS = {"GPUMOND_SOCKET_MODE": "0666", "GPUMOND_FLUSH_COOLDOWN": "0", "GPUMOND_INTERVAL": "0.5"}


class Agents:
    """Processes of one ``tests.helpers.agents``; ``events`` is their output."""

    def __init__(self, process: Popen[str], on_event: Callable[[dict[str, Any]], None]) -> None:
        self._process, self._on_event = process, on_event
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            event = json.loads(line)
            self.events.append(event)
            self._on_event(event)

    @property
    def pids(self) -> list[int]:
        return list(dict.fromkeys(event["pid"] for event in self.events if event["event"] == "started"))

    @property
    def pid(self) -> int:
        (pid,) = self.pids
        return pid

    def flushes(self, dry_run: bool = False) -> int:
        """Return the number of flush or plan requests."""
        return sum(event["event"] == "flushed" and event["dry_run"] == dry_run for event in self.events)

    def change(self, **options: Any) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(options) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        _end(self._process, self._reader)


class Machine:
    """``settings`` is the configuration file, ``around`` a command that runs the daemon. ``close`` ends everything."""

    def __init__(
        self, place: Path, library: Path, settings: str = "", around: tuple[str, ...] = (), **environ: str
    ) -> None:
        self._programs = contextlib.ExitStack()
        place.chmod(0o755)
        self.driver = FakeDriver(place, library, [Device(DEVICE, used_bytes=GIB, minor=0)])
        self._driver_lock = threading.Lock()
        self.state = place / "daemon" / "state"
        self._settings, self._place, self._around = settings, place, (*around, *as_user(SERVICE))
        self._environ = {**self.driver.env, **python_path(), **SETTINGS, **environ}
        self.serve()

    def serve(self) -> None:
        directory = self._place / "daemon"
        directory.mkdir(exist_ok=True)
        options = ["--source", "nvml"]
        if self._settings:
            config = self._place / "gpumond.yaml"
            config.write_text(self._settings)
            options += ["--config", str(config)]
        if os.geteuid() == 0:
            os.chown(directory, SERVICE, SERVICE)
        self.daemon = RunningDaemon(directory, *options, environ=self._environ, around=self._around, python=python())
        until(lambda: self.daemon.value("gpumond_driver_up"))

    def stop(self) -> None:
        if self.daemon.process.poll() is None:
            self.daemon.process.terminate()
            self.daemon.process.wait(30)

    def close(self) -> None:
        self._programs.close()
        self.stop()

    def end_programs(self) -> None:
        """End agents, attacks and requests, and wait until the daemon has no agent."""
        self._programs.close()
        self.driver.devices[0].processes.clear()
        self.driver.devices[0].used_bytes = GIB
        self.driver.write()
        until(lambda: not self.daemon.get("agents"))

    @property
    def port(self) -> int:
        return int(self.daemon.url.rpartition(":")[2])

    @property
    def api(self) -> Path:
        return self.daemon.directory / "api.sock"

    def agents(self, uid: int, listed: bool = False, **options: Any) -> Agents:
        """Start programs of a user on the device. If ``listed``, the driver lists them with their held bytes."""
        options = {"device_uuid": DEVICE, "processes": 1, **options}
        process = start(uid, "tests.helpers.agents", str(self.daemon.socket), json.dumps(options))
        agents = Agents(process, self._follow if listed else lambda event: None)
        self._programs.callback(agents.close)
        until(lambda: len(agents.pids) == options["processes"], 60)
        return agents

    def _follow(self, event: dict[str, Any]) -> None:
        """Set the driver's count to the bytes that the program holds."""
        if "held_bytes" not in event:
            return
        with self._driver_lock:
            (device,) = self.driver.devices
            others = [process for process in device.processes if process.pid != event["pid"]]
            device.processes = [*others, Process(event["pid"], event["held_bytes"])]
            device.used_bytes = GIB + sum(process.used_bytes for process in device.processes)
            self.driver.write()

    def attack(self, name: str, uid: int = ATTACKER, **arguments: Any) -> None:
        """Start the attack and wait until it is in full effect."""
        process = start(uid, "tests.isolation.attacks", name, json.dumps(arguments))
        self._programs.callback(_end, process)
        assert process.stdout
        assert process.stdout.readline() == "ready\n", f"the attack {name} could not begin"

    def ask(self, uid: int | None, method: str, route: str, body: Any = None, seconds: float = 60) -> Request:
        """Start a request of a user over the API's socket."""
        request = Request(uid, self.api, method, route, body, seconds)
        self._programs.callback(request.close)
        return request

    def stream(self, uid: int | None) -> tuple[int, str]:
        """Return status and first line of a stream of events over the API's socket."""
        return Request(uid, self.api, "GET", "/api/v1/events", stream=True).text()

    def flush(self, uid: int | None, seconds: float = 60, **body: Any) -> Request:
        return self.ask(uid, "POST", "/api/v1/flushes", body, seconds)

    def memory(self) -> float:
        """Return MiB of the daemon and its collector, with shared pages in proportion."""
        children = Path(f"/proc/{self.daemon.process.pid}/task/{self.daemon.process.pid}/children").read_text()
        return sum(pss(int(pid)) for pid in (self.daemon.process.pid, *children.split())) / MIB

    def frames(self, number: int) -> None:
        """Wait until the daemon has made this number of further frames."""
        last = self.daemon.get("status")["snapshot_seq"] + number
        until(lambda: self.daemon.get("status")["snapshot_seq"] >= last, 60)

    def report(self, pid: int) -> dict[str, Any] | None:
        """Return the daemon's report of a process."""
        return next((report for report in self.daemon.get("agents") if report["pid"] == pid), None)

    def series_of(self, pid: int) -> Counter[str]:
        """Return the series of a process by name."""
        own = f'pid="{pid}"'.encode()
        lines = [line for line in self.daemon.request("/metrics")[1].splitlines() if own in line]
        return Counter(name for name, _ in series_of(b"\n".join([*lines, b""])))


def pss(pid: int) -> int:
    """Return the proportional set size in bytes."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _end(process: Popen[str], reader: threading.Thread | None = None) -> None:
    assert process.stdin
    with contextlib.suppress(OSError):
        process.stdin.close()
    with contextlib.suppress(TimeoutExpired):
        process.wait(5)
    process.kill()
    process.wait()
    if reader:
        reader.join()
    if process.stdout and not process.stdout.closed:
        process.stdout.close()


REPORTS = 5


def delays(machine: Machine) -> list[float]:
    """Return the seconds from each connection of the victim until the daemon has its first report."""
    process = start(VICTIM, "tests.helpers.first_report", str(machine.daemon.socket), str(REPORTS))
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 0, "a report was not heard within 10 s"
    found: list[float] = json.loads(out)
    return found
