"""The script that a package runs after its installation, with fakes of the system's commands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.machine import ROOT

SCRIPT = ROOT / "deploy/packages/after-install.sh"
PYTHON = """\
#!/bin/sh
# python3 -m venv DIRECTORY, and in an environment python3 -m pip install
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python3" ;;
  *"pip install"*)
    [ -f "$DPKG_ROOT/usr/lib/gpumond/wheels/gpumond.whl" ] || exit 1
    echo '#!/bin/sh' > "$(dirname "$0")/gpumond" && chmod 755 "$(dirname "$0")/gpumond" ;;
esac
"""


class System:
    """A root directory, and commands whose calls are in ``log``."""

    def __init__(self, directory: Path) -> None:
        self.root, self._commands, self._log = directory / "root", directory / "bin", directory / "log"
        for name in ("opt", "run/systemd/system", "etc/gpumond", "usr/lib/gpumond/wheels"):
            (self.root / name).mkdir(parents=True)
        (self.root / "etc/gpumond/gpumond.yaml").touch()
        self._commands.mkdir()
        self.wheel = self.root / "usr/lib/gpumond/wheels/gpumond.whl"
        self.wheel.touch()
        recorded = f'#!/bin/sh\necho "$(basename "$0") $*" >> {self._log}\n'
        commands = dict.fromkeys(("systemctl", "systemd-sysusers", "systemd-tmpfiles", "chgrp"), recorded)
        for name, text in {**commands, "python3": PYTHON}.items():
            (self._commands / name).write_text(text)
            (self._commands / name).chmod(0o755)

    def install(self) -> int:
        """Run the script as dpkg does, and return its status. The log begins anew."""
        self._log.write_text("")
        environ = {"PATH": f"{self._commands}:{os.environ['PATH']}", "DPKG_ROOT": str(self.root)}
        command = f"set -e\n{SCRIPT.read_text()}"
        return subprocess.run(["sh", "-c", command], env=environ, capture_output=True, timeout=60).returncode

    @property
    def environments(self) -> list[Path]:
        return sorted((self.root / "opt/gpumond.d").iterdir())

    @property
    def present(self) -> Path:
        return (self.root / "opt/gpumond").resolve()

    @property
    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_upgrade_replaces_the_environment_and_restarts_the_daemon(system: System):
    assert system.install() == 0
    first = system.present
    assert (first / "bin/gpumond").exists()
    assert system.install() == 0
    assert system.environments == [system.present]
    assert system.present != first
    assert "systemctl start gpumond.socket gpumond.service" in system.log


def test_upgrade_that_fails_leaves_the_daemon_as_it_is(system: System):
    assert system.install() == 0
    before = system.present
    system.wheel.unlink()
    assert system.install() != 0
    assert system.present == before
    assert system.environments == [before]
    assert (before / "bin/gpumond").exists()
    assert "systemctl" not in system.log


def test_environment_without_a_link_is_replaced(system: System):
    (system.root / "opt/gpumond/bin").mkdir(parents=True)
    assert system.install() == 0
    assert (system.root / "opt/gpumond").is_symlink()


@pytest.mark.needs("dpkg-deb")
def test_debian_package_builds_its_environment_again_for_another_python(tmp_path: Path):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/gpumond.whl").touch()
    subprocess.run([ROOT / "deploy/packages/build", tmp_path / "out", tmp_path / "wheels"], check=True, timeout=120)
    (package,) = (tmp_path / "out").glob("*.deb")
    subprocess.run(["dpkg-deb", "--control", package, tmp_path / "control"], check=True)
    assert (tmp_path / "control/triggers").read_text() == "interest-noawait /usr/bin/python3\n"
    script = tmp_path / "control/postinst"
    subprocess.run(["sh", "-n", script], check=True)
    assert "/opt/gpumond/lib/" in script.read_text()
