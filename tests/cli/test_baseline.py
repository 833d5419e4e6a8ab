"""``gpumond baseline`` with a real daemon."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpumond.commands.main import main
from tests.fakenvml import FakeDriver, machine
from tests.helpers.running import RunningDaemon, until


@pytest.fixture
def daemon(serve: Callable[..., RunningDaemon], driver: FakeDriver) -> RunningDaemon:
    driver.devices = machine(1, pids=[os.getpid()])
    driver.write()
    started: RunningDaemon = serve("--source", "nvml", "--interval", "0.2s", environ=driver.env)
    until(lambda: started.request("/-/ready")[0] == 200)
    return started


def answer(daemon: RunningDaemon, *arguments: str) -> Any:
    done = daemon.run("baseline", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_growth_of_memory_fails_the_build(daemon: RunningDaemon, driver: FakeDriver, tmp_path: Path):
    kept = answer(daemon, "record", "n", "--for", "1s")
    (workload,) = kept["workloads"]
    before = driver.devices[0].processes[0].used_bytes
    assert {each["measure"]: each["distribution"]["peak"] for each in workload["measures"]}["used"] == before
    calm = daemon.run("baseline", "compare", "n", "--for", "4s", "--fail-if", "used_peak>5%")
    assert (calm.returncode, "used_peak" in calm.stdout) == (0, True)
    assert re.search(r"^gpumond: measured [23] s of 4 s$", calm.stderr, re.MULTILINE)
    driver.devices[0].processes[0].used_bytes += before // 10
    driver.write()
    until(lambda: daemon.value("gpumond_process_memory_used_bytes") == before + before // 10)
    options = ("--fail-if", "used_peak>5%", "--fail-if", "used_peak>20%")
    failed = daemon.run("baseline", "compare", "n", "--for", "1s", *options)
    assert failed.returncode == 1
    assert failed.stderr.count("used_peak>5%: [") == 1
    assert "used_peak>20%" not in failed.stderr
    assert "+10.0%" in failed.stdout
    report = tmp_path / "report.html"
    again = daemon.run("baseline", "compare", "n", "--fail-above", "5%", "--html", str(report))
    assert "n: before and after" in report.read_text()
    assert (again.returncode, again.stderr) == (1, "gpumond: live_peak>5%: no comparable measurement\n")
    assert [each["name"] for each in answer(daemon, "list")] == ["n"]
    assert answer(daemon, "delete", "n") == {"deleted": "n"}
    assert "there is no baseline n; to record it: gpumond baseline" in daemon.run("baseline", "compare", "n").stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("record", "n", "--for", "soon"), "--for 'soon': expected a duration"),
        (("compare", "n", "--fail-if", "live>5%"), "--fail-if 'live>5%': expected a comparison such as live_peak>5%"),
        (("compare", "n", "--fail-above", "x"), "--fail-above 'x': expected"),
        (("record", "bad name", "--for", "1s"), "'bad name': not a valid baseline name: expected a letter or digit"),
        (("compare", "a/b"), "'a/b': not a valid baseline name"),
        (("delete", ".n"), "'.n': not a valid baseline name"),
    ],
)
def test_wrong_use_exits_with_2_before_the_recording(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
):
    try:
        code = main(["baseline", *arguments, "--url", "http://127.0.0.1:1"])
    except SystemExit as refused:  # by argparse
        code = refused.code
    assert code == 2
    assert complaint in capsys.readouterr().err
