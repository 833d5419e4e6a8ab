"""The demo, end to end: real programs with the real agent over the real socket, on the simulated device."""

from __future__ import annotations

import csv
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.agents import GIB
from tests.helpers.running import RunningDaemon, until

ROOT = Path(__file__).parents[2]
PROGRAMS = {"train-llm", "chat-api", "notebook", "etl"}


def ready(daemon: RunningDaemon) -> RunningDaemon:
    until(lambda: daemon.request("/-/ready")[0] == 200)
    until(lambda: {agent["workload"] for agent in daemon.get("agents") if agent["pools"]} == PROGRAMS)
    return daemon


@pytest.fixture
def demo(serve: Callable[..., RunningDaemon]) -> RunningDaemon:
    return ready(serve(command="demo"))


@pytest.fixture(scope="module")
def common_demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """The demo of several tests, the last of which ends it."""
    with RunningDaemon(tmp_path_factory.mktemp("demo") / "daemon", command="demo") as daemon:
        yield ready(daemon)


def demo_on(listen: str, directory: Path) -> list[str]:
    return [sys.executable, "-m", "gpumond", "demo", "--listen", listen, "--socket", str(directory / "agent.sock")]


def test_first_line_is_the_address_of_the_page(tmp_path: Path):
    with subprocess.Popen(
        demo_on("127.0.0.1:0", tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as demo:
        try:
            assert demo.stdout is not None
            first = re.fullmatch(r"open (http://127\.0\.0\.1:\d+/)#code=\S+\n", demo.stdout.readline())
            assert first
            with urllib.request.urlopen(first[1], timeout=60) as answer:
                assert b"<title>gpumond</title>" in answer.read()
        finally:
            demo.terminate()


def test_port_in_use_prints_the_error_only_and_starts_no_program(tmp_path: Path):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        socket.socket(socket.AF_UNIX) as agents,
    ):
        agents.bind(str(tmp_path / "agent.sock"))
        agents.listen()
        agents.setblocking(False)
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [
            sys.executable,
            "-m",
            "gpumond",
            "demo",
            "--listen",
            listen,
            "--socket",
            str(tmp_path / "agent.sock"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        with pytest.raises(BlockingIOError):
            agents.accept()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"gpumond: can't listen on {listen}, because another program uses the port; stop that program, "
        "or choose another port with --listen"
    ]


@pytest.mark.needs("make")
def test_make_announces_long_steps_before_they_begin(tmp_path: Path):
    command = ["make", "--dry-run", "run", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert 0 < done.stdout.index(", about 40 s, once") < done.stdout.index("-m venv")


def test_ledger_of_running_programs_adds_up(common_demo: RunningDaemon):
    for _ in range(200):
        frame = common_demo.get("snapshot")
        ledger = common_demo.get("ledger")
        if common_demo.get("snapshot")["seq"] != frame["seq"]:
            continue
        (device,) = frame["devices"]
        (overcount,) = ledger["overcounts"]
        assert (
            sum(line["used_bytes"] for line in ledger["lines"]) == device["used_bytes"] + overcount["overcount_bytes"]
        )
        assert {line["share"] for line in ledger["lines"]} >= {"live", "cached", "stranded", "overhead", "unattributed"}
        if not [line for line in ledger["lines"] if line["share"] == "opaque" and line["used_bytes"]]:
            return  # between two reports, what a program takes is opaque
        time.sleep(0.05)
    pytest.fail("no frame without opaque memory")


def test_flush_releases_the_predicted_bytes_and_the_driver_agrees(common_demo: RunningDaemon):
    def reclaimable() -> int:
        return sum(pool["reclaimable"]["likely"] for a in common_demo.get("agents") for pool in a["pools"])

    def unraced() -> int:
        until(lambda: reclaimable() > GIB)
        status, answer, _ = common_demo.flush(target={"all": True}, force=True)
        assert status == 200
        assert {receipt["workload"] for receipt in answer["receipts"]} == PROGRAMS
        assert answer["released_bytes"] > 0
        exact = [receipt for receipt in answer["receipts"] if not receipt["raced"]]
        for receipt in exact:
            assert receipt["released_bytes"] == receipt["expected"]["likely"] == receipt["driver_released_bytes"]
            assert receipt["outcome"] == ("freed" if receipt["released_bytes"] else "nothing")
        return len(exact)

    until(lambda: unraced() >= 3)  # on a busy machine, programs allocate during the flush


def test_printed_commands_work_as_they_stand(common_demo: RunningDaemon):
    log = common_demo.log.read_text()
    commands = re.findall(r"^  (GPUMOND_RUNTIME_DIR=\S+ .*gpumond .+)$", log, re.MULTILINE)
    assert [re.sub(r".* (-m )?gpumond ", "", command) for command in commands] == [
        "status",
        "flush --all --dry-run",
        "flush train-llm",
        "why train-llm",
    ]
    environ = {name: value for name, value in common_demo.environ.items() if not name.startswith("GPUMOND_")}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"

    def ran(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, shell=True, env=environ, capture_output=True, text=True, timeout=60)

    def output(command: str) -> str:
        done = ran(command)
        assert (done.returncode, done.stderr) == (0, ""), f"{command}\n{done.stdout}"
        return done.stdout

    status, plan, _, why = commands

    def planned() -> bool:  # the demo's own rule may flush between two commands, which leaves nothing to do
        until(lambda: re.search(r": gpumond flush --all$", output(status), re.MULTILINE))
        return ran(plan).returncode == 0

    until(planned)
    assert output(why)
    assert "This address signs you in once, within the next 10 min." in common_demo.log.read_text()


def test_session_of_the_printed_address_names_its_user(common_demo: RunningDaemon):
    code = until(lambda: re.search(r"#code=(\S+)", common_demo.log.read_text()))[1]
    _, answer, _ = common_demo.request("/api/v1/sessions", {"code": code})
    token = json.loads(answer)["token"]
    _, answer, _ = common_demo.request(
        "/api/v1/flushes", {"target": {"all": True}, "dry_run": True}, Authorization=f"Bearer {token}"
    )
    (name,) = {each["requested_by"] for each in json.loads(answer)["receipts"]}
    assert re.fullmatch(f"uid:{os.geteuid()}/session:[0-9a-f]{{8}}", name)


NOBODY = "nobody-has-this-name"


@pytest.mark.parametrize(
    ("command", "status", "text"),
    [
        ("flush notebok", 3, "did you mean notebook?"),
        (f"flush {NOBODY}", 3, f"no program with an agent matches workload {NOBODY}"),
        (f"flush --user {NOBODY}", 2, f"no program of user {NOBODY} uses a GPU"),
        ("flush --device 7", 2, "no GPU '7'"),
        (f"suspend {NOBODY}", 3, f"workload {NOBODY}"),
        (f"resume {NOBODY}", 3, f"no program that has an agent or is suspended matches {NOBODY}"),
        ("resume notebook", 3, "notebook isn't suspended"),
        ("why notebok", 3, "did you mean notebook?"),
        (f"snapshot {NOBODY}", 3, f"workload {NOBODY}"),
        (f"limit {NOBODY} 4GiB", 3, f"workload {NOBODY}"),
        ("limit --device 7 4GiB", 2, "no GPU '7'"),
        ("status --device 7", 2, "no GPU '7'"),
        ("flush --pid 1", 3, "pid 1"),
        ("why --pid 1", 3, "pid 1"),
        ("baseline record x --for 0", 2, "gpumond: --for: must be at least 1 s"),
        ("detach-driver --for 0", 2, "gpumond: --for: must be above 0 s"),
        ("events --csv -f", 2, "--csv and --follow can't be combined"),
    ],
)
def test_exit_code_tells_a_selection_without_programs_from_wrong_use(
    common_demo: RunningDaemon, command: str, status: int, text: str
):
    done = common_demo.run(*command.split())
    assert (done.returncode, done.stdout) == (status, ""), done
    assert text in done.stderr


def test_user_and_device_select_programs(common_demo: RunningDaemon):
    user = common_demo.get("processes")[0]["user"]
    plan = json.loads(common_demo.run("flush", "--user", user, "--dry-run", "--json").stdout)
    assert {receipt["workload"] for receipt in plan["receipts"]} == PROGRAMS
    assert "train-llm" in common_demo.run("status", "--device", "0").stdout


def test_programs_have_the_limit_of_their_quota_or_of_a_command(common_demo: RunningDaemon):
    def limits() -> dict[str, int | None]:
        return {each["workload"]: each["limit_bytes"] for each in common_demo.get("processes")}

    until(lambda: limits()["chat-api"] == int(2.9 * GIB))
    limited = common_demo.run("limit", "train-llm", "6GiB")
    assert (limited.returncode, limited.stdout.splitlines()[-1].partition(": ")[0]) == (0, "to remove this limit")
    assert limited.stdout.endswith(" limit train-llm none\n")
    until(lambda: limits()["train-llm"] == 6 * GIB)
    removed = common_demo.run("limit", "train-llm", "none")
    assert (removed.returncode, "to remove" in removed.stdout) == (0, False)
    until(lambda: limits()["train-llm"] is None)


def test_process_above_its_soft_limit_has_an_alert(common_demo: RunningDaemon):
    (alert,) = until(lambda: [one for one in common_demo.get("alerts") if one["rule"] == "quota-exceeded"], 180)
    assert dict(alert["labels"])["workload"] == "chat-api"
    assert "more than the soft limit of the chat-api quota (2.7 GiB)" in dict(alert["annotations"])["summary"]


def test_lists_are_csv(common_demo: RunningDaemon):
    for command in ("events", "receipts", "alerts", "verdicts"):
        rows = list(csv.DictReader(common_demo.run(command, "--csv").stdout.splitlines()))
        known = common_demo.run(command, "--json").stdout
        entries = [*map(json.loads, known.splitlines())] if command == "events" else json.loads(known)
        assert len(rows) <= len(entries)
        assert not rows or rows[0].keys() <= {name for entry in entries for name in entry}
    (first, *_) = csv.DictReader(common_demo.run("events", "--csv").stdout.splitlines())
    assert datetime.fromisoformat(first["at"].replace("Z", "+00:00")).timestamp() > 1e9


def test_idle_program_is_suspended_and_resumed_as_the_tutorial_says(serve: Callable[..., RunningDaemon]):
    text = (ROOT / "docs/tutorial/first-hour.md").read_text()
    suspend, resume = re.findall(r"^gpumond ((?:suspend|resume) .+)$", text, re.MULTILINE)
    demo = serve("--devices", "2", command="demo")

    def row() -> dict[str, Any]:
        return next((each for each in demo.get("processes") if each["workload"] == "embeddings"), {})

    until(lambda: demo.request("/-/ready")[0] == 200)
    until(lambda: (row().get("idle_seconds") or 0.0) > 1.0)  # while finetune works on the same device
    done = demo.run(*suspend.split())
    assert (done.returncode, "suspended" in done.stdout) == (0, True), done
    until(lambda: row().get("state") == "suspended")
    for command in (("status",), ("top", "--once")):
        assert "on the host; needs" in demo.run(*command).stdout
    until(lambda: "embeddings is suspended. To resume, it needs" in demo.log.read_text())
    until(lambda: re.search(r"^1 .* pretrain .* 16\.\d GiB", demo.run("status").stdout, re.MULTILINE))
    missing = r"GiB that the program needs; GPU 1's largest programs are pretrain \(pid \d+, 16\.\d GiB\) and finetune"
    refused = demo.run("resume", "embeddings")
    assert (refused.returncode, bool(re.search(missing, refused.stdout))) == (1, True), refused
    waiting = [sys.executable, "-m", "gpumond", *resume.split()]
    done = subprocess.run(waiting, env=demo.environ, capture_output=True, text=True, timeout=150)
    assert (done.returncode, "resumed" in done.stdout) == (0, True), done
    assert re.search(f"gpumond resume: waiting: .*{missing}", done.stderr), done
    until(lambda: (row().get("live_bytes") or 0) > 8 * GIB)
    receipts = [each for each in json.loads(demo.run("receipts", "--json").stdout) if "action" in each]
    assert [(each["action"], each["outcome"]) for each in receipts] == [
        ("suspend", "suspended"),
        ("resume", "refused"),
        ("resume", "refused"),
        ("resume", "resumed"),
    ]
    assert receipts[0]["released_bytes"] == receipts[0]["host_bytes"] == receipts[3]["expected_bytes"]


def test_waiting_program_ends_with_a_killed_demo(serve: Callable[..., RunningDaemon]):
    demo = serve("--devices", "2", command="demo")
    (waiting,) = until(lambda: demo.get("frame")["queue"])
    program = Path(f"/proc/{waiting['pid']}")
    assert program.exists()
    demo.process.kill()
    until(lambda: not program.exists())


def test_log_and_audit_distinguish_plan_flush_refusal_and_forced_flush(serve: Callable[..., RunningDaemon]):
    demo = ready(serve("--log-level", "info", command="demo"))
    training = {"target": {"pid": next(a["pid"] for a in demo.get("agents") if a["workload"] == "train-llm")}}
    plan = demo.flush(**training, dry_run=True)[1]
    (first, *_) = until(lambda: demo.flush(**training, plan=plan["id"])[1].get("receipts"))
    assert first["planned"] == plan["receipts"][0]["expected"]

    def reclaimable() -> int:
        (agent,) = (agent for agent in demo.get("agents") if agent["workload"] == "train-llm")
        return sum(pool["reclaimable"]["likely"] for pool in agent["pools"])

    def refusal() -> object:
        until(reclaimable)  # a flush without effect starts no cooldown
        status, problem, headers = demo.flush(**training)
        return headers["Retry-After"] if (status, 'with "force": true' in str(problem)) == (429, True) else None

    assert 0 < int(str(until(refusal))) <= 5
    assert demo.flush(**training, force=True)[0] == 200
    requests = [entry["detail"] for entry in demo.get("audit") if entry["action"] == "flush.request"]
    assert [request.get("force", False) for request in requests] == [False] * (len(requests) - 1) + [True]
    log = demo.log.read_text()
    subject = f"of pid {training['target']['pid']}, steps ipc,cache,trim, by token@uid:{os.geteuid()}"
    for line in (f"plan {subject}: 1 planned", f"flush {subject}: refused: ", f"forced flush {subject}: 1 "):
        assert line in log
    assert " released" in log
    verified = demo.run("audit", "verify", "--log", str(demo.log))
    assert verified.stdout.startswith(f"{demo.get('status')['store_file']}: ")
    assert verified.stdout.endswith(" logged entries are unchanged\n")
    pid = training["target"]["pid"]
    assert f"requested a flush of pid {pid} with the steps ipc, cache and trim" in demo.run("audit").stdout


def test_command_line_shows_and_flushes_programs(demo: RunningDaemon):
    status = demo.run("status")
    assert status.returncode == 0
    assert all(name in status.stdout for name in PROGRAMS)
    (device,) = demo.get("devices")
    assert device["uuid"] not in status.stdout
    assert re.search(f"{device['uuid']} +{device['pci_bus_id'] or '-'}", demo.run("status", "-v").stdout)
    assert json.loads(demo.run("status", "--json").stdout)["devices"]
    flush_all = re.compile(r"a flush of all programs would release .+: (.+)")
    assert flush_all.findall(demo.run("top", "--once").stdout) == flush_all.findall(status.stdout)
    plan = demo.run("flush", "--workload", "train-llm", "--dry-run", "--json")
    assert json.loads(plan.stdout)["receipts"][0]["outcome"] == "planned"
    missing = demo.run("flush", "--pid", "1")
    assert (missing.returncode, missing.stdout) == (3, "")
    assert "pid 1" in missing.stderr
    receipts = demo.run("flush", "--all", "--plan", "none")
    assert "plan none is unknown or expired" in receipts.stderr
    returned = re.search(r"^ *\d+ +\S+ +\S+ +(freed|partial) ", receipts.stdout, re.MULTILINE)  # not in a reason
    assert receipts.returncode == (0 if returned else 3), receipts
    assert " released" in receipts.stdout
    doctor = demo.run("doctor")
    assert "train-llm" in doctor.stdout


@pytest.mark.timeout(300)  # the verdicts take about 90 s, on a slow machine more
def test_demo_shows_one_leak_and_fragmentation(common_demo: RunningDaemon):
    pids = {agent["workload"]: str(agent["pid"]) for agent in common_demo.get("agents")}
    leaks: set[str] = set()

    def firing() -> dict[str, dict[str, str]]:
        leaks.update(str(verdict["pid"]) for verdict in common_demo.get("verdicts") if verdict["kind"] == "leak")
        return {
            alert["rule"]: dict(alert["labels"]) | dict(alert["annotations"])
            for alert in common_demo.get("alerts")
            if alert["phase"] == "firing"
        }

    alerts = until(lambda: (now := firing()).keys() >= {"leak", "fragmentation"} and now, 270, every=0.5)
    assert alerts["leak"]["pid"] == pids["notebook"]
    assert "/min" in alerts["leak"]["summary"]
    assert alerts["fragmentation"]["pid"] == pids["etl"]
    assert leaks == {pids["notebook"]}
    assert common_demo.value("gpumond_verdict", pid=pids["notebook"], kind="leak") == 1
    assert 0 < (common_demo.value("gpumond_time_to_full_seconds", pid=pids["notebook"]) or 0) < 3600
    device = common_demo.get("devices")[0]["uuid"]
    past = common_demo.get(f"history?uuid={device}&pid={pids['notebook']}&signal=live")["points"]
    assert past[-1]["median"] > past[0]["median"]


def test_demo_ends_with_its_programs(common_demo: RunningDaemon):
    pids = [agent["pid"] for agent in common_demo.get("agents")]
    assert common_demo.stop() == 0
    until(lambda: not [pid for pid in pids if _alive(pid)])


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
