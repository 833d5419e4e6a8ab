"""Tests of the service: notifications to systemd, and the units in deploy/systemd in a separate systemd."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpumond.host.systemd import notify
from tests.fakenvml import Device, FakeDriver, Process, machine
from tests.helpers.machine import ROOT, Machine, missing, wheels
from tests.helpers.running import RunningDaemon, until

UNITS = ROOT / "deploy" / "systemd"
NEEDED = missing("mmdebstrap", "systemd-nspawn", "nsenter")

HAND_OVER = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(64)
os.dup2(listener.fileno(), 3)
os.set_inheritable(3, True)
os.execvpe(sys.argv[2], sys.argv[2:], {**os.environ, "LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())})
"""
"""Launcher that passes a socket like systemd does for a socket unit."""

AGENT = "import gpumond.agent as a, time; a.start(workload='train'); time.sleep(3600)"
DROP_IN = "/etc/systemd/system/gpumond.service.d"


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    """Socket that receives notifications in place of systemd."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(20)
        yield listener


def received_lines(listener: socket.socket, until: str) -> list[str]:
    """Return all lines up to a message in which one begins with ``until``."""
    lines: list[str] = []
    for _ in range(100):
        lines += listener.recv(4096).decode().split("\n")
        if any(line.startswith(until) for line in lines):
            return lines
    raise AssertionError(f"no {until} among {set(lines)}")


def test_service_notifies_ready_status_and_stopping(listener: socket.socket, serve: Callable[..., RunningDaemon]):
    variables = {"NOTIFY_SOCKET": str(listener.getsockname()), "WATCHDOG_USEC": "600000"}
    daemon = serve("--source", "nvml", environ=variables | {"LD_LIBRARY_PATH": "/nowhere"})
    beginning = received_lines(listener, until="READY=1")
    assert "WATCHDOG=1" in received_lines(listener, until="WATCHDOG=1")
    received_lines(listener, until="STATUS=can't read devices: ")
    assert daemon.stop() == 0
    end = received_lines(listener, until="STOPPING=1")
    assert "STOPPING=1" not in beginning
    assert not [line for line in end if line.startswith("READY=")]


def test_notifications_without_a_listener_have_no_effect(tmp_path: Path):
    notify("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "none")})
    notify("READY=1", {})


def test_agent_socket_of_systemd_is_used_and_survives_the_daemon(tmp_path: Path, serve: Callable[..., RunningDaemon]):
    path = tmp_path / "daemon0" / "agent.sock"
    daemon = serve("--source", "sim", around=(sys.executable, "-c", HAND_OVER, str(path)))
    before = path.stat().st_ino
    environ = {**os.environ, "GPUMOND_SOCKET": str(path)}
    agent = subprocess.Popen([sys.executable, "-c", AGENT], env=environ)
    try:
        until(lambda: b'"workload":"train"' in daemon.request("/api/v1/agents")[1])
    finally:
        agent.kill()
        agent.wait()
    assert daemon.stop() == 0
    assert path.stat().st_ino == before


def test_socket_at_another_path_is_refused(tmp_path: Path):
    around = (sys.executable, "-c", HAND_OVER, str(tmp_path / "other.sock"))
    with pytest.raises(AssertionError, match=r"systemd listens on .*other\.sock.* set ListenStream="):
        RunningDaemon(tmp_path / "daemon", "--source", "sim", around=around)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (apt: systemd)")
def test_service_has_a_low_exposure_rating():
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=25", str(UNITS / "gpumond.service")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Overall exposure level" in done.stdout


def installation() -> str:
    """Commands of docs/how-to/install.md, with wheels instead of the checkout."""
    text = (ROOT / "docs/how-to/install.md").read_text()
    block = re.search(r"## As a service\n.*?```sh\n(.*?)```", text, re.DOTALL)
    assert block
    commands = block.group(1).strip()
    assert commands.startswith("sudo ")
    commands = commands.replace("'.[daemon]'", "'gpumond[daemon]'").replace("sudo ", "")
    return commands.replace("pip install", "pip install --no-index --find-links /wheels")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Machine without a GPU on which the daemon was installed as in docs/how-to/install.md."""
    shown = {wheels(): "/wheels", ROOT / "deploy": "/src/deploy"}
    host = Machine(tmp_path_factory.mktemp("machine"), shown)
    try:
        host.shell(f"cd /src\n{installation()}")
        yield host
    finally:
        host.stop()


