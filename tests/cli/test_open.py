"""``gpumond open`` with a real daemon."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.helpers import forks
from tests.helpers.running import RunningDaemon


def run(daemon: RunningDaemon, *options: str) -> subprocess.CompletedProcess[str]:
    environ = daemon.environ | {"GPUMOND_RUNTIME_DIR": str(daemon.directory)}
    command = [sys.executable, "-m", "gpumond", "open", *options]
    return forks.run(command, env=environ)


def test_printed_address_signs_in_once(tmp_path: Path):
    with RunningDaemon(tmp_path, "--source", "nvml") as daemon:
        done = run(daemon, "--print", "--url", daemon.url)
        assert done.returncode == 0, done.stderr
        address, hint = done.stdout.splitlines()
        assert address.startswith(f"{daemon.url}/#code=gpm_")
        assert hint == "The address signs one browser in, within 1 min."
        body = json.dumps({"code": address.partition("#code=")[2]}).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"{daemon.url}/api/v1/sessions", body, headers), timeout=60) as answer:
            assert json.load(answer)["token"].startswith("gpm_")


@pytest.mark.parametrize("stale", [False, True], ids=["no token", "a token of another daemon"])
def test_error_names_the_directory_of_a_readable_token(tmp_path: Path, stale: bool):
    with RunningDaemon(tmp_path / "daemon", "--source", "nvml") as daemon:
        other = tmp_path / "other"
        other.mkdir()
        if stale:
            (other / "token").touch(0o600)
            (other / "token").write_text("gpm_of_another_daemon")
        command = [sys.executable, "-m", "gpumond", "flush", "--all", "--url", daemon.url]
        environ = {name: value for name, value in daemon.environ.items() if not name.startswith("GPUMOND_")}
        environ["GPUMOND_RUNTIME_DIR"] = str(other)
        done = forks.run(command, env=environ)
        directory = daemon.get("status")["runtime_dir"]
        assert directory == str(daemon.directory)
        assert done.stderr == (
            f"gpumond: the daemon requires its own token; set GPUMOND_RUNTIME_DIR={directory}, which contains it\n"
        )


def test_address_of_a_socket_is_refused(tmp_path: Path):
    command = [sys.executable, "-m", "gpumond", "open", "--url", "unix:///run/gpumond-api"]
    done = forks.run(command)
    assert done.returncode == 2
    assert "a browser needs an http:// or https:// address" in done.stderr
