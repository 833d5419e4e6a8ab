"""Cases of a real daemon: of programs whose error is handled, and of one that it ends."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.agent_daemon import finished, run_in_program
from tests.helpers.running import RunningDaemon, until
from tests.oom.programs import card, program

pytestmark = pytest.mark.slow
MIB = 1 << 20


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    environ = {"GPUMOND_SIM_DIR": os.fspath(tmp_path / "cards")}
    (tmp_path / "cards").mkdir()
    with RunningDaemon(tmp_path / "daemon", "--source", "sim", "--interval", "0.2s", environ=environ) as daemon:
        yield daemon


def output(daemon: RunningDaemon, *arguments: str) -> str:
    done = daemon.run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def case_of(daemon: RunningDaemon, pid: int) -> Any:
    """Return the newest case of a process, once there is one."""
    (entry,) = until(lambda: [each for each in daemon.get("oom") if each["pid"] == pid])
    return daemon.get(f"oom/{entry['id']}")["case"]


def test_a_case_names_the_neighbor_whose_cache_is_enough(daemon: RunningDaemon, tmp_path: Path):
    device = card(daemon)
    with program(daemon, device, "notebook") as neighbor, program(daemon, device, "train") as process:
        run_in_program(neighbor, "allocator.free(allocator.malloc(700 * MIB))")
        until(lambda: 700 * MIB in [each["pools"][0]["reclaimable"]["likely"] for each in daemon.get("agents")])
        run_in_program(process, "suppressed(lambda: agent.scope('forward')(allocator.malloc)(500 * MIB))")
        case = case_of(daemon, process.pid)
        first = case["remedies"][0]
        assert (first["name"], first["size_bytes"], first["enough"]) == ("neighbor-cache", 700 * MIB, True)
        assert case["summary"].startswith(f"train (pid {process.pid}) requested 500.0 MiB")
        assert (case["oom"]["allocator"], case["request_bytes"]) == ("sim", 500 * MIB)
        assert {curve["workload"] for curve in case["timeline"]["curves"]} == {"notebook", "train"}
        alert = until(lambda: [a for a in daemon.get("alerts") if a["rule"] == "out-of-memory"])[0]
        assert dict(alert["annotations"])["case"] == case["id"]
        assert case["summary"].split(":")[0] in output(daemon, "oom", "show", case["id"])
        assert case["id"] in output(daemon, "oom")
        output(daemon, "oom", "show", "--html", os.fspath(tmp_path / "case.html"))
        document = (tmp_path / "case.html").read_text()
        assert "What would have prevented the error" in document
        assert document == daemon.request(f"/api/v1/oom/{case['id']}/report")[1].decode()
        assert len(document) < 1 << 20
        finished(process)
        finished(neighbor)


@pytest.mark.parametrize("scope", ["agent.scope('forward')", "(lambda call: call)"], ids=["scope", "counter"])
def test_errors_at_a_limit_by_hand_are_one_case_that_names_it(daemon: RunningDaemon, scope: str):
    device = card(daemon)
    with program(daemon, device, "notebook") as neighbor, program(daemon, device, "etl") as process:
        run_in_program(neighbor, "allocator.free(allocator.malloc(300 * MIB))")
        run_in_program(process, "large = allocator.malloc(200 * MIB)")
        until(lambda: 250 * MIB in [each["pools"][0]["held_bytes"] for each in daemon.get("agents")])
        output(daemon, "limit", "--pid", str(process.pid), "150MiB", "--yes")
        for number in (1, 2):
            run_in_program(process, f"suppressed(lambda: {scope}(allocator.malloc)(100 * MIB))")
            until(lambda: number in [each["errors"] for each in daemon.get("oom")])  # noqa: B023
        case = case_of(daemon, process.pid)
        had = "held at most 250.0 MiB" if "call" in scope else "held 250.0 MiB"
        reached = f"etl (pid {process.pid}) reached its limit of 150.0 MiB: it {had} and requested "
        assert case["summary"].startswith(reached)
        assert case["remedies"][0]["name"] == "limit"
        assert "neighbor-cache" not in {each["name"] for each in case["remedies"]}
        assert "the last of 2 errors" in output(daemon, "oom", "show", "--pid", str(process.pid))
        finished(process)
        finished(neighbor)


def test_a_case_names_the_neighbor_that_took_what_the_program_was_granted(daemon: RunningDaemon):
    device = card(daemon)
    with program(daemon, device, "notebook") as neighbor, program(daemon, device, "train") as process:
        token = (daemon.directory / "token").read_text().strip()
        body = {"need_bytes": 800 * MIB, "pid": process.pid}
        daemon.request("/api/v1/admissions", body, Authorization=f"Bearer {token}")
        until(lambda: daemon.get("frame")["grants"])
        run_in_program(neighbor, "kept = allocator.malloc(700 * MIB)")
        until(lambda: daemon.get("devices")[0]["used_bytes"] > 700 * MIB)
        run_in_program(process, "suppressed(lambda: agent.scope('forward')(allocator.malloc)(500 * MIB))")
        remedies = {each["name"]: each for each in case_of(daemon, process.pid)["remedies"]}
        assert remedies["grant"]["enough"] is True
        assert f"also start notebook (pid {neighbor.pid}) with gpumond run --need" in remedies["grant"]["text"]
        finished(process)
        finished(neighbor)


def test_a_case_accounts_for_what_the_program_took_and_freed_between_two_readings(daemon: RunningDaemon):
    device = card(daemon)
    attempt = (
        "try:\\n large = allocator.malloc(400 * MIB); allocator.malloc(600 * MIB)\\n"
        "except OutOfMemory:\\n allocator.free(large); allocator.empty_cache(); time.sleep(2)"
    )
    with program(daemon, device, "notebook") as neighbor, program(daemon, device, "train") as process:
        run_in_program(neighbor, "kept = allocator.malloc(200 * MIB)")
        until(lambda: 250 * MIB in [each["pools"][0]["held_bytes"] for each in daemon.get("agents")])
        run_in_program(process, f"import time; exec('{attempt}')")
        case = case_of(daemon, process.pid)
        assert (case["oom"]["seen"], case["request_bytes"]) == ("counter", 600 * MIB)
        rows = sum(line["used_bytes"] for line in case["lines"])
        assert rows + case["free_bytes"] + (case["reserved_bytes"] or 0) == pytest.approx(1024 * MIB, abs=MIB)
        assert "The program itself probably used 466.0 MiB, " in case["summary"]
        finished(process)
        finished(neighbor)


def test_a_failed_call_succeeds_after_a_neighbor_was_flushed(daemon: RunningDaemon):
    device = card(daemon)
    with program(daemon, device, "notebook") as neighbor, program(daemon, device, "train") as process:
        run_in_program(neighbor, "allocator.free(allocator.malloc(700 * MIB))")
        until(lambda: 700 * MIB in [each["pools"][0]["reclaimable"]["likely"] for each in daemon.get("agents")])
        run_in_program(process, "calls = []")
        run_in_program(process, "def work(size): calls.append(size); return allocator.malloc(size)")
        run_in_program(process, "agent.retry_on_oom(work, shrink=lambda size: None, borrow=True)(500 * MIB)")
        run_in_program(process, "assert calls == [500 * MIB, 500 * MIB], calls")
        run_in_program(process, "assert agent.program().oom_recovered == 1")
        (receipt,) = daemon.get("receipts")
        assert (receipt["pid"], receipt["released_bytes"]) == (neighbor.pid, 700 * MIB)
        assert receipt["requested_by"] == f"uid:{os.getuid()}"
        finished(process)
        finished(neighbor)


def test_a_program_that_its_error_ends_has_a_case(daemon: RunningDaemon):
    device = card(daemon)
    with program(daemon, device, "train") as process:
        process.communicate("allocator.malloc(2000 * MIB)\n", timeout=30)
        case = case_of(daemon, process.pid)
        assert case["remedies"][0]["name"] == "batch", "all live bytes of this program are activations"
        assert case["oom"]["stack"][-1]["file"] == "<string>"


def test_cases_are_kept_over_a_restart(daemon: RunningDaemon, tmp_path: Path):
    device = card(daemon)
    with program(daemon, device, "train") as process:
        process.communicate("allocator.malloc(2000 * MIB)\n", timeout=30)
        case = case_of(daemon, process.pid)
    daemon.stop()
    environ = {"GPUMOND_SIM_DIR": os.fspath(tmp_path / "cards")}
    with RunningDaemon(tmp_path / "daemon", "--source", "sim", environ=environ) as again:
        assert json.loads(again.request("/api/v1/oom/last")[1])["case"] == case


def test_a_program_whose_agent_left_before_its_memory_has_no_case_of_its_end(daemon: RunningDaemon):
    device = card(daemon)
    with program(daemon, device, "train") as process, program(daemon, device, "notebook") as witness:
        run_in_program(process, "full = allocator.malloc(880 * MIB); agent.stop()")
        until(lambda: [each["pid"] for each in daemon.get("agents")] == [witness.pid])
        finished(process)
        run_in_program(witness, "suppressed(lambda: agent.scope('forward')(allocator.malloc)(2000 * MIB))")
        assert case_of(daemon, witness.pid)
        assert [each["pid"] for each in daemon.get("oom")] == [witness.pid]
        finished(witness)