@pytest.fixture
def running(host: Machine) -> Iterator[Machine]:
    """The service as installed, also after a test that has changed or stopped it."""
    until(lambda: host.show("gpumond.service", "ActiveState") == ["active"])
    yield host
    host.shell(
        f"if rm -r {DROP_IN} 2>/dev/null; then systemctl daemon-reload; systemctl restart gpumond; fi; "
        "systemctl start gpumond"
    )


def configure(host: Machine, *lines: str) -> None:
    """Write a drop-in of the service and restart it."""
    text = "\\n".join(("[Service]", *lines))
    host.shell(
        f"mkdir -p {DROP_IN}; printf '{text}\\n' > {DROP_IN}/test.conf; "
        "systemctl daemon-reload; systemctl restart gpumond"
    )


def agents(host: Machine) -> list[int]:
    return sorted(entry["pid"] for entry in host.get("agents") or ())


def main_pid(host: Machine) -> str:
    return host.show("gpumond.service", "MainPID")[0]


def journal(host: Machine) -> str:
    """Return the newest messages of the service and on it."""
    return host.run("journalctl", "--unit=gpumond", "--lines=40", "--no-pager")


nspawn = pytest.mark.skipif(bool(NEEDED), reason=NEEDED)
patient = pytest.mark.timeout(600)  # the tree is created in it


@nspawn
@patient
def test_units_are_valid_without_warnings(running: Machine):
    assert running.shell("systemd-analyze verify gpumond.service gpumond.socket 2>&1") == ""


@nspawn
@patient
def test_service_is_ready_without_a_gpu_and_reports_the_cause(running: Machine):
    causes = ("no_device", "library_not_found")  # without and with a GPU on the bus
    until(lambda: any(cause in running.show("gpumond.service", "StatusText")[0] for cause in causes))
    assert running.show("gpumond.service", "ActiveState", "User", "NRestarts") == ["active", "gpumond", "0"]
    own = "/run/gpumond-api"
    places = f"/run/gpumond/agent.sock {own} {own}/token {own}/api.sock /var/lib/gpumond"
    assert running.shell(f"ls /run/gpumond; stat -c '%a %U' {places}") == (
        "agent.sock\n666 root\n755 gpumond\n600 gpumond\n666 gpumond\n700 gpumond"
    )


@nspawn
@patient
def test_commands_find_the_service_without_a_variable(running: Machine):
    """They go over api.sock, where the kernel identifies the user."""
    until(lambda: running.get("status"))
    flush = "env -i /opt/gpumond/bin/gpumond flush --all 2>&1 || test $? = 3"
    for who, actor in (("", "uid:0"), ("setpriv --reuid 4242 --clear-groups ", "uid:4242")):
        running.shell(f"{who}sh -c '{flush}'")
        entries = json.loads(running.shell("/opt/gpumond/bin/gpumond audit --json"))
        assert entries[-1]["actor"] == actor


@nspawn
@patient
def test_driver_installed_later_is_found(running: Machine, nvml_library: Path):
    driver = FakeDriver(running.shared, nvml_library)
    driver.devices = machine(2)
    driver.write()
    shutil.copy(nvml_library, running.shared / "later.so")
    configure(running, f"Environment=FAKENVML_FILE=/shared/{driver.path.name} LD_LIBRARY_PATH=/var/cache/driver")
    until(lambda: running.show("gpumond.service", "StatusText")[0].startswith("can't read devices"))
    running.shell("mkdir -p /var/cache/driver; cp /shared/later.so /var/cache/driver/libnvidia-ml.so.1")
    until(lambda: running.show("gpumond.service", "StatusText")[0].startswith("2 devices"), 60)
    assert running.show("gpumond.service", "NRestarts") == ["0"]


@nspawn
@patient
@pytest.mark.parametrize(("end", "cause"), [("STOP", "result 'watchdog'"), ("KILL", "result 'signal'")])
def test_service_that_hangs_or_exits_is_restarted(running: Machine, end: str, cause: str):
    configure(running, "WatchdogSec=3")
    before = main_pid(running)
    running.run("kill", f"-{end}", before)
    try:
        until(lambda: main_pid(running) not in ("0", before) and running.get("status"))
    except AssertionError as late:
        raise AssertionError(f"{late}: {journal(running)}") from late
    assert running.show("gpumond.service", "ActiveState") == ["active"]
    assert cause in journal(running)


