"""top in a real terminal with a real daemon, and without a terminal, for scripts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from typing import Any

import pytest

from gpumond.facts.frame import Alert, FaultWithRemedy
from gpumond.facts.snapshot import SourceState
from gpumond.facts.units import size_text
from tests.helpers import forks
from tests.helpers.frames import FakeDaemon, busy_frame, fake_daemon, make_frame
from tests.helpers.running import RunningDaemon, until
from tests.helpers.screens import TOP, terminal
from tests.helpers.values import GIB, make_device, make_process

pytestmark = pytest.mark.slow

BLOCKED = ("pydantic", "fastapi", "uvicorn", "yaml", "prometheus_client", "textual", "rich")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with RunningDaemon(tmp_path_factory.mktemp("top") / "demo", "--interval", "0.2s", command="demo") as daemon:
        until(lambda: daemon.request("/-/ready")[0] == 200)
        until(lambda: reclaimable(daemon) > GIB, 60)
        yield daemon


@pytest.fixture
def fake() -> Iterator[FakeDaemon]:
    with fake_daemon(busy_frame()) as daemon:
        yield daemon


def reclaimable(daemon: RunningDaemon) -> int:
    return sum(
        pool["reclaimable"]["likely"]
        for agent in daemon.get("agents")
        for pool in agent["pools"]
        if agent["workload"] == "train-llm"
    )


def environ(daemon: RunningDaemon) -> dict[str, str]:
    return {name: daemon.environ[name] for name in ("GPUMOND_URL", "GPUMOND_SOCKET")}


def test_session_from_start_to_receipt_and_exit(demo: RunningDaemon):
    with terminal(TOP, COLORTERM="truecolor", **environ(demo)) as session:
        session.shows("GPU 0 Simulated 24 GiB", "train-llm", "chat-api", "notebook", "etl", "q Quit")
        session.press("/")
        session.shows("words that all match")
        session.press("train-llm\r")  # a rule of the demo may just have flushed another program
        session.shows("train-llm (pid")
        session.press("f")
        session.shows("train-llm", "WOULD RELEASE", "y: yes")
        session.press("y")
        session.shows("receipts", "DRIVER", "released")
        session.press("\x1b")
        session.shows("USED↓", "train-llm", without="receipts")
        assert "48;2;51;81;253" in session.written  # live, as on the page
        session.press("q")
        assert session.ends() == 0
        assert termios.tcgetattr(session.terminal) == session.before
        for restored in ("\x1b[?1049l", "\x1b[?25h"):
            assert restored in session.written[session.written.rindex("\x1b[?1049h") :]
    assert demo.get("receipts")


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1", "COLORTERM": "truecolor"}, {"TERM": "xterm"}, {"TERM": "vt100"}])
def test_shares_are_distinguished_by_marks_without_colors(fake: FakeDaemon, environ: dict[str, str]):
    with terminal(TOP, GPUMOND_URL=fake.url, **environ) as session:
        session.shows("#" * 20 + "+" * 12 + "x" * 6 + "=" * 2 + "?" * 10 + "." * 30, "# live 20.0 GiB")
        assert "48;2;51;81;253" not in session.written
        session.press("\x03")
        assert session.ends() == 0


def test_top_ends_immediately_while_the_daemon_hangs(fake: FakeDaemon):
    fake.answers["/api/v1/frame"] = None
    with terminal(TOP, GPUMOND_URL=fake.url) as session:
        session.shows("CONNECTING")
        session.press("q")
        assert session.ends(5.0) == 0  # the request itself times out after ten
        assert not fake.over.is_set()


def run(*arguments: str, url: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return forks.run([*TOP, "--url", url, *arguments], env={**os.environ, **environ}, stdin=subprocess.DEVNULL)


def numbers(frame: dict[str, Any]) -> Iterator[str]:
    """Return the displayed values that both views show."""
    for device in frame["devices"]:
        yield from (size_text(device[name]) for name in ("size_bytes", "used_bytes", "free_bytes"))
    for process in frame["processes"]:
        names = ("used", "live", "cached", "stranded", "overhead")
        yield from (size_text(process[f"{name}_bytes"]) for name in names if process[f"{name}_bytes"] is not None)


def test_values_equal_those_of_status_for_the_same_frame(demo: RunningDaemon):
    with fake_daemon(demo.get("frame")) as fake:
        fake.answers |= {f"/api/v1/{name}": (200, demo.get(name)) for name in ("status", "quotas")}
        status = forks.run([sys.executable, "-m", "gpumond", "status", "--json", "--url", fake.url])
        expected = sorted(set(numbers(json.loads(status.stdout))))
        assert len(expected) > 8
        once = run("--once", url=fake.url).stdout
        assert [number for number in expected if number not in once] == [], once
        assert (
            json.loads(run("--once", "--json", url=fake.url).stdout)["snapshot"]["seq"]
            == json.loads(status.stdout)["seq"]
        )
        plain = forks.run([sys.executable, "-m", "gpumond", "status", "--url", fake.url]).stdout
        table = re.search(r"^GPU +PID.*?(?=\n\n|\n\Z)", plain, re.DOTALL | re.MULTILINE)
        assert table
        assert table[0] in once


@pytest.mark.parametrize("command", [("status",), ("top", "--once")])
def test_live_and_cached_stay_in_eighty_columns(demo: RunningDaemon, command: tuple[str, ...]):
    with terminal([sys.executable, "-m", "gpumond", *command, "--url", demo.url], (80, 40), NO_COLOR="1") as session:
        assert session.ends() == 0
        lines = session.written.splitlines()
    head = next(line for line in lines if re.match("GPU +PID", line))
    assert {"USED", "LIVE", "CACHED", "VERDICT"} <= {*head.split()}
    assert "OVERHEAD" not in head
    assert max(map(len, lines)) <= 80


def test_head_shows_the_socket_that_top_asks_and_commands_reach_it_without_an_address(demo: RunningDaemon):
    runtime = str(demo.socket.parent)
    with terminal(TOP, GPUMOND_RUNTIME_DIR=runtime, GPUMOND_URL="", NO_COLOR="1") as session:
        assert session.shows("PROGRAM", "live").startswith(f"gpumond unix://{runtime}/"[:50])
        session.press("w")
        session.shows("gpumond why", "--record", without="GPUMOND_URL")


@pytest.mark.parametrize("command", [("status",), ("top", "--once")])
def test_missing_driver_shows_the_remedy_once_and_no_empty_table(fake: FakeDaemon, command: tuple[str, ...]):
    remedy = "install the driver"
    words = f"the library was not found: {remedy}"
    down = SourceState(name="nvml", up=False, responsive=False, reason="library_not_found", detail=words)
    fault = FaultWithRemedy("nvml", "library_not_found", None, words, remedy)
    alert = Alert(
        rule="driver-down",
        phase="firing",
        labels=(),
        annotations=(("summary", f"no GPU can be read: {words}"),),
        value=1.0,
        active_at=0.0,
        fired_at=1.0,
    )
    fake.show(make_frame(source=down, faults=(fault,), alerts=(alert,)))
    command = [sys.executable, "-m", "gpumond", *command, "--url", fake.url]
    output = forks.run(command).stdout
    assert output.count(remedy) == 1
    assert "driver-down firing" in output
    assert "\nGPU " not in output


def test_once_is_plain_text_without_a_terminal(fake: FakeDaemon):
    screen = run("--once", url=fake.url)
    assert screen.returncode == 0
    assert "\x1b" not in screen.stdout
    assert "#" * 20 + "+" * 12 + "x" * 6 in screen.stdout
    with terminal([*TOP, "--once", "--url", fake.url], COLORTERM="truecolor") as session:
        assert session.ends() == 0
        assert "\x1b[48;2;51;81;253m" in session.written
        assert "\x1b[?1049h" not in session.written
    with terminal([*TOP, "--once", "--url", fake.url], COLORTERM="truecolor", NO_COLOR="1") as session:
        assert session.ends() == 0
        assert "48;2" not in session.written
        assert "#" * 20 + "+" * 12 + "x" * 6 in session.written


def test_top_without_a_terminal_names_the_option_for_scripts(fake: FakeDaemon):
    refused = run(url=fake.url)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "gpumond top --once" in refused.stderr
    assert run("--json", url=fake.url).returncode == 2


def test_top_requires_the_standard_library_only(fake: FakeDaemon):
    block = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED})); from gpumond.commands.main import main; "

    def without(*arguments: str) -> list[str]:
        return [sys.executable, "-c", f"{block}sys.exit(main({[*arguments, '--url', fake.url]!r}))"]

    with terminal(without("top")) as session:
        session.shows("train", "q Quit")
        session.press("q")
        assert session.ends() == 0
    once = subprocess.run(without("top", "--once"), capture_output=True, text=True, timeout=60)
    assert (once.returncode, once.stderr) == (0, "")
    assert "train" in once.stdout


def test_once_without_a_daemon_is_one_line_with_the_remedy():
    refused = run("--once", url="http://127.0.0.1:9")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "gpumond serve" in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [("status",), ("top", "--once")])
def test_other_server_is_reported_on_one_line(fake: FakeDaemon, command: tuple[str, ...]):
    fake.answers["/api/v1/frame"] = (200, {"status": "ok"})
    command = [sys.executable, "-m", "gpumond", *command, "--url", fake.url]
    refused = forks.run(command)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "isn't gpumond" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_unencodable_character_is_no_error(fake: FakeDaemon):
    fake.show(make_frame(make_device(used_bytes=GIB, processes=(make_process(10, comm="trän"),))))
    screen = run("--once", url=fake.url, PYTHONIOENCODING="ascii")
    assert screen.returncode == 0
    assert "tr?n" in screen.stdout


def test_device_is_accepted_by_each_form_of_its_name(fake: FakeDaemon):
    """Shows only one of two devices with one process each."""
    devices = [
        make_device(
            f"GPU-{letter}1", index=index, name=f"H{index}00", used_bytes=GIB, processes=(make_process(90_001 + index),)
        )
        for index, letter in enumerate("ab")
    ]
    frame = make_frame(*devices)
    fake.show(frame)
    fake.answers["/api/v1/devices"] = (200, frame["snapshot"]["devices"])
    for name in ("1", "GPU-b"):
        shown = run("--once", "--device", name, url=fake.url).stdout
        assert "H100" in shown
        assert "H000" not in shown
        assert ("90002" in shown, "90001" in shown) == (True, False)
    unknown = run("--once", "--device", "7", url=fake.url)
    assert unknown.returncode == 2
    assert "0 (GPU-a1), 1 (GPU-b1)" in unknown.stderr


def test_terminal_of_the_c_locale_gets_ascii(fake: FakeDaemon):
    with terminal(TOP, GPUMOND_URL=fake.url, LC_ALL="C") as session:
        session.shows("train", "USEDv", "q Quit")
        assert session.screen.text().isascii()
