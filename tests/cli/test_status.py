"""Tables and notes of `gpumond status`."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gpumond.commands.main import main
from gpumond.facts.frame import Alert, FaultWithRemedy, Verdict
from gpumond.facts.program import PoolLimit
from gpumond.facts.quota import QueuedRequest
from gpumond.facts.shares import SHARES
from gpumond.facts.suspension import MemoryHolder
from gpumond.facts.verdicts import AT_PEAK_CONDITION, VERDICT_REMEDIES
from gpumond.features.quotas.command import quota_text
from gpumond.view.frame import frame_view, view_of_device
from gpumond.view.rows import limit_sentences
from gpumond.view.tables import device_lines, device_table, note_paragraphs, process_table, suspended_programs
from gpumond.view.text import plain_text
from tests.helpers import forks
from tests.helpers.agents import GIB
from tests.helpers.frames import busy_frame, fake_daemon, make_frame
from tests.helpers.running import gpumond_here
from tests.helpers.screens import terminal
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_suspended


def test_help_explains_the_columns(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["status", "--help"])
    shown = capsys.readouterr().out
    assert all(f"\n  {name.upper()} " in shown for name in (*SHARES, "unmapped", "limit"))


def test_verdict_is_followed_by_its_remedy():
    leak = Verdict(device_uuid="GPU-a", pid=10, start_ticks=100, kind="leak", since=1.0, summary="train (pid 10) grows")
    release = Verdict(
        device_uuid="GPU-a",
        pid=11,
        start_ticks=100,
        kind="memory-freed",
        since=1.0,
        summary="serve (pid 11) freed 2.0 GiB of GPU 0",
    )
    *_, text = note_paragraphs(frame_view(busy_frame(verdicts=(leak, release))))
    assert text.splitlines() == [
        "verdict leak: train (pid 10) grows",
        *(f"  -> {step}" for step in VERDICT_REMEDIES["leak"].replace("PID", "10").split("; ")),
        "verdict memory-freed: serve (pid 11) freed 2.0 GiB of GPU 0",
    ]


def long_frame() -> dict[str, Any]:
    """One device; a workload and a user with long names."""
    process = make_process(123456, 40 * GIB, user="u" * 30)
    report = make_report(123456, (make_pool(live=20 * GIB, cached=12 * GIB),), workload="w" * 60)
    device = make_device(name="NVIDIA H100 80GB HBM3", used_bytes=40 * GIB, free_bytes=40 * GIB, processes=(process,))
    return make_frame(device, reports=(report,))


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_tables_fit_the_width(width: int):
    content = frame_view(long_frame())
    for table in (device_table(content, False, width, bars=True), process_table(content, width)):
        assert max(map(len, table.splitlines())) <= width
        assert "40.0 GiB" in table
        assert "12.0 GiB" in table


def test_columns_that_do_not_fit_are_named():
    content = frame_view(long_frame())
    narrow = process_table(content, 80).splitlines()
    assert "OVERHEAD" not in narrow[0]
    assert narrow[-1].startswith("to see all columns: gpumond status -w (hidden: OVERHEAD")
    assert "hidden" not in process_table(content)
    assert "w" * 60 in process_table(content)


def test_column_opaque_is_shown_where_a_program_has_taken_memory_since_its_report():
    process, other = make_process(1, 9 * GIB), make_process(2, GIB)
    report = make_report(1, (make_pool(live=5 * GIB, cached=GIB),))
    device = make_device(used_bytes=10 * GIB, processes=(process, other))
    assert "OPAQUE" in process_table(frame_view(make_frame(device, reports=(report,))))
    alone = replace(device, used_bytes=9 * GIB, processes=(process,))
    frame = make_frame(alone, reports=(report,))
    assert "OPAQUE" not in process_table(frame_view(frame))
    frame["processes"][0] |= {"used_bytes": 11 * GIB, "opaque_bytes": 2 * GIB}
    header, row = process_table(frame_view(frame)).splitlines()
    sizes = [float(number) for number, unit in pairwise(row.split()) if unit == "GiB"]
    assert "OPAQUE" in header
    assert sizes[0] == 11 == sum(sizes[1:])


def test_limit_below_the_used_memory_says_that_overhead_is_not_counted():
    report = replace(make_report(1, (make_pool(live=3 * GIB),)), limits=(PoolLimit("torch", "GPU-a", 3 * GIB),))
    device = make_device(used_bytes=4 * GIB, processes=(make_process(1, 4 * GIB),))
    frame = make_frame(device, reports=(report,))
    sentence = "the limit of train (3.0 GiB) doesn't include its overhead (1.0 GiB)"
    assert sentence in note_paragraphs(frame_view(frame))
    assert list(limit_sentences(frame["processes"])) == [sentence]
    assert "limit 3.0 GiB (no quota)" in quota_text([], frame)
    frame["processes"][0]["limit_bytes"] = 4 * GIB
    assert list(limit_sentences(frame["processes"])) == []
    frame["processes"][0]["limit_bytes"] = 2 * GIB
    later = "the limit of train (2.0 GiB) applies to each allocator's new allocations: it releases nothing"
    assert list(limit_sentences(frame["processes"])) == [later]


def test_flush_of_one_device_promises_the_cache_of_that_device():
    report = make_report(1, (make_pool(live=5 * GIB, cached=GIB), make_pool("GPU-b", live=GIB, cached=3 * GIB)))
    devices = [
        make_device(uuid, index=index, used_bytes=9 * GIB, processes=(make_process(1, 9 * GIB),))
        for index, uuid in enumerate(("GPU-a", "GPU-b"))
    ]
    content = frame_view(make_frame(*devices, reports=(report,)))
    (text,) = filter(None, note_paragraphs(view_of_device(content, "GPU-b")))
    assert text == "a flush of the programs on GPU 1 would release about 3.0 GiB: gpumond flush --device 1"
    assert "a flush of all programs would release about 4.0 GiB: gpumond flush --all" in note_paragraphs(content)


def test_one_device_shows_its_own_notices_and_counts_the_problems_of_others():
    processes = [make_process(pid, 9 * GIB) for pid in (10, 11)]
    devices = [
        make_device(uuid, index=index, used_bytes=9 * GIB, processes=(process,))
        for index, (uuid, process) in enumerate(zip(("GPU-a", "GPU-b"), processes, strict=True))
    ]
    leak = Verdict(device_uuid="GPU-a", pid=10, start_ticks=100, kind="leak", since=1.0, summary="train leaks")
    alerts = tuple(
        Alert(
            rule="full",
            phase="firing",
            labels=(("uuid", uuid),),
            annotations=(),
            value=1.0,
            active_at=1.0,
            fired_at=1.0,
        )
        for uuid in ("GPU-a", "GPU-b")
    )
    faults = tuple(FaultWithRemedy("nvml", "lost", uuid, "gone", "reset it") for uuid in ("GPU-a", "GPU-b", None))
    suspended = make_suspended(12)
    suspicion = replace(leak, kind="growing")
    frame = make_frame(
        *devices, verdicts=(leak, suspicion), alerts=alerts, faults=faults, suspended_programs=(suspended,)
    )
    text = "\n".join(note_paragraphs(view_of_device(frame_view(frame), "GPU-b")))
    assert "GPU 1: lost" in text
    assert "nvml: lost" in text
    assert "GPU 0" not in text
    assert text.count("alert full") == 1
    assert "leak" not in text
    assert text.endswith("\n2 more problems on other GPUs")
    assert "other GPUs" not in "\n".join(note_paragraphs(frame_view(frame)))
    assert suspended_programs(frame, "GPU-b") == "" != suspended_programs(frame, "GPU-a") == suspended_programs(frame)


def test_named_programs_are_shown_with_their_devices_and_what_concerns_them(capsys: pytest.CaptureFixture[str]):
    verdicts = tuple(
        Verdict(device_uuid="GPU-a", pid=pid, start_ticks=100, kind="leak", since=1.0, summary=name)
        for pid, name in ((10, "train"), (11, "python"))
    )
    frame = busy_frame(verdicts=verdicts)
    with fake_daemon(frame) as fake:
        for names, shown in (["train"], {"train"}), (["11"], {"python"}), (["train", "python"], {"train", "python"}):
            assert main(["status", *names, "--url", fake.url]) == 0
            text = capsys.readouterr().out
            assert {name for name in ("train", "python") if f"verdict leak: {name}" in text} == shown
            assert "H100" in text
        assert main(["status", "train", "trian", "--url", fake.url]) == 0
        assert capsys.readouterr().err == "gpumond: no process named trian uses a GPU; did you mean train?\n"
        assert main(["status", "trian", "--url", fake.url]) == 3
        assert capsys.readouterr().out == ""
        assert main(["status", "nobody", "--url", fake.url]) == 3
        assert capsys.readouterr().err.endswith("nobody uses a GPU; to list the programs: gpumond status\n")


def test_processes_are_sorted_by_waste_and_are_csv(capsys: pytest.CaptureFixture[str]):
    pools = (make_pool("GPU-a", 12 * GIB, GIB), make_pool("GPU-a", 2 * GIB, GIB, 4 * GIB))
    reports = tuple(make_report(pid, (pool,)) for pid, pool in zip((10, 12), pools, strict=True))
    processes = (make_process(10, 14 * GIB), make_process(11, 10 * GIB), make_process(12, 8 * GIB))
    device = make_device(used_bytes=32 * GIB, processes=processes)

    def pids(*words: str) -> list[int]:
        assert main(["status", "--csv", *words, "--url", fake.url]) == 0
        return [int(row["pid"]) for row in csv.DictReader(capsys.readouterr().out.splitlines())]

    with fake_daemon(make_frame(device, reports=reports)) as fake:
        assert pids() == pids("--sort", "used") == [10, 11, 12]
        assert pids("--sort", "waste") == [12, 10, 11], "what is unknown comes last"
        assert pids("11", "12") == [11, 12]
        assert main(["status", "--sort", "waste", "--json", "--url", fake.url]) == 2
        assert "--sort can't be combined with --json" in capsys.readouterr().err


def test_bar_shows_the_shares():
    table = device_table(frame_view(busy_frame()), bars=True)
    assert "#" * 5 + "+" * 3 + "x" in table
    assert table.splitlines()[-1] == "# live  + cached  x stranded  = overhead  ? opaque  . free"


def test_reserved_memory_is_shown_where_the_driver_states_it():
    assert "RESERVED" not in device_table(frame_view(busy_frame()))
    (device,) = frame_view(busy_frame()).devices
    reserving = replace(frame_view(busy_frame()), devices=(replace(device, reserved_bytes=2 * GIB),))
    header, row, legend = device_table(reserving, bars=True).splitlines()
    assert header.split().index("RESERVED") == header.split().index("USED") + 1
    assert "50.0 GiB   2.0 GiB" in row
    assert legend.endswith("  - reserved  . free")


def test_what_waits_takes_the_end_of_the_free_memory():
    (device,) = frame_view(busy_frame()).devices
    waiting = replace(frame_view(busy_frame()), devices=(replace(device, waiting_bytes=10 * GIB),))
    _, row, legend = device_table(waiting, bars=True).splitlines()
    assert "??......//" in row
    assert legend.endswith(". free  / waiting (part of free)")
    whole = "\n".join(plain_text(line) for line in device_lines(waiting, 80, 24, True))
    assert "." * 20 + "/" * 10 in whole
    assert ". free 30.0 GiB  / waiting (part of free) 10.0 GiB" in whole
    beyond = replace(waiting, devices=(replace(device, waiting_bytes=100 * GIB),))
    assert "?" + "/" * 30 in "".join(plain_text(line) for line in device_lines(beyond, 80, 24, True))


def test_json_of_status_has_queue_grants_and_quotas():
    with fake_daemon(busy_frame()) as fake:
        fake.answers |= {"/api/v1/status": (200, {}), "/api/v1/quotas": (200, [{"name": "gold"}])}
        done = forks.run([sys.executable, "-m", "gpumond", "status", "--json", "--url", fake.url])
    answer = json.loads(done.stdout)
    assert (answer["queue"], answer["grants"], answer["quotas"]) == ([], [], [{"name": "gold"}])


def test_status_fits_the_terminal_and_is_complete_elsewhere():
    with fake_daemon(long_frame()) as fake:
        command = [sys.executable, "-m", "gpumond", "status", "--url", fake.url]
        with terminal(command, (80, 40)) as session:
            assert session.ends() == 0
            lines = session.written.splitlines()
            assert any("#####" in line for line in lines)
            assert max(len(line) for line in lines if "GiB" in line and ":" not in line) <= 80
        with terminal([*command, "--wide"], (80, 40)) as session:
            assert session.ends() == 0
            assert "w" * 60 in session.written
        plain = gpumond_here("status", "--url", fake.url).stdout
        assert "w" * 60 in plain
        assert "#####" not in plain


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("command", ["status", "top --once", "queue", "quota"])
def test_sentences_break_between_words(width: int, command: str):
    summary = "train is leaking about 840 MiB/min on GPU 0; at this rate, GPU 0 will be full in about eight minutes"
    verdict = Verdict(device_uuid="GPU-a", pid=10, start_ticks=100, kind="leak", since=5.0, summary=summary)
    waiting = QueuedRequest(
        id="a",
        device_uuid="GPU-a",
        need_bytes=50 * GIB,
        available_bytes=8 * GIB,
        missing_bytes=7 * GIB,
        ahead=0,
        user="ann",
        workload="pretrain",
        pid=4242,
        since=999_940.0,
        holders=(MemoryHolder(7, "embeddings", 9 * GIB), MemoryHolder(8, "finetune", GIB)),
    )
    suspended = replace(make_suspended(21, 9 * GIB), workload="notebook-of-a-person-who-is-away")
    with fake_daemon(busy_frame(verdicts=(verdict,), queue=(waiting,), suspended_programs=(suspended,))) as fake:
        fake.answers["/api/v1/quotas"] = (200, [])
        words = [sys.executable, "-m", "gpumond", *command.split(), "--url", fake.url]
        whole = forks.run(words).stdout
        with terminal(words, (width, 60), NO_COLOR="1") as session:
            assert session.ends() == 0
            lines = [line.strip() for line in session.written.splitlines()]
    assert [line for line in lines if len(line) > width and ("  " not in line or command == "queue")] == []
    long = (line.strip() for line in whole.splitlines() if len(line) > width)
    sentences = [line for line in long if " " in line and "  " not in line]
    assert sentences
    shown = " ".join(lines)
    assert [sentence for sentence in sentences if " ".join(sentence.split()) not in shown] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["flush", "--all", "--timeout", "soon"], "expected a duration such as 30s"),
        (["attach", "1", "--timeout", "-1"], "expected a duration such as 30s"),
    ],
)
def test_durations_have_one_syntax(arguments: list[str], message: str):
    refused = gpumond_here(*arguments)
    assert refused.returncode == 2
    assert message in " ".join(refused.stderr.split())


def test_timeout_of_a_flush_accepts_a_unit():
    with fake_daemon(busy_frame()) as fake:
        fake.answers["/api/v1/flushes"] = (404, {"detail": "no agent matches"})
        assert gpumond_here("flush", "--all", "--timeout", "2m", "--url", fake.url).returncode == 3
        fake.answers["/api/v1/flushes"] = (422, {"detail": "body.timeout_seconds: must be at most 600"})
        refused = gpumond_here("flush", "--all", "--timeout", "2h", "--url", fake.url)
        assert (refused.returncode, refused.stderr) == (2, "gpumond: --timeout: must be at most 10 min\n")
        assert [body["timeout_seconds"] for _, body in fake.requests] == [120.0, 7200.0]


def test_address_may_be_a_host_and_a_port():
    with fake_daemon(busy_frame()) as fake:
        shown = gpumond_here("status", "--url", fake.url.removeprefix("http://"))
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "train" in shown.stdout
        refused = gpumond_here("status", "--url", "ftp://127.0.0.1")
        assert refused.returncode == 2
        assert "expected HOST:PORT" in refused.stderr


def test_refused_token_is_named_by_its_source(tmp_path: Path):
    with fake_daemon(busy_frame()) as fake:
        fake.answers["/api/v1/flushes"] = (401, {"detail": "the token is invalid"})
        command = [sys.executable, "-m", "gpumond", "flush", "--all", "--url", fake.url]
        environ = {name: value for name, value in os.environ.items() if name != "GPUMOND_TOKEN"}
        (tmp_path / "token").write_text("old\n")
        for own, source in (
            ({"GPUMOND_RUNTIME_DIR": str(tmp_path)}, tmp_path / "token"),
            ({"GPUMOND_TOKEN": "x"}, "$"),
        ):
            refused = subprocess.run(command, env=environ | own, capture_output=True, text=True, timeout=60)
            assert refused.returncode == 1
            assert f"the token is invalid (it is from {source}" in refused.stderr
            assert refused.stderr.endswith("; set GPUMOND_TOKEN to a valid one\n")


def test_verdicts_name_the_alerts_that_status_shows_as_verdicts(capsys: pytest.CaptureFixture[str]):
    labels = (("uuid", "GPU-a"), ("severity", "critical"))
    alert = Alert(
        rule="out-of-memory",
        phase="firing",
        labels=labels,
        annotations=(),
        value=1.0,
        active_at=1.0,
        fired_at=1.0,
        pid=10,
        start_ticks=100,
    )
    over = replace(alert, rule="fragmentation", pid=11)
    frame = busy_frame(alerts=(alert, over))
    with fake_daemon(frame) as fake:
        assert main(["verdicts", "--url", fake.url]) == 0
    shown = capsys.readouterr().out
    assert "alerts: out-of-memory (train, pid 10); " in shown
    assert "gpumond alerts" in shown.replace(sys.executable + " -m ", "")
    assert [row.status for row in frame_view(frame).processes] == ["out-of-memory", ""]


def test_time_to_full_names_its_condition(capsys: pytest.CaptureFixture[str]):
    leak = Verdict(device_uuid="GPU-a", pid=10, start_ticks=100, kind="leak", since=1.0, time_to_full_seconds=540.0)
    for summary, shown in (
        ("train is leaking", "about 9 min"),
        (f"full {AT_PEAK_CONDITION} of 2.0 GiB", "about 9 min at peak use"),
    ):
        with fake_daemon(busy_frame(verdicts=(replace(leak, summary=summary),))) as fake:
            assert main(["verdicts", "--url", fake.url]) == 0
        assert f"{shown}  {summary}" in capsys.readouterr().out


def test_alert_that_fires_after_its_breach_is_listed_as_ended(capsys: pytest.CaptureFixture[str]):
    texts = (("summary", "ended at 06:15:12 UTC; the alert was: much"),)
    alert = Alert(rule="hog", labels=(), value=1.0, phase="firing", active_at=1.0, fired_at=1.0, annotations=texts)
    frame = busy_frame(alerts=(alert,))
    with fake_daemon(frame) as fake:
        fake.answers["/api/v1/alerts"] = (200, frame["alerts"])
        assert main(["alerts", "--url", fake.url]) == 0
        assert capsys.readouterr().out.splitlines()[1].startswith("ended ")
        assert main(["alerts", "--json", "--url", fake.url]) == 0
    assert '"phase": "firing"' in capsys.readouterr().out


def test_alerts_are_in_the_order_of_status_and_have_their_severity(capsys: pytest.CaptureFixture[str]):
    def alert(rule: str, severity: str, at: float, **fields: Any) -> Alert:
        labels = (("severity", severity), ("uuid", "GPU-a"))
        known = {"phase": "firing", "fired_at": at, "annotations": (("description", "do it"),)} | fields
        return Alert(rule=rule, labels=labels, value=1.0, active_at=at, **known)

    alerts = (
        alert("quiet", "critical", 1.0, silenced_by=("0" * 16,)),
        alert("soon", "critical", 2.0, phase="pending", fired_at=None),
        alert("later", "warning", 9.0),
        alert("sooner", "warning", 8.0),
        alert("worst", "critical", 10.0),
    )
    frame = busy_frame(alerts=alerts)
    with fake_daemon(frame) as fake:
        fake.answers |= {"/api/v1/alerts": (200, frame["alerts"]), "/api/v1/silences": (200, [])}
        assert main(["alerts", "--url", fake.url]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["PHASE", "SEVERITY", "RULE", "SINCE", "SUMMARY"]
    order = ["worst", "sooner", "later", "soon", "quiet"]
    assert [line.split()[1:3] for line in lines[:3]] == [
        ["critical", "worst"],
        ["warning", "sooner"],
        ["warning", "later"],
    ]
    assert [line.partition(":")[0] for line in lines if line.endswith(": do it")] == order
    assert [notice.title.split()[0] for notice in frame_view(frame).alerts] == order