@nspawn
@patient
def test_agents_stay_connected_through_an_upgrade_and_start_the_service(running: Machine):
    unit = ("--uid=65534", "--unit=train", "/opt/gpumond/bin/python3", "-c", AGENT)
    running.run("systemctl", "stop", "gpumond.service")
    assert running.show("gpumond.service", "ActiveState") == ["inactive"]
    running.run("systemd-run", "--quiet", *unit)
    try:
        until(lambda: len(agents(running)) == 1)
        before = agents(running)
        reinstall = "--no-index --find-links /wheels --force-reinstall --no-deps gpumond"
        running.shell(f"/opt/gpumond/bin/pip -q install {reinstall}; systemctl restart gpumond")
        until(lambda: agents(running) == before)
    finally:
        running.run("systemctl", "stop", "train")


@nspawn
@patient
def test_only_root_and_the_service_can_read_its_secrets(running: Machine):
    running.shell("echo s3cret > /root/hook; install -m640 -g gpumond /root/hook /etc/gpumond/secrets/hook")
    configure(running, 'ExecStartPre=/bin/sh -c "cat /etc/gpumond/secrets/hook > /run/gpumond/seen"')
    assert running.shell("cat /run/gpumond/seen; rm /run/gpumond/seen") == "s3cret"
    assert running.shell("! setpriv --reuid 4242 --regid 4242 --clear-groups ls /etc/gpumond/secrets 2>/dev/null") == ""


@nspawn
@patient
def test_service_may_access_gpu_devices_only(running: Machine):
    """Only the setting is checked: the machine has no device controller to enforce it."""
    policy, *allowed = running.show("gpumond.service", "DevicePolicy", "DeviceAllow")
    assert policy == "closed"
    assert set(" ".join(allowed).split("\n")) - {"char-rtc r"} == {"char-nvidia* rw", "char-drm rw", "char-kfd rw"}


@nspawn
@patient
def test_service_with_an_invalid_configuration_keeps_the_last_one_or_is_not_restarted(running: Machine):
    running.shell("cp /etc/gpumond/gpumond.yaml /var/tmp; echo 'lisen: x' > /etc/gpumond/gpumond.yaml")
    try:
        running.run("systemctl", "restart", "gpumond")
        until(lambda: "did you mean listen?" in running.run("journalctl", "-u", "gpumond", "-o", "cat", "-n", "20"))
        until(lambda: running.get("status"))
        running.shell("rm /var/lib/gpumond/last-configuration.yaml")
        running.run("systemctl", "restart", "gpumond", check=False)
        until(lambda: running.show("gpumond.service", "ActiveState") == ["failed"])
    finally:
        running.shell("cp /var/tmp/gpumond.yaml /etc/gpumond/gpumond.yaml; systemctl reset-failed gpumond")


def rights() -> list[str]:
    """Lines of the drop-in in docs/how-to/suspend.md."""
    block = re.search(r"```ini\n\[Service\]\n(.*?)```", (ROOT / "docs/how-to/suspend.md").read_text(), re.DOTALL)
    assert block
    return block.group(1).split("\n")[:-1]


@nspawn
@patient
@pytest.mark.parametrize(
    "more", [[], ["RestrictNamespaces=user", "CapabilityBoundingSet=CAP_SYS_PTRACE CAP_SYS_ADMIN"]]
)
def test_service_with_the_documented_rights_takes_the_user_of_a_program(
    running: Machine, nvml_library: Path, more: list[str]
):
    """The helper comes as far as the driver, which this machine doesn't have."""
    driver = FakeDriver(running.shared, nvml_library, devices=[Device("GPU-a")])
    shutil.copy(nvml_library, running.shared / "later.so")
    running.shell("mkdir -p /var/cache/driver; cp /shared/later.so /var/cache/driver/libnvidia-ml.so.1")
    environ = f"FAKENVML_FILE=/shared/{driver.path.name} LD_LIBRARY_PATH=/var/cache/driver GPUMOND_ALLOW_SUSPEND=true"
    configure(running, f"Environment={environ}", *rights(), *more)
    until(lambda: running.show("gpumond.service", "StatusText")[0].startswith("1 device"), 60)
    agent = AGENT.replace("workload='train'", "workload='train', suspendable=True")
    running.run("systemd-run", "--quiet", "--uid=65534", "--unit=train", "/opt/gpumond/bin/python3", "-c", agent)
    try:
        pid = int(running.show("train", "MainPID")[0])
        driver.devices[0].processes = [Process(pid, 1 << 30)]
        driver.devices[0].used_bytes = 1 << 30
        driver.write()
        until(lambda: [each for each in running.get("frame")["processes"] if each["pid"] == pid and each["workload"]])
        shown = running.shell(f"/opt/gpumond/bin/gpumond suspend --pid {pid} 2>&1 || test $? = 1")
        assert "cuInit: missing" in shown
    finally:
        running.run("systemctl", "stop", "train")
        running.shell("chown gpumond: /run/gpumond")
