"""top in a real terminal with a real daemon, and without a terminal, for scripts."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpumond.api.resources import StatedFault
from gpumond.model.frame import Alert
from gpumond.model.snapshot import SourceState
from gpumond.model.units import human
from gpumond.testing import GIB, make_device, make_process
from tests.running import RunningDaemon, until
from tests.top.frames import FakeDaemon, busy_frame, fake_daemon, make_frame
from tests.top.screens import Terminal

ROWS, COLUMNS = 24, 80
COMMAND = [sys.executable, "-m", "gpumond", "top"]
WITHOUT_TEXTUAL = "import sys; sys.modules['textual'] = sys.modules['rich'] = None; from gpumond.cli import main; "


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    daemon = RunningDaemon(tmp_path_factory.mktemp("top") / "demo", "--interval", "0.2", verb="demo")
    until(lambda: daemon.request("/-/ready")[0] == 200)
    until(lambda: reclaimable(daemon) > GIB, 60)
    yield daemon
    daemon.stop()


@pytest.fixture
def fake() -> Iterator[FakeDaemon]:
    with fake_daemon(busy_frame()) as daemon:
        yield daemon


def reclaimable(daemon: RunningDaemon) -> int:
    return sum(
        pool["reclaimable"]["likely"]
        for agent in daemon.get("agents")
        for pool in agent["pools"]
        if agent["workload"] == "training"
    )


class Session:
    """Command in a terminal of its own."""

    def __init__(self, command: list[str], **environ: str) -> None:
        self.keyboard, self.terminal = pty.openpty()
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.before = termios.tcgetattr(self.terminal)
        self.screen, self.written = Terminal(COLUMNS, ROWS), ""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in ("NO_COLOR", "COLORTERM", "COLUMNS", "LINES")
        }
        self.process = subprocess.Popen(
            command,
            stdin=self.terminal,
            stdout=self.terminal,
            stderr=self.terminal,
            env=inherited | {"TERM": "xterm-256color", "PYTHONUTF8": "1"} | environ,
            start_new_session=True,
        )

    def read(self) -> None:
        while select.select([self.keyboard], [], [], 0.05)[0]:
            written = os.read(self.keyboard, 65536).decode(errors="replace")
            self.written += written
            self.screen.feed(written)

    def shows(self, *words: str, without: str = "\0") -> str:
        end = time.monotonic() + 30
        while True:
            self.read()
            seen = self.screen.text()
            if all(word in seen for word in words) and without not in seen:
                return seen
            assert time.monotonic() < end, f"{words} did not come:\n{seen}\n{self.written[-2000:]!r}"

    def press(self, keys: str) -> None:
        os.write(self.keyboard, keys.encode())

    def ends(self, seconds: float = 20.0) -> int:
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < end, "it does not end"
        self.read()
        return self.process.returncode


@contextmanager
def terminal(command: list[str], **environ: str) -> Iterator[Session]:
    session = Session(command, **environ)
    try:
        yield session
    finally:
        if session.process.poll() is None:
            session.process.kill()
            session.process.wait()
        os.close(session.keyboard)
        os.close(session.terminal)


def environ(daemon: RunningDaemon) -> dict[str, str]:
    return {name: daemon.environ[name] for name in ("GPUMOND_URL", "GPUMOND_SOCKET")}


def test_session_from_start_to_receipt_and_exit(demo: RunningDaemon):
    with terminal(COMMAND, COLORTERM="truecolor", **environ(demo)) as session:
        session.shows("GPU 0 Simulated 24 GiB", "training", "serving", "leak", "fragmentation", "q Quit")
        session.press("/")
        session.shows("part of a name")
        session.press("training\r")  # a rule of the demo may just have flushed another program
        session.shows("training (pid")
        session.press("f")
        session.shows("training", "would release about", "Flush? y: yes")
        session.press("y")
        session.shows("receipts", "driver measured", "released")
        session.press("\x1b")
        session.shows("USED↓", "training", without="receipts")  # an escape directly before another key is Alt
        assert "48;2;24;87;184" in session.written  # live, as on the page
        session.press("q")
        assert session.ends() == 0
        assert termios.tcgetattr(session.terminal) == session.before
        for restored in ("\x1b[?1049l", "\x1b[?25h"):
            assert restored in session.written[session.written.rindex("\x1b[?1049h") :]
    assert demo.get("receipts")


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1", "COLORTERM": "truecolor"}, {"TERM": "xterm"}, {"TERM": "vt100"}])
def test_shares_are_distinguished_by_marks_without_colours(fake: FakeDaemon, environ: dict[str, str]):
    with terminal(COMMAND, GPUMOND_URL=fake.url, **environ) as session:
        session.shows("#" * 20 + "+" * 12 + "x" * 6 + "=" * 2 + "?" * 10 + "." * 30, "# live 20.0 GiB")
        assert "48;2;24;87;184" not in session.written
        session.press("\x03")
        assert session.ends() == 0


def test_top_ends_immediately_while_the_daemon_hangs(fake: FakeDaemon):
    fake.answers["/api/v1/frame"] = None
    with terminal(COMMAND, GPUMOND_URL=fake.url) as session:
        session.shows("ASKING")
        session.press("q")
        assert session.ends(5.0) == 0  # the request itself times out after ten
        assert not fake.over.is_set()


def run(*arguments: str, url: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "--url", url, *arguments],
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def numbers(frame: dict[str, Any]) -> Iterator[str]:
    """Return the displayed values that both views show."""
    for device in frame["devices"]:
        yield from (human(device[name]) for name in ("size_bytes", "used_bytes", "free_bytes"))
    for process in frame["processes"]:
        names = ("used", "live", "cached", "stranded", "overhead", "opaque")
        yield from (human(process[f"{name}_bytes"]) for name in names if process[f"{name}_bytes"] is not None)


def test_values_equal_those_of_status_for_the_same_frame(demo: RunningDaemon):
    with fake_daemon(demo.get("frame")) as fake:
        fake.answers["/api/v1/status"] = (200, demo.get("status"))
        status = subprocess.run(
            [sys.executable, "-m", "gpumond", "status", "--json", "--url", fake.url],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        expected = sorted(set(numbers(json.loads(status.stdout))))
        assert len(expected) > 8
        once = run("--once", url=fake.url).stdout
        assert [number for number in expected if number not in once] == []
        assert (
            json.loads(run("--once", "--json", url=fake.url).stdout)["snapshot"]["seq"]
            == json.loads(status.stdout)["seq"]
        )
        plain = subprocess.run(
            [sys.executable, "-m", "gpumond", "status", "--url", fake.url], capture_output=True, text=True, timeout=60
        ).stdout
        table = re.search(r"^GPU +PID.*?(?=\n\n|\n\Z)", plain, re.DOTALL | re.MULTILINE)
        assert table
        assert table[0] in once


@pytest.mark.parametrize("verb", [("status",), ("top", "--once")])
def test_missing_driver_shows_the_remedy_once_and_no_empty_table(fake: FakeDaemon, verb: tuple[str, ...]):
    remedy = "install the driver"
    words = f"the library was not found: {remedy}"
    down = SourceState(name="nvml", up=False, responsive=False, reason="library_not_found", detail=words)
    fault = StatedFault("nvml", "library_not_found", None, words, remedy)
    alert = Alert(
        rule="driver-down",
        phase="firing",
        labels=(),
        annotations=(("summary", f"no device can be read: {words}"),),
        value=1.0,
        active_at=0.0,
        fired_at=1.0,
    )
    fake.show(make_frame(source=down, faults=(fault,), alerts=(alert,)))
    command = [sys.executable, "-m", "gpumond", *verb, "--url", fake.url]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert output.count(remedy) == 1
    assert "driver-down firing" in output
    assert "GPU " not in output


def test_once_is_plain_text_without_a_terminal(fake: FakeDaemon):
    seen = run("--once", url=fake.url)
    assert seen.returncode == 0
    assert "\x1b" not in seen.stdout
    assert "#" * 20 + "+" * 12 + "x" * 6 in seen.stdout
    with terminal([*COMMAND, "--once", "--url", fake.url], COLORTERM="truecolor") as session:
        assert session.ends() == 0
        assert "\x1b[48;2;24;87;184m" in session.written
        assert "\x1b[?1049h" not in session.written
    with terminal([*COMMAND, "--once", "--url", fake.url], COLORTERM="truecolor", NO_COLOR="1") as session:
        assert session.ends() == 0
        assert "48;2" not in session.written
        assert "#" * 20 + "+" * 12 + "x" * 6 in session.written


def test_top_without_a_terminal_names_the_option_for_scripts(fake: FakeDaemon):
    refused = run(url=fake.url)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "gpumond top --once" in refused.stderr
    assert run("--json", url=fake.url).returncode == 2


def test_missing_extra_is_named_and_once_works_without_it(fake: FakeDaemon, tmp_path: Path):
    def without(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = f"{WITHOUT_TEXTUAL}sys.exit(main({[*arguments]!r}))"
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path)

    refused = without("top", "--url", fake.url)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert re.fullmatch(r"gpumond: \w+(\.\w+)? is not installed: pip install 'gpumond\[top\]'\n", refused.stderr)
    once = without("top", "--once", "--url", fake.url)
    assert (once.returncode, once.stderr) == (0, "")
    assert "train" in once.stdout


def test_once_without_a_daemon_is_one_line_with_the_remedy():
    refused = run("--once", url="http://127.0.0.1:9")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "gpumond serve" in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", [("status",), ("top", "--once")])
def test_other_server_is_reported_on_one_line(fake: FakeDaemon, verb: tuple[str, ...]):
    fake.answers["/api/v1/frame"] = (200, {"status": "ok"})
    command = [sys.executable, "-m", "gpumond", *verb, "--url", fake.url]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "not gpumond" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_unencodable_character_is_no_error(fake: FakeDaemon):
    fake.show(make_frame(make_device(used_bytes=GIB, processes=(make_process(10, comm="trän"),))))
    seen = run("--once", url=fake.url, PYTHONIOENCODING="ascii")
    assert seen.returncode == 0
    assert "tr?n" in seen.stdout


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
    assert "0 GPU-a1, 1 GPU-b1" in unknown.stderr
