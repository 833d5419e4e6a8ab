"""Forty real daemons: a flush that PromQL selects, and machines that fail in each way."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers import certificates
from tests.helpers.prometheus import Prometheus
from tests.helpers.running import RunningDaemon, until
from tests.helpers.serving import TlsDaemon, start_daemon
from tests.helpers.stubs import Confirming, SimulatedMachine, fleet, write_targets

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
NAMES = [f"node-{number:02}" for number in range(39)]
DOWN, SLOW, REFUSING, REUSED, WRONG = "node-30", "node-31", "node-32", "node-33", "node-39"
SERIES = "gpumond_pool_reclaimable_bytes"
EVEN = f'{SERIES}{{workload="train", instance=~"node-[0-9][02468]"}} > 0'
SECONDS = "30s"

pytestmark = [
    pytest.mark.soak,
    pytest.mark.needs("openssl"),
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not os.access(LAST_PID, os.W_OK), reason="needs root, to choose the pid of a process"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates.make(tmp_path_factory.mktemp("soak") / "certificates")


@pytest.fixture(scope="module")
def machines(place: Path, nvml_library: Path) -> Iterator[dict[str, SimulatedMachine]]:
    with ExitStack() as started:
        found: dict[str, SimulatedMachine] = {}
        for name in NAMES:
            programs: dict[str, dict[str, str]] = {"train": {}, **({"serve": {}} if name < "node-10" else {})}
            found[name] = SimulatedMachine(place.parent / name, nvml_library, name, programs)
            started.callback(found[name].stop)
        yield found


@pytest.fixture(scope="module")
def wrong(place: Path) -> Iterator[RunningDaemon]:
    """Start a daemon whose certificate is not valid for its address."""
    (place / "web.yml").write_text("tls_server_config: {cert_file: client.crt, key_file: client.key}\n")
    daemon = start_daemon(place.parent / WRONG, "--web-config", str(place / "web.yml"), kind=TlsDaemon)
    yield daemon
    daemon.stop()


def tokens(directory: Path, machines: dict[str, SimulatedMachine]) -> Path:
    file = directory / "tokens.yaml"
    file.touch(0o600)
    file.write_text("".join(f"{name}: {each.token}\n" for name, each in machines.items() if name != REFUSING))
    return file


def flushed(machines: dict[str, SimulatedMachine]) -> dict[str, list[str]]:
    return {name: found for name, each in machines.items() if (found := each.flushed())}


def test_flush_selected_by_promql_reaches_exactly_the_selected_processes(
    place: Path, machines: dict[str, SimulatedMachine]
):
    scraped = [{"targets": [each.address], "labels": {"instance": name}} for name, each in machines.items()]
    prometheus = Prometheus(place / "prometheus", {"gpumond": {"static_configs": scraped}})
    file = place / "all.yaml"
    file.touch(0o600)
    file.write_text("".join(f"{name}: {each.token}\n" for name, each in machines.items()))
    try:
        even = [name for name in NAMES if int(name[-1]) % 2 == 0]
        until(lambda: len(prometheus.instant(EVEN)) == len(even), 120)
        until(lambda: len(prometheus.instant("gpumond_snapshot_timestamp_seconds")) == len(NAMES), 120)
        command = ["flush", "--prometheus", prometheus.url, "--tokens", str(file), "--query", EVEN]
        done = fleet(*command, "--timeout", SECONDS, "--max-parallel", "8", "--no-canary", "--yes", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        assert flushed(machines) == {name: ["train"] for name in even}
    finally:
        prometheus.stop()
        for each in machines.values():
            each.restore()


def start_with_pid(machine: SimulatedMachine, workload: str, pid: int) -> None:
    """Start a program again with this pid, which has no process."""

    def started() -> bool:
        LAST_PID.write_text(str(pid - 1))
        return machine.start(workload).pid == pid

    until(started, 120, every=0.0)


def test_machines_that_fail_concern_no_other(place: Path, machines: dict[str, SimulatedMachine], wrong: RunningDaemon):
    addresses = {name: each.address for name, each in machines.items()}
    addresses[WRONG] = wrong.url.removeprefix("http://")
    file = write_targets(place / "targets.json", addresses, **{WRONG: {"__scheme__": "https"}})
    listed = ["--targets", str(file), "--tokens", str(tokens(place, machines)), "--timeout", SECONDS]
    machines[DOWN].daemon.stop()
    slow = machines[SLOW].daemon.process
    slow.send_signal(signal.SIGSTOP)
    try:
        status = fleet("status", *listed, "--json", GPUMOND_CA_FILE=str(place / "ca.crt"))
        problems = {each["machine"]: each["problem"] for each in json.loads(status.stdout) if each["problem"]}
        assert problems.keys() == {DOWN, SLOW, WRONG}
        assert problems[DOWN] == "nothing is listening at this address"
        assert problems[SLOW] == "no response: the server has accepted no connection for 10 s"
        assert "certificate isn't valid" in problems[WRONG]
        waiting = Confirming(
            *listed,
            *("--workload", "train", "--max-failures", "99", "--no-canary"),
            environ={"GPUMOND_CA_FILE": str(place / "ca.crt")},
        )
        reused = machines[REUSED]
        pid = reused.programs["train"].pid
        reused.programs["train"].kill()
        reused.programs["train"].communicate()
        start_with_pid(reused, "train", pid)
        reused.listed()
        code, shown, errors = waiting.answer("y\n")
    finally:
        slow.send_signal(signal.SIGCONT)
    assert code == 1, shown + errors
    rows = {line.split()[0]: line for line in shown.splitlines() if line.startswith("node-")}
    assert "the process has exited" in rows[REUSED]
    assert rows[REFUSING].endswith("[1]")
    assert "[1] HTTP status 401" in shown
    assert not {DOWN, SLOW, WRONG} & rows.keys()
    failing = (DOWN, SLOW, REFUSING, REUSED)
    del machines[DOWN]
    assert flushed(machines) == {name: ["train"] for name in NAMES if name not in failing}
    assert [each["outcome"] for each in machines[REUSED].daemon.get("receipts")] == []
