"""Alerts of a whole daemon: flushes of rules, receivers, restarts, and a full disk."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakenvml import GIB, FakeDriver, Process, machine
from tests.helpers.alert_listener import OK, Listener
from tests.helpers.running import RunningDaemon, until

Serve = Callable[..., RunningDaemon]

ACTING = """
interval: 0.2
receivers: [{{name: hook, type: webhook, url: "{url}"}}]
rules:
  - name: give-back
    scope: workload
    value: reclaimable_bytes
    above: 1MiB
    match: {{workload: train-llm}}
    action: {{flush: {{min_reclaimable: 1MiB}}, cooldown: 1h{more}}}
"""


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


def notified_alerts(listener: Listener) -> list[Any]:
    return [alert for request in listener.requests for alert in request.json["alerts"] if alert["rule"] == "give-back"]


def demo(serve: Serve, tmp_path: Path, listener: Listener, more: str = "") -> RunningDaemon:
    config = tmp_path / "config.yaml"
    config.write_text(ACTING.format(url=listener.url, more=more))
    daemon = serve("--config", str(config), command="demo")
    until(lambda: [alert for alert in notified_alerts(listener) if "action" in alert["annotations"]], 60)
    return daemon


def test_rule_flush_is_in_receipts_alert_history_and_audit(serve: Serve, tmp_path: Path, listener: Listener):
    """The receipts survive a restart."""
    daemon = demo(serve, tmp_path, listener)
    receipts = [each for each in daemon.get("receipts") if each["requested_by"] == "rule:give-back"]
    assert {each["workload"] for each in receipts} == {"train-llm"}
    released = sum(each["released_bytes"] for each in receipts)
    assert released > 0
    proof = next(each for each in notified_alerts(listener) if "action" in each["annotations"])
    assert proof["annotations"]["action"].startswith("flushed train-llm: ")
    past = until(lambda: [each for each in daemon.get("alerts/history") if each["rule"] == "give-back"])
    assert dict(past[0]["annotations"])["action"].startswith("flushed train-llm: ")
    entries = [entry for entry in daemon.get("audit") if entry["actor"] == "rule:give-back"]
    assert [entry["action"] for entry in entries] == ["action", "flush.request", "flush.receipts"]
    assert entries[-1]["detail"]["released_bytes"] == released
    before = daemon.get("receipts")
    assert daemon.stop() == 0
    with RunningDaemon(
        daemon.directory, "--source", "sim", environ={"GPUMOND_SIM_DIR": str(tmp_path / "none")}
    ) as after:
        assert after.get("receipts")[: len(before)] == before


def test_dry_run_of_a_rule_flushes_nothing(serve: Serve, tmp_path: Path, listener: Listener):
    daemon = demo(serve, tmp_path, listener, ", dry_run: true")
    assert notified_alerts(listener)[-1]["annotations"]["action"].startswith(
        "dry run: a flush of train-llm would release "
    )
    assert [each["outcome"] for each in daemon.get("receipts")] == ["planned"] * len(daemon.get("receipts"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """File system of 2 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "none", str(mount)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_full_disk_refuses_changes_and_does_not_stop_alerts(
    serve: Serve, driver: FakeDriver, small_disk: Path, tmp_path: Path, listener: Listener
):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"interval: 0.2\nreceivers: [{{name: hook, type: webhook, url: '{listener.url}'}}]\n"
        "rules: [{name: full, scope: device, value: used_ratio, above: 50%}]\n"
    )
    driver.devices = machine(1)
    device = driver.devices[0]
    device.used_bytes = 0
    driver.write()
    daemon = serve("--source", "nvml", "--config", str(config), "--state-dir", str(small_disk), environ=driver.env)
    until(lambda: daemon.value("gpumond_device_up"))
    assert daemon.value("gpumond_store_writable") == 1
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass
    token = f"Bearer {(daemon.directory / 'token').read_text().strip()}"
    rule = {"name": "much", "scope": "device", "value": "used_ratio", "above": 0.5, "labels": {"text": "x" * 60_000}}

    def change() -> int:
        status, body, _ = daemon.request("/api/v1/rules", rule, Authorization=token)
        assert status != 507 or b"disk is full" in body
        return status

    until(lambda: change() in (507, 503))
    until(lambda: daemon.value("gpumond_store_writable") == 0)
    until(lambda: "store" in {fault["source"] for fault in daemon.get("status")["faults"]})
    assert daemon.flush(target={"all": True})[0] in (503, 507)
    device.used_bytes = int(device.total_bytes * 0.9)
    driver.write()
    until(lambda: daemon.value("gpumond_device_memory_used_bytes") == device.used_bytes)
    until(lambda: "full" in json.dumps([request.json for request in listener.requests]))
    assert "much" not in {entry["name"] for entry in daemon.get("rules")}
    ballast.unlink()
    until(lambda: daemon.value("gpumond_store_writable") == 1)
    rule["labels"] = {}
    assert change() == 201


def test_hanging_receiver_does_not_delay_the_end_of_the_daemon(
    serve: Serve, driver: FakeDriver, tmp_path: Path, listener: Listener
):
    def hang(connection: socket.socket) -> None:
        connection.recv(1)

    listener.answer = hang
    config = tmp_path / "config.yaml"
    config.write_text(
        f"interval: 0.2\nreceivers: [{{name: hook, type: webhook, url: '{listener.url}'}}]\n"
        "rules: [{name: there, scope: device, value: up, above: 0}]\n"
    )
    driver.devices = machine(1)
    driver.write()
    daemon = serve("--source", "nvml", "--config", str(config), environ=driver.env)
    until(lambda: listener.requests)
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(timeout=60) == 0
    with RunningDaemon(daemon.directory, "--source", "nvml", "--config", str(config), environ=driver.env):
        listener.answer = OK
        until(lambda: len(listener.requests) > 1)


def test_end_of_a_process_is_notified_at_once(serve: Serve, driver: FakeDriver, tmp_path: Path, listener: Listener):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"interval: 0.2\nreceivers: [{{name: hook, type: webhook, url: '{listener.url}'}}]\n"
        "rules: [{name: hog, scope: process, value: used_bytes, above: 1GiB, keep_firing_for: 1h, "
        "annotations: {summary: 'pid {pid} uses {used}'}}]\n"
    )
    driver.devices = machine(1)
    device = driver.devices[0]
    device.processes, device.used_bytes = [Process(4242, 9 * GIB)], 9 * GIB
    driver.write()
    daemon = serve("--source", "nvml", "--config", str(config), environ=driver.env)

    def notifications() -> list[tuple[str, str]]:
        alerts = [alert for request in listener.requests for alert in request.json["alerts"]]
        return [(alert["status"], alert["annotations"]["summary"]) for alert in alerts if alert["rule"] == "hog"]

    fired = ("firing", "pid 4242 uses 9.0 GiB")
    until(lambda: notifications() == [fired])
    device.processes, device.used_bytes = [], 0
    driver.write()
    ended = "process 4242 has exited; the alert was: pid 4242 uses 9.0 GiB"
    until(lambda: notifications() == [fired, ("resolved", ended)])
    (past,) = [each for each in daemon.get("alerts/history") if each["rule"] == "hog"]
    assert dict(past["annotations"])["summary"] == ended
