"""A configuration that cannot be loaded is visible, and the last valid one stays in effect, also over a restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpumond.config.loading import COPY_NAME, load_settings
from gpumond.facts.errors import ConfigError
from tests.helpers.running import RunningDaemon, free_port, until

pytestmark = pytest.mark.slow

VALID = "flush_cooldown: 7s\nrules:\n  - {name: own, scope: device, value: used_bytes, above: 1GiB}\n"
INVALID = "flush_cooldown: 7s\nreceivers:\n  - {name: hook, type: webhook, url: secret-of-the-receiver}\n"
SUCCESSFUL = "gpumond_config_last_reload_successful"
LOADED_AT = "gpumond_config_last_reload_success_timestamp_seconds"

Serve = Callable[..., RunningDaemon]


def faults(daemon: RunningDaemon) -> list[tuple[str, str]]:
    found = daemon.get("status")["faults"]
    return [(fault["kind"], fault["detail"]) for fault in found if fault["source"] == "configuration"]


def rules(daemon: RunningDaemon) -> set[str]:
    return {rule["name"] for rule in daemon.get("rules")}


def arguments(directory: Path, file: Path) -> list[str]:
    options = ["--source", "sim", "--config", os.fspath(file), "--state-dir", os.fspath(directory / "state")]
    return [sys.executable, "-m", "gpumond", "serve", *options, "--socket", os.fspath(directory / "agent.sock")]


def test_failed_reload_is_a_metric_a_fault_and_a_finding_of_doctor(serve: Serve, tmp_path: Path):
    file = tmp_path / "gpumond.yaml"
    file.write_text(VALID)
    daemon = serve("--source", "sim", "--interval", "0.2s", "--config", os.fspath(file))
    until(lambda: daemon.request("/api/v1/status")[0] == 200)
    loaded_at = daemon.value(LOADED_AT)
    assert (daemon.value(SUCCESSFUL), faults(daemon)) == (1, [])
    file.write_text(INVALID)
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: faults(daemon))
    assert faults(daemon) == [("not_loaded", f"receivers[0] ({file}, line 3)")]
    assert (daemon.value(SUCCESSFUL), daemon.value(LOADED_AT)) == (0, loaded_at)
    assert daemon.value("gpumond_faults_total", source="configuration", kind="not_loaded") == 1
    found = daemon.run("doctor").stdout
    assert "line 3" in found
    assert "gpumond check-config" in found
    assert "secret-of-the-receiver" not in found
    file.write_text(VALID)
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: daemon.value(SUCCESSFUL) == 1)
    until(lambda: not faults(daemon))


def test_hashes_are_those_of_the_settings_and_rules_in_effect(serve: Serve, tmp_path: Path):
    file = tmp_path / "gpumond.yaml"
    file.write_text(VALID)
    daemon = serve("--source", "sim", "--interval", "0.2s", "--config", os.fspath(file))
    until(lambda: daemon.request("/api/v1/status")[0] == 200)

    def hashes() -> tuple[str, str]:
        status = daemon.get("status")
        found = status["config_hash"], status["rules_hash"]
        until(lambda: daemon.value("gpumond_config_info", hash=found[0], rules_hash=found[1]) == 1)
        return found

    first = hashes()
    file.write_text(INVALID)
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: faults(daemon))
    assert hashes() == first
    file.write_text(VALID.replace("7s", "8s"))
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: daemon.get("status")["config_hash"] != first[0])
    assert hashes()[1] == first[1]
    file.write_text(VALID.replace("1GiB", "2GiB"))
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: daemon.get("status")["rules_hash"] != first[1])
    file.write_text(VALID)
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: daemon.get("status")["rules_hash"] == first[1])
    assert hashes() == first


def test_daemon_starts_with_the_last_valid_configuration(serve: Serve, tmp_path: Path):
    file = tmp_path / "gpumond.yaml"
    file.write_text(VALID)
    options = ("--source", "sim", "--interval", "0.2s", "--config", os.fspath(file))
    first = serve(*options)
    copy = first.directory / "state" / COPY_NAME
    assert (copy.stat().st_mode & 0o777, VALID in copy.read_text()) == (0o600, True)
    assert first.stop() == 0
    file.write_text("rules: [\n")
    checked = subprocess.run([sys.executable, "-m", "gpumond", "check-config", file], capture_output=True, timeout=60)
    assert checked.returncode == 2
    with RunningDaemon(first.directory, *options) as again:
        until(lambda: again.request("/api/v1/status")[0] == 200)
        assert "own" in rules(again)
        assert faults(again) == [("not_loaded", f"invalid YAML ({file}, line 2)")]
        assert again.value(SUCCESSFUL) == 0
        assert again.value(LOADED_AT) == pytest.approx(copy.stat().st_mtime)
        assert VALID in copy.read_text()
        file.write_text(VALID.replace("name: own", "name: newer"))
        again.process.send_signal(signal.SIGHUP)
        until(lambda: again.value(SUCCESSFUL) == 1)
        assert "newer" in rules(again)
        assert "newer" in copy.read_text()


@pytest.mark.parametrize("kept", ["nothing", "another file", "nothing valid"])
def test_start_without_a_usable_copy_exits_with_2(tmp_path: Path, kept: str):
    file, copy = tmp_path / "gpumond.yaml", tmp_path / "state" / COPY_NAME
    file.write_text(INVALID)
    copy.parent.mkdir(mode=0o700)
    if kept != "nothing":
        name = file if kept == "nothing valid" else tmp_path / "another.yaml"
        content = INVALID if kept == "nothing valid" else VALID
        copy.write_text(f"# the last content of {name} that could be loaded; gpumond replaces this file\n{content}")
    done = subprocess.run(arguments(tmp_path, file), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"{file}, line 3: receivers[0]: hook: expected an http" in done.stderr


def test_early_sighup_does_not_end_the_daemon(tmp_path: Path):
    file, copy = tmp_path / "gpumond.yaml", tmp_path / "state" / COPY_NAME
    file.write_text(VALID)
    command = [*arguments(tmp_path, file), "--listen", f"127.0.0.1:{free_port()}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as daemon:
        try:
            until(copy.exists)  # the configuration has been read, but the daemon doesn't serve yet
            daemon.send_signal(signal.SIGHUP)
            assert daemon.stderr is not None
            assert any("serving http" in line for line in daemon.stderr)
        finally:
            daemon.kill()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("interval: 1s\ninterfal: 2s\n", "interfal ({file}, line 2)"),
        ("rules:\n- {name: a, scope: device, value: used_bytes, above: 1}\n- {}\n", "rules[1].name ({file}, line 3)"),
        ("{", "invalid YAML ({file}, line 1)"),
        ("- a\n", "{file}"),
    ],
)
def test_place_of_an_error_has_the_line_and_no_value(tmp_path: Path, text: str, place: str):
    file = tmp_path / "gpumond.yaml"
    with pytest.raises(ConfigError) as raised:
        load_settings(file, environ={}, content=text)
    assert raised.value.place.startswith(place.format(file=file))


def test_place_of_a_value_of_the_environment_is_its_variable(tmp_path: Path):
    environ: dict[str, Any] = {"GPUMOND_INTERVAL": "soon"}
    with pytest.raises(ConfigError) as raised:
        load_settings(tmp_path / "gpumond.yaml", environ=environ, content="interval: 1s")
    assert raised.value.place == "environment variable GPUMOND_INTERVAL"
