"""The Debian package of deploy/packages: it runs the daemon under systemd, and its removal leaves only the state."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integration.machine import ROOT, Machine, missing, wheels
from tests.running import until

NEEDED = missing("debootstrap", "systemd-nspawn", "nsenter", "dpkg-deb")
pytestmark = [pytest.mark.soak, pytest.mark.skipif(bool(NEEDED), reason=NEEDED), pytest.mark.timeout(900)]
PAGE = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9917/', timeout=20).read().decode())"


def files(host: Machine) -> set[str]:
    """Paths that are named after gpumond."""
    return set(host.shell("find /etc /opt /run /usr /var -path /var/tmp -prune -o -name '*gpumond*' -print").split())


def answers(host: Machine) -> None:
    until(lambda: host.show("gpumond.service", "ActiveState") == ["active"], 120)
    assert "<title>gpumond</title>" in until(lambda: host.run("python3", "-c", PAGE, check=False), 120)


def test_package_runs_the_daemon_and_its_removal_leaves_only_the_state(tmp_path: Path):
    packages = tmp_path / "packages"
    subprocess.run([ROOT / "deploy/packages/build", packages, wheels()], check=True, timeout=600)
    host = Machine(tmp_path, {packages: "/packages"})
    try:
        before = files(host)
        host.shell("dpkg -i /packages/*.deb")
        answers(host)
        assert host.shell("systemctl is-enabled gpumond.socket gpumond.service").split() == ["enabled", "enabled"]
        assert host.run("gpumond", "--version").startswith("gpumond ")
        host.shell("echo 'interval: 2' > /etc/gpumond/gpumond.yaml; dpkg -i /packages/*.deb")  # an upgrade
        answers(host)
        assert host.shell("cat /etc/gpumond/gpumond.yaml") == "interval: 2"
        host.shell("dpkg --purge gpumond")
        assert {path for path in files(host) - before if not path.startswith("/var/lib/gpumond/")} == {
            "/var/lib/gpumond"
        }
    finally:
        host.stop()
