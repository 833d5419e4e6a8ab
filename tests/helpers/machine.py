"""Debian system for the tests: its files, wheels for its Python, and a systemd that boots it."""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.running import until

ROOT = Path(__file__).parents[2]
SUITE, PYTHON = "trixie", "3.13"
PACKAGES = ("systemd", "systemd-sysv", "dbus", "procps", "python3", "python3-venv", "python3-pip")
OF_SUITE = {SUITE: ("kustomize", "rpm")}
"""Packages of one release."""
UBUNTU = ("jammy", "noble")
UBUNTU_KEYS = Path("/usr/share/keyrings/ubuntu-archive-keyring.gpg")
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
CLEAN = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "HOME": "/var/tmp"}


def missing(*commands: str) -> str:
    """Return the reason why this machine cannot run it, or an empty string."""
    absent = [command for command in commands if shutil.which(command) is None]
    if os.geteuid() != 0:
        return "needs root"
    return f"needs {', '.join(absent)} (apt)" if absent else ""


@functools.cache
def missing_release(suite: str) -> str:
    """Return the reason why this machine cannot create the tree of a release, or an empty string."""
    if suite in UBUNTU and not UBUNTU_KEYS.exists():
        return f"needs the keys of Ubuntu ({UBUNTU_KEYS})"
    try:
        tree(suite)
    except AssertionError as error:
        if "apt-get update" in str(error):
            return f"needs a mirror of {suite}"
        raise
    return ""


@functools.cache
def tree(suite: str = SUITE) -> Path:
    """Minimal Debian or Ubuntu, created once and never written to.

    ``GPUMOND_TEST_TREE`` names an existing one of SUITE.
    """
    if suite == SUITE and (given := os.environ.get("GPUMOND_TEST_TREE")):
        return Path(given)
    directory = Path(_temporary("gpumond-tree-")) / suite
    create_tree(directory, suite)
    return directory


def create_tree(directory: Path, suite: str = SUITE) -> None:
    packages = (*PACKAGES, *OF_SUITE.get(suite, ()))
    of_ubuntu = ("--components=main,universe", f"--keyring={UBUNTU_KEYS}") if suite in UBUNTU else ()
    mirror = "http://archive.ubuntu.com/ubuntu" if suite in UBUNTU else "http://deb.debian.org/debian"
    included = f"--include={','.join(packages)}"
    _run("mmdebstrap", "--quiet", "--variant=minbase", *of_ubuntu, included, suite, str(directory), mirror)


@functools.cache
def wheels() -> Path:
    """Directory of gpumond and its dependencies, as wheels for the Python of the tree."""
    directory = _temporary("gpumond-wheels-")
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", directory)
    wheel = next(Path(directory).glob("gpumond-*.whl"))
    constraints = str(ROOT / "constraints.txt")
    wanted = (f"{wheel}[daemon,kubernetes]", "hatchling")  # which builds the wheel of the image
    _run(*PIP, "download", "-d", directory, "-c", constraints, *_for_the_tree(), *wanted)
    return Path(directory)


@functools.cache
def library(requirement: str) -> Path:
    """Directory of one other package and its dependencies, for the Python of the tree."""
    directory = _temporary("gpumond-library-")
    # pip compares the requirements of a package with the Python that runs it.
    _run(*PIP, "install", "--ignore-requires-python", "--target", directory, *_for_the_tree(), requirement)
    return Path(directory)


def in_tree(*command: str, shown: Mapping[Path, str], given: str = "") -> str:
    """Return the output of a command that runs in the tree without a network. It must succeed."""
    box = ["systemd-nspawn", "--quiet", f"--directory={tree()}", "--volatile=overlay", "--register=no", "--keep-unit"]
    box += ["--private-network", "--pipe", *(f"--bind-ro={ours}:{its}" for ours, its in shown.items())]
    done = subprocess.run([*box, *command], input=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


class Machine:
    """The booted tree; changes are discarded at the end. ``shown`` are directories of this machine and their mount
    points.
    """

    def __init__(self, directory: Path, shown: dict[Path, str], suite: str = SUITE):
        """``directory`` receives the log and files that the machine sees in /shared."""
        self.shared = directory / "shared"
        self.shared.mkdir()
        log = directory / "log"
        shown = {**shown, self.shared: "/shared"}
        command = ["systemd-nspawn", "--quiet", f"--directory={tree(suite)}", "--volatile=overlay", "--boot"]
        command += ["--register=no", "--keep-unit", f"--machine=gpumond-test-{os.getpid()}", "--console=pipe"]
        command += ["--private-network", *(f"--bind-ro={ours}:{its}" for ours, its in shown.items())]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        until(lambda: self._process.poll() is not None or self._first())
        assert self._process.poll() is None, log.read_text()
        until(lambda: self.run("systemctl", "is-system-running", check=False) in ("running", "degraded"), 60)

    def run(self, *command: str, check: bool = True) -> str:
        """Return the standard output of a command; with ``check``, it must succeed."""
        done = subprocess.run(
            ["nsenter", "-t", self._first(), "-a", *command], capture_output=True, text=True, env=CLEAN, timeout=120
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def shell(self, script: str) -> str:
        return self.run("bash", "-euc", script)

    def show(self, unit: str, *names: str) -> list[str]:
        """Return the properties of a unit."""
        return [self.run("systemctl", "show", unit, "-P", name) for name in names]

    def get(self, route: str) -> Any:
        """Return the decoded answer of its daemon."""
        url = f"http://127.0.0.1:9917/api/v1/{route}"
        program = f"import urllib.request as u; print(u.urlopen({url!r}, timeout=5).read().decode())"
        answer = self.run("/opt/gpumond/bin/python3", "-c", program, check=False)
        return json.loads(answer) if answer else None

    def stop(self) -> None:
        try:
            self.run("systemctl", "poweroff", check=False)
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _first(self) -> str:
        found = subprocess.run(["pgrep", "-P", str(self._process.pid)], capture_output=True, text=True)
        return found.stdout.strip()


def _for_the_tree() -> list[str]:
    """Options of pip for packages of another Python."""
    platforms = [f"{name}_{platform.machine()}" for name in ("manylinux_2_28", "manylinux2014")]
    options = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    options += [f"--platform={name}" for name in (*platforms, "any")]
    return options + [f"--abi={name}" for name in (f"cp{PYTHON.replace('.', '')}", "abi3", "none")]


def _temporary(prefix: str) -> str:
    directory = tempfile.TemporaryDirectory(prefix=prefix)
    _KEPT.append(directory)
    return directory.name


_KEPT: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when the tests end."""


def _run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{command[0]}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


if __name__ == "__main__":
    create_tree(Path(sys.argv[1]))
