"""`gpumond fleet flush` and `status` with real daemons and a real Prometheus."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumond import __version__, revision
from tests.helpers import certificates
from tests.helpers.prometheus import Prometheus
from tests.helpers.running import free_port, until
from tests.helpers.stubs import Confirming, SimulatedMachine, fleet, prometheus_stub, simulated, stub, write_targets

GIB = 1 << 30
QUERY = "gpumond_pool_reclaimable_bytes"
SCRAPES = "gpumond_snapshot_timestamp_seconds"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[list[SimulatedMachine]]:
    """Start two machines; on both runs train, and on the first serve."""
    programs: dict[str, dict[str, Any]] = {"node-1": {"train": {}, "serve": {}}, "node-2": {"train": {}}}
    with simulated(tmp_path_factory.mktemp("fleet"), nvml_library, programs) as machines:
        yield machines


@pytest.fixture
def machines(started: list[SimulatedMachine]) -> list[SimulatedMachine]:
    """Return the machines with their programs as at the start."""
    for each in started:
        each.restore()
    return started


def options(directory: Path, machines: list[SimulatedMachine], **others: str) -> list[str]:
    """Return the options for these machines, with their tokens, and for other addresses by name."""
    addresses = {each.name: each.address for each in machines} | others
    tokens = directory / "tokens.yaml"
    tokens.touch(0o600)
    tokens.write_text("".join(f"{each.name}: {each.token}\n" for each in machines))
    https = {"__scheme__": "https"}
    file = write_targets(directory / "targets.json", addresses, wrong=https)
    return ["--targets", str(file), "--tokens", str(tokens), "--timeout", "60s"]


def document(done: subprocess.CompletedProcess[str], code: int) -> dict[str, Any]:
    assert done.returncode == code, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def results(found: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(each["machine"], each["workload"]): each["result"] for each in found["results"]}


def test_status_of_machines_that_answer(tmp_path: Path, machines: list[SimulatedMachine]):
    shown = fleet("status", *options(tmp_path, machines))
    assert shown.returncode == 0, shown.stderr
    header, first, second, _, totals = shown.stdout.splitlines()
    assert header.split()[:4] == ["MACHINE", "VERSION", "DRIVER", "GPUS"]
    commit = f"+{revision()[:9]}" if revision() else ""
    assert first.split()[:4] == ["node-1", f"{__version__}{commit}", "580.65.06", "1"]
    assert "2 of 3" in first
    assert "1 of 2" in second
    assert totals.startswith("2 of 2 machines reachable; 2 of 2 GPUs up, ")
    assert totals.endswith(" used; 9.0 GiB reclaimable; 3 of 5 programs have an agent")


def test_dry_run_prints_the_plan_and_flushes_nothing(tmp_path: Path, machines: list[SimulatedMachine]):
    command = ["flush", *options(tmp_path, machines), "--machine", "node-*", "--dry-run"]
    plan = document(fleet(*command, "--json"), 0)["plan"]
    agents = {(each["machine"], each["workload"]): each["likely_bytes"] for each in plan if not each["refusal"]}
    assert agents == {("node-1", "serve"): 3 * GIB, ("node-1", "train"): 3 * GIB, ("node-2", "train"): 3 * GIB}
    shown = fleet(*command).stdout
    assert shown.count("the process has no agent") == 2  # the process of this test, on both devices
    assert shown.splitlines()[-1] == "a flush of 3 processes on 2 machines in 2 waves would release 9.0 GiB"
    assert [each.flushed() for each in machines] == [[], []]


def test_flush_of_a_workload_has_one_receipt_for_each_process(tmp_path: Path, machines: list[SimulatedMachine]):
    shown = fleet("flush", *options(tmp_path, machines), "--workload", "tr*", "--no-canary", "--yes")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "a flush of 2 processes on 2 machines in 1 wave would release 6.0 GiB" in shown.stdout
    assert shown.stdout.splitlines()[-1] == "2.0 GiB released"
    assert [each.flushed() for each in machines] == [["train"], ["train"]]


def test_canary_that_releases_less_than_expected_stops_the_flushes(tmp_path: Path, machines: list[SimulatedMachine]):
    """The count of the fake driver does not change."""
    command = ["flush", *options(tmp_path, machines), "--workload", "train", "--yes", "--json"]
    found = document(fleet(*command), 1)
    assert results(found) == {("node-1", "train"): "flushed", ("node-2", "train"): "skipped"}
    reason = "the flushes stopped after the first one: the driver counts only 0 B of 1.0 GiB as released"
    assert found["results"][1]["reason"] == reason
    assert [each.flushed() for each in machines] == [["train"], []]


def test_audit_of_an_operation_is_collected_from_all_machines(tmp_path: Path, machines: list[SimulatedMachine]):
    given = options(tmp_path, machines)
    command = ["flush", *given, "--workload", "train", "--no-canary", "--yes", "--json"]
    document(fleet(*command), 0)
    operation = document(fleet(*command, "--reason", "OPS-4711"), 0)["operation"]
    entries = document(fleet("audit", *given, "--operation", operation, "--json"), 0)["entries"]
    assert sorted((each["machine"], each["action"]) for each in entries) == [
        (name, action) for name in ("node-1", "node-2") for action in ("flush.receipts", "flush.request")
    ]
    requests = [each["detail"] for each in entries if each["action"] == "flush.request"]
    assert {(each["operation"], each["reason"]) for each in requests} == {(operation, "OPS-4711")}
    assert all("@" in each["by"] for each in requests)
    shown = fleet("audit", *given, "--operation", operation)
    assert shown.stdout.count(f"(operation {operation} by ") == 2
    assert fleet("audit", *given, "--operation", "other").returncode == 3


@pytest.mark.needs("prometheus")
def test_flush_selected_by_promql_reaches_exactly_the_selected_processes(
    tmp_path: Path, machines: list[SimulatedMachine]
):
    scraped = [{"targets": [each.address], "labels": {"instance": f"{each.name}:metrics"}} for each in machines]
    with Prometheus(tmp_path / "prometheus", {"gpumond": {"static_configs": scraped}}) as prometheus:
        tokens = options(tmp_path, machines)[2:]
        expression = f'{QUERY}{{workload="train", instance=~"node-1.*"}} > {GIB}'
        until(lambda: prometheus.instant(expression) and prometheus.instant(SCRAPES))
        command = ["flush", "--prometheus", prometheus.url, *tokens, "--query", expression, "--json", "--yes"]
        named = fleet(*command)
        assert document(named, 1)["results"][0]["reason"].startswith("HTTP status 401")  # named otherwise than tokens
        (tmp_path / "tokens.yaml").write_text(f'"node-1:metrics": {machines[0].token}\n')
        found = document(fleet(*command), 0)
        pid = machines[0].programs["train"].pid
        assert [(each["pid"], each["result"]) for each in found["results"]] == [(pid, "flushed")]
        assert found["released_bytes"] == GIB
        assert [each.flushed() for each in machines] == [["train"], []]
        assert fleet(*command[:-3], "absent_metric", "--yes").returncode == 3
        invalid = fleet(*command[:-3], "sum(", "--yes")
        assert invalid.returncode == 2
        assert "HTTP status 400" in invalid.stderr
        aggregated = fleet(*command[:-3], f"sum({QUERY})", "--yes")
        assert aggregated.returncode == 2
        assert "by (instance, pid)" in aggregated.stderr


@pytest.mark.needs("openssl")
def test_machines_that_fail_are_reported_and_the_others_are_flushed(tmp_path: Path, machines: list[SimulatedMachine]):
    place = certificates.make(tmp_path / "certificates")
    with stub(lambda path, body: (200, {}), place / "client.crt") as wrong:
        others = {"down": f"127.0.0.1:{free_port()}", "wrong": wrong.address}
        arguments = options(tmp_path, machines, **others)
        (tmp_path / "tokens.yaml").write_text(f"node-1: {machines[0].token}\nnode-2: gpm_another\n")
        command = ["flush", *arguments, "--workload", "*", "--user", "*", "--yes", "--json", "--no-canary"]
        found = document(fleet(*command, GPUMOND_CA_FILE=str(place / "ca.crt")), 1)
        assert {each["machine"]: each["problem"].partition(":")[0] for each in found["missing"]} == {
            "down": "nothing is listening at this address",
            "wrong": "the certificate isn't valid for this address",
        }
        expected = {("node-1", "train"): "flushed", ("node-1", "serve"): "flushed", ("node-2", "train"): "failed"}
        assert results(found) == expected
        assert {each["reason"] for each in found["results"] if each["result"] == "failed"} == {
            "HTTP status 401: the token is invalid or has been revoked"
        }
        assert [sorted(each.flushed()) for each in machines] == [["serve", "train"], []]


def test_process_with_a_reused_pid_is_not_flushed(tmp_path: Path, machines: list[SimulatedMachine]):
    """The series are older than the processes that have their pids now."""
    now = time.time()
    old = next(each["pid"] for each in machines[0].daemon.get("agents") if each["workload"] == "train")
    present = machines[1].programs["train"].pid
    series = [({"instance": name, "pid": str(pid)}, now, 1.0) for name, pid in (("node-1", old), ("node-2", present))]
    scrapes = [({"instance": "node-1"}, now, now - 3600.0), ({"instance": "node-2"}, now, now)]
    with prometheus_stub({QUERY: series, SCRAPES: scrapes}) as url:
        command = ["flush", *options(tmp_path, machines), "--prometheus", url, "--query", QUERY, "--yes", "--json"]
        found = document(fleet(*command), 0)
    assert {each["machine"]: each["refusal"] for each in found["plan"]} == {
        "node-1": "the pid was reused: the process started after the query's data",
        "node-2": "",
    }
    assert results(found) == {("node-2", "train"): "flushed"}
    assert [each.flushed() for each in machines] == [[], ["train"]]


def test_instance_without_an_address_is_reported(tmp_path: Path, machines: list[SimulatedMachine]):
    now = time.time()
    series = [({"instance": "node-9", "pid": "10"}, now, 1.0)]
    with prometheus_stub({QUERY: series, SCRAPES: []}) as url:
        command = ["flush", *options(tmp_path, machines), "--prometheus", url, "--query", QUERY, "--yes", "--json"]
        found = document(fleet(*command), 1)
    assert found["missing"] == [{"machine": "node-9", "url": None, "problem": "no address of node-9 is known"}]


@pytest.mark.parametrize(("answer", "code"), [("n\n", 1), ("\n", 1), ("n", 1), ("", 2)])
def test_nothing_is_flushed_without_confirmation(
    tmp_path: Path, machines: list[SimulatedMachine], answer: str, code: int
):
    shown = fleet("flush", *options(tmp_path, machines), "--workload", "train", stdin=answer)
    assert shown.returncode == code
    assert "nothing was flushed" in shown.stderr
    assert ("pass --yes" in shown.stderr) == (not answer)
    assert [each.flushed() for each in machines] == [[], []]


def test_process_that_ended_after_the_plan_is_refused(tmp_path: Path, machines: list[SimulatedMachine]):
    waiting = Confirming(*options(tmp_path, machines), "--workload", "train")
    machines[0].programs["train"].kill()
    until(lambda: machines[0].agents == {"serve"})
    code, shown, errors = waiting.answer("y\n")
    assert code == 0, shown + errors
    assert "the process has exited, or has no agent anymore" in shown
    assert shown.splitlines()[-1] == "1.0 GiB released, 1 refused"
    assert [each.flushed() for each in machines] == [[], ["train"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no processes are selected"),
        (("--query", "up"), "--query requires --prometheus"),
        (("--workload", "x", "--json"), "--json requires --yes or --dry-run"),
        (("--workload", "x", "--max-parallel", "0"), "must be above 0"),
        (("--workload", "x", "--flush-timeout", "0"), "--flush-timeout"),
        (("--workload", "x", "--min-reclaimable", "much"), "--min-reclaimable 'much'"),
        (("--query", "x @ 1", "--prometheus", "http://127.0.0.1:1", "--yes"), "@ modifier"),
    ],
)
def test_wrong_use_exits_with_2(tmp_path: Path, arguments: tuple[str, ...], message: str):
    empty = write_targets(tmp_path / "targets.json", {})
    refused = fleet("flush", "--targets", str(empty), *arguments)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr


def test_flushes_stop_after_a_program_that_does_not_answer(tmp_path: Path, machines: list[SimulatedMachine]):
    for machine in machines:
        for workload in machine.programs:
            machine.change(workload, answer="silence")
    command = ["flush", *options(tmp_path, machines), "--machine", "node-*", "--yes", "--json"]
    found = document(fleet(*command, "--max-parallel", "1", "--flush-timeout", "1s"), 1)
    assert {(each["wave"], each["result"]) for each in found["results"]} == {
        (1, "failed"),
        (2, "skipped"),
        (3, "skipped"),
    }
    failed = [each for each in found["results"] if each["wave"] == 1]
    assert all("didn't" in each["receipts"][0]["reason"] for each in failed)
    assert sum(len(each.flushed()) for each in machines) == len(failed)
