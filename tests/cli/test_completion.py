"""Completion scripts, in the shells themselves."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.frames import fake_daemon, make_frame
from tests.helpers.running import gpumond_here

SHOW = {
    "bash": """
source {script}
COMP_WORDS=({line}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_gpumond
printf '%s\\n' "${{COMPREPLY[@]}}"
""",
    "fish": """
source {script}
complete -C "{line}" | cut -f 1
""",
}
KEYS = """\
autoload -U compinit; compinit -D -u; source {script}; PS1=; clear
{line}\t\x01print -r -- ready \rexit\r"""
"""What is typed into zsh: the line is completed and then printed."""


ANSWERS = {
    "silences": [{"silence": {"id": "0f00"}, "state": "active"}, {"silence": {"id": "0f01"}, "state": "ended"}],
    "baselines": [{"name": "nightly"}],
    "agents": [{"workload": "train"}],
    "devices": [{"index": 0, "uuid": "GPU-a"}],
    "rules": [{"name": "leak"}],
    "alerts": [{"labels": [["severity", "warning"]]}],
}


@cache
def script_of(shell: str) -> str:
    return gpumond_here("completion", shell).stdout


def completed(shell: str, line: str, directory: Path, url: str) -> str:
    """Return the only word that a shell offers for the last word of a line, with the daemon at ``url``."""
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "GPUMOND_URL": url}
    script = directory / f"gpumond.{shell}"
    script.write_text(script_of(shell))
    if shell == "zsh":
        printed = typed(KEYS.format(script=script, line=line), environ).partition("\nready ")[2]
        return printed.splitlines()[0].split()[-1]
    code = SHOW[shell].format(script=script, line=line)
    done = subprocess.run([shell, "-c", code], capture_output=True, text=True, cwd=directory, check=True, env=environ)
    assert done.stderr == ""
    return done.stdout.strip()


def typed(keys: str, environ: Mapping[str, str]) -> str:
    """Return the output of an interactive zsh up to its end."""
    terminal, inside = pty.openpty()
    process = subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=inside, stdout=inside, stderr=inside, start_new_session=True, env=environ
    )
    os.close(inside)
    os.write(terminal, keys.encode())
    shown = b""
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:  # the shell has ended
        pass
    process.wait()
    os.close(terminal)
    return shown.decode().rpartition("exit")[0]


@pytest.mark.parametrize(
    "shell", [pytest.param(name, marks=pytest.mark.needs(name)) for name in ("bash", "zsh", "fish")]
)
@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("gpumond det", "detach-driver"),
        ("gpumond flush --wo", "--workload"),
        ("gpumond baseline com", "compare"),
        ("gpumond silence add --rea", "--reason"),
        ("gpumond silence delete 0f", "0f00"),
        ("gpumond silence add rule=le", "rule=leak"),
        ("gpumond silence add work", "workload=train"),
        ("gpumond silence add sev", "severity=warning"),
        ("gpumond baseline compare ni", "nightly"),
        ("gpumond suspend tr", "train"),
        ("gpumond flush --device GPU-", "GPU-a"),
        ("gpumond loadgen auto", "autotune"),
    ],
)
def test_words_are_completed(shell: str, line: str, word: str, tmp_path: Path):
    with fake_daemon(make_frame()) as fake:
        fake.answers |= {f"/api/v1/{route}": (200, answer) for route, answer in ANSWERS.items()}
        assert completed(shell, line, tmp_path, fake.url) == word


def test_bash_completes_a_value_after_the_equals_sign_that_it_splits_off(tmp_path: Path):
    with fake_daemon(make_frame()) as fake:
        fake.answers |= {f"/api/v1/{name}": (200, answer) for name, answer in ANSWERS.items()}
        assert completed("bash", "gpumond silence add rule = le", tmp_path, fake.url) == "leak"
        assert completed("bash", "gpumond silence add rule =", tmp_path, fake.url) == "leak"
