"""CPU time of the daemon by stage: driver calls, process files, pipe, agents, tick, pages, requests.

    python -m bench.stages [--shapes 8x8,8x64,64x50] [--latency-us 20] [--seconds 60] [--save]
    python -m bench.stages --card 0,48 [--seconds 60] [--save]

The daemon and the process that reads the driver run with a clock around each stage, for that many seconds with one
scrape a second. A stage is the CPU time of its functions, without the stages within them; ``rest`` is the remainder of
a process: its event loop, locks and garbage collection. The clocks themselves cost some microseconds for each call.
Programs on a card have agents.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.exporters import GPUMOND, Running, family, running
from bench.peers import AGENTS_SECONDS, Setting, agents, card_setting, fake_setting
from bench.result import publish
from bench.scrape import compile_daemon
from tests.fakenvml import build
from tests.helpers.running import until

WARM_UP_SECONDS = 8.0
DIRECTORY = "STAGES_DIRECTORY"
"""Environment variable with the directory of the files that the measured processes write on SIGURG."""
PARTS_OF_A_TICK = (
    ("features.alerts.dispatcher.AlertDispatcher", "decide", "execute"),
    ("features.quotas.admissions.Admissions", "execute"),
    ("features.instruments.part.RetainerRequests", "consider"),
    ("features.baselines.recordings.BaselineService", "add"),
    ("events.EventLog", "publish"),
    ("store.store.HistoryPersistence", "advance"),
    ("metrics.telemetry.Telemetry", "count_events", "faults", "count_silences"),
)
"""Classes and their methods that a tick calls in addition to its steps."""
ROLES = {"main": "daemon", "worker": "driver"}


class Clocks:
    """CPU seconds by stage. A stage that calls another one does not contain its time."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inner = [0.0]

    def around(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            self._inner.append(0.0)
            try:
                return function(*arguments, **named)
            finally:
                passed = time.thread_time() - began
                self.seconds[stage] += passed - self._inner.pop()
                self._inner[-1] += passed

        return timed

    def measure(self, stage: str, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self.around(stage, getattr(owner, name)))

    def write(self, role: str) -> None:
        """Write the stages and the total of this process."""
        path = Path(os.environ[DIRECTORY], f"{role}.json")
        whole = sum(os.times()[:2])
        path.with_suffix(".new").write_text(json.dumps({"total": whole, "stages": self.seconds}))
        path.with_suffix(".new").rename(path)


def run_driver(place: int, source: str) -> int:
    """Run the process that reads the driver, with clocks."""
    from gpumond.devices.child import worker
    from gpumond.devices.child.pipe import ReadingChanges
    from gpumond.devices.nvml.library import Library
    from gpumond.devices.nvml.source import NvmlSource
    from gpumond.devices.process.metadata import ProcessMetadata
    from gpumond.devices.process.procfs import ProcessTable

    clocks = Clocks()
    clocks.measure("driver calls", Library, "query")
    clocks.measure("process files", ProcessTable, "read")
    clocks.measure("process files", ProcessMetadata, "complete")
    clocks.measure("reading", NvmlSource, "read")
    clocks.measure("pipe", ReadingChanges, "encode")
    clocks.measure("pipe", worker, "to_json", "from_json")
    signal.signal(signal.SIGURG, lambda *_: clocks.write("worker"))
    return worker.main(place, source)


def run_daemon(arguments: list[str]) -> int:
    """Run ``gpumond`` with clocks; the process that reads the driver runs with clocks, too."""
    from gpumond.commands import main as cli

    start = subprocess.Popen

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return start(
            ["bench.stages" if part == "gpumond.devices.child.worker" else part for part in command], **options
        )

    subprocess.Popen = popen  # type: ignore[assignment, misc]
    clocks = Clocks()
    signal.signal(signal.SIGURG, lambda *_: clocks.write("main"))
    from gpumond.devices.child.supervisor import Child
    from gpumond.programs.agent_server import AgentServer
    from gpumond.serve.http import HttpProtocol

    for owner, *names in PARTS_OF_A_TICK:
        clocks.measure(
            "tick", getattr(import_module(f"gpumond.{owner.rpartition('.')[0]}"), owner.rpartition(".")[2]), *names
        )
    clocks.measure("pipe", Child, "decode", "ask")
    clocks.measure("agents", AgentServer, "_readable", "_accept", "_sweep", "departed", "ends")
    clocks.measure("requests", HttpProtocol, "data_received", "connection_made", "connection_lost")
    return cli.main(arguments)


def read(directory: Path, processes: Running) -> Mapping[str, Any]:
    """Return the files of both processes."""
    for role in ROLES:
        (directory / f"{role}.json").unlink(missing_ok=True)
    for pid in family(processes.process.pid):
        os.kill(pid, signal.SIGURG)
    until(lambda: all((directory / f"{role}.json").exists() for role in ROLES))
    return {role: json.loads((directory / f"{role}.json").read_text()) for role in ROLES}


def measure(setting: Setting, seconds: float) -> dict[str, object]:
    """Return CPU seconds a minute by process and stage."""
    directory = setting.directory / "stages"
    directory.mkdir(exist_ok=True)
    command = tuple("bench.stages" if part == "gpumond" else part for part in GPUMOND.command)
    exporter = GPUMOND._replace(command=command)
    with running(exporter, setting.directory / "exporter", {**setting.environ, DIRECTORY: str(directory)}) as started:
        started.first_data(setting.devices)
        if setting.agents:
            until(lambda: agents(started) == setting.agents, AGENTS_SECONDS, every=1.0)
        connection = started.connect()
        began = due = time.monotonic()
        before: Mapping[str, Any] | None = None
        while due < began + WARM_UP_SECONDS + seconds:
            if before is None and due >= began + WARM_UP_SECONDS:
                before, first = read(directory, started), time.monotonic()
            started.get(connection, "gzip")
            due += 1
            time.sleep(max(0.0, due - time.monotonic()))
        after, passed = read(directory, started), time.monotonic() - first
        assert before is not None
        return {name: by_stage(before[role], after[role], 60 / passed) for role, name in ROLES.items()}


def by_stage(before: Mapping[str, Any], after: Mapping[str, Any], a_minute: float) -> dict[str, float]:
    stages = {
        stage: (used - before["stages"].get(stage, 0.0)) * a_minute for stage, used in sorted(after["stages"].items())
    }
    total = (after["total"] - before["total"]) * a_minute
    figures = {**stages, "rest": max(0.0, total - sum(stages.values())), "total": total}
    return {stage: round(value, 4) for stage, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="8x8,8x64,64x50")
    parser.add_argument("--latency-us", type=float, default=20.0)
    parser.add_argument("--card", metavar="PROGRAMS")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--save", action="store_true")
    wanted = parser.parse_args()
    compile_daemon()
    figures: dict[str, object] = {"seconds": wanted.seconds}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        cases: dict[str, Any] = {}
        if wanted.card is None:
            library = build(directory)
            for shape in wanted.shapes.split(","):
                cases[shape] = fake_setting(directory, library, shape, wanted.latency_us)
        else:
            for programs in map(int, wanted.card.split(",")):
                cases[f"{programs} programs"] = card_setting(directory, programs, with_agents=programs > 0)
        for case, setting in cases.items():
            with setting as opened:
                figures[case] = measure(opened, wanted.seconds)
    publish("stages" if wanted.card is None else "stages_card", figures)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].isdigit():
        sys.exit(run_driver(int(sys.argv[1]), sys.argv[2]))
    if sys.argv[1:2] == ["serve"]:
        sys.exit(run_daemon(sys.argv[1:]))
    main()
