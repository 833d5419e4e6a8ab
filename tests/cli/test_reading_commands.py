"""`alerts`, `verdicts`, `events`, `receipts` and `limit` on one running daemon with a program.

The tests that change the device come last.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumond.commands.main import main
from tests.fakenvml import FakeDriver, Process, machine
from tests.helpers.running import RunningDaemon, gpumond_here, until

GIB = 1 << 30
CONFIG = """
flush_cooldown: 0s
rules:
  - {name: hog, scope: process, value: used_bytes, above: 1GiB, annotations: {summary: "{pid} holds much"}}
"""


@pytest.fixture(scope="module")
def module_driver(nvml_library: Path, tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return FakeDriver(tmp_path_factory.mktemp("driver"), nvml_library)


@pytest.fixture(scope="module")
def daemon(module_driver: FakeDriver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """Return a daemon with one program, whose agent returns 1 GiB at each flush."""
    driver = module_driver
    driver.devices = machine(1)
    driver.write()
    directory = tmp_path_factory.mktemp("daemon")
    (directory / "gpumond.yaml").write_text(CONFIG)
    options = ("--source", "nvml", "--config", str(directory / "gpumond.yaml"), "--interval", "0.2s")
    with RunningDaemon(directory / "daemon", *options, environ=driver.env) as running:
        agent_options = {"device_uuid": driver.devices[0].uuid, "workload": "train", "cached_bytes": 3 * GIB}
        agent_options["answers"] = ["classes"]
        command = [sys.executable, "-m", "tests.helpers.agents", str(running.socket), json.dumps(agent_options)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as agent:
            driver.devices[0].processes = [Process(agent.pid, 4 * GIB)]
            driver.devices[0].used_bytes = 5 * GIB
            driver.write()
            until(lambda: running.value("gpumond_alerts", rule="hog", phase="firing") and running.get("agents"))
            yield running
            agent.kill()


def shown(daemon: RunningDaemon, *arguments: str, code: int = 0) -> list[str]:
    done = gpumond_here(*arguments, **daemon.environ)
    assert done.returncode == code, done.stderr
    return (done.stdout or done.stderr).splitlines()


def test_receipts_of_flushes_are_listed(daemon: RunningDaemon):
    (nothing,) = shown(daemon, "receipts")
    assert nothing.startswith("no receipts; ")
    assert nothing.endswith("gpumond flush --all --dry-run")
    assert shown(daemon, "silence", "list")[0].startswith("no silence is active; to add one: gpumond silence add")
    assert "to add a quota, list it under quotas: in the configuration file" in "".join(shown(daemon, "quota"))
    assert daemon.flush(target={"all": True})[0] == 200
    assert daemon.run("flush", "--all", "--dry-run").returncode in (0, 3)
    lines = shown(daemon, "receipts", "--limit", "1")
    assert len(lines) == 4
    assert lines[-1] == "1.0 GiB released"
    (receipt,) = json.loads("\n".join(shown(daemon, "receipts", "--json")))
    assert receipt["released_bytes"] == GIB


@pytest.mark.parametrize("command", ["receipts", "events", "audit"])
@pytest.mark.parametrize("limit", ["0", "-1", "x"])
def test_limit_below_one_is_refused(command: str, limit: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main([command, f"--limit={limit}"])
    assert end.value.code == 2
    assert "must be a whole number above 0" in capsys.readouterr().err


def test_closed_output_ends_a_command_like_sigpipe(daemon: RunningDaemon):
    command = [sys.executable, "-m", "gpumond", "status"]
    with subprocess.Popen(command, env=daemon.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as status:
        assert status.stdout is not None
        assert status.stderr is not None
        status.stdout.close()
        assert status.stderr.read() == b""
    assert status.returncode == 141


def test_an_https_address_of_a_server_without_tls_is_said_to_be_one(daemon: RunningDaemon):
    url = daemon.url.replace("http:", "https:")
    (refused,) = shown(daemon, "status", "--url", url, code=1)
    reason = "no TLS connection: the server doesn't use TLS; pass an http:// address, or set up TLS in the daemon"
    assert refused == f"gpumond: {url}: {reason}"


def test_events_are_listed_and_followed(daemon: RunningDaemon):
    assert any("agent connected" in line for line in shown(daemon, "events"))
    last = json.loads(shown(daemon, "events", "--json")[-1])["id"]
    command = [sys.executable, "-m", "gpumond", "events", "-f", "--json"]
    with subprocess.Popen(command, env=daemon.environ, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        while json.loads(following.stdout.readline())["id"] < last:
            pass
        assert daemon.flush(target={"all": True})[0] == 200
        event = json.loads(following.stdout.readline())
        following.kill()
    assert (event["kind"], event["id"]) == ("flush", last + 1)


def test_verdicts_are_listed_without_healthy_curves(daemon: RunningDaemon):
    until(lambda: daemon.value("gpumond_alerts", rule="hog", phase="firing"))
    line, *_, alerts = shown(daemon, "verdicts")
    assert alerts.startswith("alerts: hog (")
    assert line in ("no problem found in the memory curves", "no memory curve is long enough yet")


def test_limit_of_a_program_that_does_not_allow_it_names_the_remedy(daemon: RunningDaemon):
    pid = str(daemon.get("agents")[0]["pid"])
    (refusal,) = shown(daemon, "limit", "--pid", pid, "40GiB", code=1)
    assert "GPUMOND_ALLOW_LIMIT=1" in refusal
    (wrong,) = shown(daemon, "limit", "--pid", pid, "much", code=2)
    assert "'much'" in wrong
    (incomplete,) = shown(daemon, "limit", "train", code=2)
    assert incomplete == "gpumond: SIZE is required, for example: gpumond limit train 40GiB"
    shown(daemon, "limit", "--pid", "1", "none", code=3)


def test_alerts_of_built_in_rules_have_their_next_step_and_the_address_of_their_runbook(
    daemon: RunningDaemon, module_driver: FakeDriver
):
    module_driver.devices[0].used_bytes = 140 * GIB
    module_driver.write()
    until(lambda: daemon.value("gpumond_alerts", rule="device-nearly-full", phase="pending"))
    lines = shown(daemon, "alerts")
    (step,) = (line for line in lines if line.startswith("device-nearly-full: "))
    assert step == "device-nearly-full: to see the programs: gpumond status"
    found = [line for line in lines if line.startswith("runbook for ")]
    assert f"runbook for device-nearly-full: {daemon.url}/docs/runbooks/device-nearly-full" in found
    assert not [line for line in found if "hog" in line]
    api = daemon.get("status")["agent_socket"].replace("agent.sock", "api.sock")
    assert found == [line for line in shown(daemon, "alerts", "--url", f"unix://{api}") if line.startswith("runbook")]


def test_alerts_are_listed_and_a_resolved_one_with_past(daemon: RunningDaemon, module_driver: FakeDriver):
    pid = daemon.get("agents")[0]["pid"]
    header, *rows = shown(daemon, "alerts")
    assert header.split() == ["PHASE", "SEVERITY", "RULE", "SINCE", "SUMMARY"]
    assert [row for row in rows if row.startswith("firing") and row.endswith(f"{pid} holds much")]
    module_driver.devices[0].processes = []
    module_driver.write()
    until(lambda: [each for each in daemon.get("alerts/history") if each["rule"] == "hog"])
    assert [row for row in shown(daemon, "alerts", "--past") if row.startswith("resolved") and " hog " in row]
