"""Unusable files of the operator: each is refused with a message, and the daemon continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumond.config.loading import EXPECTED_FILE
from gpumond.config.tokens import read_tokens
from gpumond.config.web_file import read_web
from gpumond.facts.errors import ConfigError
from gpumond.features.alerts.receivers.base import TemporaryFailure, read_receiver_secret
from tests.helpers.running import RunningDaemon, gpumond_here, until

pytestmark = pytest.mark.slow

UNUSABLE = {
    "deep": "[" * 20_000,
    "deep_rules": "rules: " + "[" * 400 + "]" * 400,
    "deep_in_brackets": "rules: " + "[" * 3000 + "]" * 3000,
    "deep_in_braces": "rules: " + "{a: " * 3000,
    "long_integer": f"interval: {'9' * 5000}",
    "large_integer": f"interval: {'9' * 400}",
    "long_text": f"interval: '{'9' * 5000}'",
    "large_cooldown": f"flush_cooldown: {'9' * 400}",
    "large_level": f"rules: [{{name: a, scope: device, value: used_bytes, above: {'9' * 400}}}]",
    "bytes": "a: \x00",
}


def check(file: Path) -> subprocess.CompletedProcess[str]:
    return gpumond_here("check-config", str(file))


@pytest.mark.parametrize("text", UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_configuration_file_exits_with_2(tmp_path: Path, text: str):
    file = tmp_path / "gpumond.yaml"
    file.write_text(text)
    done = check(file)
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (2, "", False), done.stderr
    assert str(file) in done.stderr


def test_reload_is_422_for_unreadable_files_and_fifos(serve: Callable[..., RunningDaemon], tmp_path: Path):
    file = tmp_path / "gpumond.yaml"
    file.write_text("interval: 1s")
    daemon = serve("--source", "sim", "--config", str(file))
    token = (daemon.directory / "token").read_text().strip()

    def reload() -> tuple[int, str]:
        status, body, _ = daemon.request("/-/reload", {}, Authorization=f"Bearer {token}")
        return status, body.decode()

    for name, text in UNUSABLE.items():
        file.write_text(text)
        assert reload()[0] == 422, name
    file.unlink()
    os.mkfifo(file)
    status, body = reload()
    assert (status, "not a regular file" in json.loads(body)["detail"]) == (422, True), body
    file.unlink()
    file.write_text("interval: 1s")
    assert reload()[0] == 200
    assert "Traceback" not in daemon.log.read_text()


def test_fifo_is_refused_without_delay(tmp_path: Path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    done = check(fifo)
    assert (done.returncode, done.stderr) == (2, f"gpumond: {fifo}: not a regular file; expected {EXPECTED_FILE}\n")
    for read in (read_tokens, read_web):
        with pytest.raises(ConfigError, match="not a regular file"):
            read(fifo)
    with pytest.raises(TemporaryFailure, match="can't be read"):
        read_receiver_secret(str(fifo))


@pytest.mark.parametrize("text", ["gpm_a", "gpm_a\n", "gpm_a\r\n"])
def test_secret_may_end_with_one_line_end(tmp_path: Path, text: str):
    file = tmp_path / "secret"
    file.write_bytes(text.encode())
    assert read_receiver_secret(str(file)) == "gpm_a"


@pytest.mark.parametrize("text", ["a\r\nX-Other: 1", "a\nb\n", "a\n\n", "a\x00b", "a\x7f"])
def test_secret_with_another_line_end_or_control_character_is_not_sent(tmp_path: Path, text: str):
    file = tmp_path / "secret"
    file.write_bytes(text.encode())
    with pytest.raises(TemporaryFailure, match="expected one line"):
        read_receiver_secret(str(file))


def test_symbolic_link_as_lock_is_a_configuration_error(tmp_path: Path):
    tmp_path.chmod(0o755)
    (tmp_path / "agent.sock.lock").symlink_to(tmp_path / "elsewhere")
    command = [sys.executable, "-m", "gpumond", "serve", "--source", "sim", "--listen", "127.0.0.1:0"]
    command += ["--socket", str(tmp_path / "agent.sock"), "--state-dir", str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "agent.sock.lock: it is a symbolic link; remove the lock" in done.stderr
    assert not (tmp_path / "elsewhere").exists()


def test_sigusr2_does_not_end_the_daemon(serve: Callable[..., RunningDaemon]):
    daemon = serve("--source", "sim")
    daemon.process.send_signal(signal.SIGUSR2)
    until(lambda: "SIGUSR2 ignored" in daemon.log.read_text())
    assert daemon.stop() == 0
