"""The daemon with the lowest versions of its dependencies that pyproject.toml allows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.running import RunningDaemon, until

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def lowest() -> list[str]:
    """Return the requirements of the daemon, each at its lowest minor version."""
    found = re.search(r"^daemon = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert found
    bounds = re.findall(r'"([\w.-]+)>=([\d.]+)', found.group(1))
    return [f"{name}=={version}{'' if '.' in version else '.0'}.*" for name, version in bounds]


def test_daemon_runs_with_the_lowest_versions(tmp_path: Path):
    """pip downloads them."""
    requirements = lowest()
    assert len(requirements) == 8
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = str(tmp_path / "env/bin/python")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    subprocess.run([*install, *requirements], check=True, timeout=600)
    with RunningDaemon(tmp_path / "daemon", "--interval", "0.2s", command="demo", python=python) as daemon:
        until(lambda: daemon.request("/-/ready")[0] == 200, 120)
        until(lambda: daemon.get("agents"), 120)
        for route in ("frame", "devices", "alerts", "rules", "receipts", "audit", "status"):
            daemon.get(route)
        assert daemon.request("/")[0] == daemon.request("/openapi.json")[0] == 200
        assert daemon.value("gpumond_device_memory_used_bytes")
        assert daemon.flush(target={"all": True}, dry_run=True)[0] == 200
