"""docs/tutorial/training-script.md: its files and commands, as a reader executes them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.running import free_port, series_of, until

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs/tutorial/training-script.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)
FILES = ("train.py", "record.py")
SECONDS = 120.0


def blocks(kind: str) -> list[str]:
    return [text for found, text in BLOCKS if found == kind]


class Reader:
    """Shell of a reader, whose ``gpumond`` and ``python`` are those of this environment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[subprocess.Popen[bytes]] = []
        commands = directory / "bin"
        commands.mkdir()
        for name, command in (("python", ""), ("gpumond", "-m gpumond")):
            (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
            (commands / name).chmod(0o755)
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("GPUMOND_")},
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "GPUMOND_LISTEN": address,
            "GPUMOND_URL": self.url,
            "GPUMOND_SOCKET": str(directory / "agent.sock"),
        }

    def run(self, script: str, check: bool = True) -> str:
        """Return the output of commands; without ``check``, it is empty if one of them fails."""
        command = ["sh", "-ec", script]
        done = subprocess.run(
            command, cwd=self.directory, env=self.environ, capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0 or not check, f"{script}{done.stdout}{done.stderr}"
        return done.stdout if done.returncode == 0 else ""

    def start(self, script: str) -> None:
        """Start a command that continues in a terminal of its own."""
        command = ["sh", "-ec", f"exec {script}"]
        self.started.append(subprocess.Popen(command, cwd=self.directory, env=self.environ, start_new_session=True))

    def stop(self, sign: int = signal.SIGINT) -> None:
        """End the command that was started last."""
        process = self.started.pop()
        os.killpg(process.pid, sign)
        process.wait(SECONDS)

    def sees(self, script: str, *words: str) -> str:
        """Wait until a line of the output contains the words, and return it."""

        def found() -> str:
            output = self.run(script, check=False).splitlines()
            return next((line for line in output if all(word in line for word in words)), "")

        return until(found, SECONDS, every=0.2)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    while reader.started:
        reader.stop(signal.SIGKILL)


@pytest.mark.timeout(600)
def test_tutorial_leads_from_a_script_to_a_panel(reader: Reader):
    """Each block of the tutorial in its order, except the installation."""
    _, _, check, daemon, train, status, alerts, flush, past, diagnose = blocks("sh")
    for name, text in zip(FILES, blocks("python"), strict=True):
        (reader.directory / name).write_text(text)
    config, _ = blocks("yaml")
    (reader.directory / "gpumond.yaml").write_text(config)

    reader.run(check)
    reader.start(daemon)
    until(lambda: (reader.directory / "simulated/card0/card.json").exists(), SECONDS)
    reader.start(train)
    reader.sees(status, "train", "GiB")
    assert "of cached memory" in reader.sees(alerts, "firing", "large-cache")

    assert "freed" in reader.run(flush)
    reader.sees(past, "large-cache")

    with urllib.request.urlopen(f"{reader.url}/metrics", timeout=SECONDS) as answer:
        exported = {name for name, _ in series_of(answer.read())}
    (panel,) = map(json.loads, blocks("json"))
    for target in panel["targets"]:
        assert exported.issuperset(re.findall(r"gpumond_\w+", target["expr"]))
    reader.stop()
    reader.stop()

    assert "leak" in reader.run(diagnose)
    assert "<svg" in (reader.directory / "train.html").read_text()
