"""Progress of commands that take long, on standard error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.screens import terminal

pytestmark = pytest.mark.slow

COMMAND = [
    sys.executable,
    "-c",
    "import time\nfrom gpumond.cli.progress import with_progress as p\nfor _ in p(range(6), 'things'): time.sleep(1)",
]


def test_log_has_one_line_in_half_a_minute():
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=60)
    (line,) = done.stderr.splitlines()
    assert line in ("gpumond: 3 things", "gpumond: 4 things"), "none in the first two seconds"
    assert done.stdout == ""


def test_terminal_has_one_line_that_is_rewritten():
    with terminal(COMMAND) as session:
        assert session.ends() == 0
        assert session.written.count("things") > 1
        assert len(session.screen.text().split()) == 3


@pytest.mark.parametrize(("seconds", "shown"), [(0.5, ""), (4, "gpumond: waiting\n")])
def test_request_that_takes_long_is_announced(seconds: float, shown: str):
    program = "import sys, time\nfrom gpumond.cli.progress import announce_if_slow as a\n"
    program += "with a('waiting'): time.sleep(float(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", program, str(seconds)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("", shown)
