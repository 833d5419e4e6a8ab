"""The packages of deploy/packages: they run the daemon under systemd, and their removal leaves only the state."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.machine import ROOT, SUITE, UBUNTU, Machine, missing, missing_release
from tests.helpers.running import until

NEEDED = missing("mmdebstrap", "systemd-nspawn", "nsenter", "dpkg-deb")
pytestmark = [pytest.mark.soak, pytest.mark.skipif(bool(NEEDED), reason=NEEDED), pytest.mark.timeout(900)]
PAGE = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9917/', timeout=20).read().decode())"
RPM = "rpm --nodeps"
"""On a Debian system, whose packages rpm does not know."""


class Manager(NamedTuple):
    """Commands of a package manager. ``kept``: what it keeps of a configuration file that the user has changed."""

    install: str
    upgrade: str
    remove: str
    kept: frozenset[str] = frozenset()


KEPT = frozenset({"/etc/gpumond", "/etc/gpumond/gpumond.yaml.rpmsave"})
MANAGERS = {
    "deb": Manager("dpkg -i /packages/*.deb", "dpkg -i /packages/*.deb", "dpkg --purge gpumond"),
    "rpm": Manager(f"{RPM} -i /packages/*.rpm", f"{RPM} -U --replacepkgs /packages/*.rpm", f"{RPM} -e gpumond", KEPT),
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages for all versions of Python, whose wheels pip downloads."""
    directory = tmp_path_factory.mktemp("packages")
    environ = {**os.environ, "PYTHON": sys.executable}
    subprocess.run([ROOT / "deploy/packages/build", directory], env=environ, check=True, timeout=600)
    return directory


def files(host: Machine) -> set[str]:
    """Paths that are named after gpumond."""
    return set(host.shell("find /etc /opt /run /usr /var -path /var/tmp -prune -o -name '*gpumond*' -print").split())


def answers(host: Machine) -> None:
    until(lambda: host.show("gpumond.service", "ActiveState") == ["active"], 120)
    assert "<title>gpumond</title>" in until(lambda: host.run("python3", "-c", PAGE, check=False), 120)


@pytest.mark.parametrize(
    ("kind", "suite"), [*(("deb", suite) for suite in ("bookworm", SUITE, *UBUNTU)), ("rpm", SUITE)]
)
def test_package_runs_the_daemon_and_its_removal_leaves_only_the_state(
    packages: Path, tmp_path: Path, kind: str, suite: str
):
    if kind == "rpm" and shutil.which("rpmbuild") is None:
        pytest.skip("needs rpmbuild (Debian: rpm)")
    if reason := missing_release(suite):
        pytest.skip(reason)
    manager = MANAGERS[kind]
    host = Machine(tmp_path, {packages: "/packages"}, suite)
    try:
        before = files(host)
        host.shell(manager.install)
        answers(host)
        assert host.shell("systemctl is-enabled gpumond.socket gpumond.service").split() == ["enabled", "enabled"]
        assert host.run("gpumond", "--version").startswith("gpumond ")
        host.shell(f"echo 'interval: 2' > /etc/gpumond/gpumond.yaml; {manager.upgrade}")
        answers(host)
        assert host.shell("cat /etc/gpumond/gpumond.yaml") == "interval: 2"
        host.shell(manager.remove)
        left = {path for path in files(host) - before if not path.startswith("/var/lib/gpumond/")}
        assert left == {"/var/lib/gpumond"} | manager.kept
    finally:
        host.stop()
