"""Buildah and podman with directories of their own.

A container has no network by default: a bridge would change the machine's addresses, and Chromium would then end the
requests of the tests that run beside it (``net::ERR_NETWORK_CHANGED``).
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from tests.helpers.machine import ROOT, tree

BASE = re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[-1]


CONFIG = {
    "CONTAINERS_CONF": """
[containers]
default_ulimits = ["nofile=1024:4096", "nproc=4096:4096"]
netns = "none"
[engine]
runtime = "runc"
""",
    "CONTAINERS_STORAGE_CONF": """
[storage]
driver = "overlay"
graphroot = "{directory}/graph"
runroot = "{directory}/run"
""",
}


class Engine:
    """Podman, with its own images and containers."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.environ = directory, dict(os.environ)
        for name, text in CONFIG.items():
            (directory / name).write_text(text.format(directory=directory))
            self.environ[name] = str(directory / name)

    def __call__(self, *command: str, check: bool = True, **options: Any) -> str:
        """Return the output of a command; with ``check``, it must succeed."""
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=300, **options)
        assert done.returncode == 0 or not check, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout.strip() if check else str(done.returncode)

    def load(self, tag: str) -> None:
        """Load the base image under the name that the Dockerfile uses."""
        files = ["tar", "-C", str(tree()), "--exclude=./proc/*", "--exclude=./sys/*", "--exclude=./dev/*", "-c", "."]
        with subprocess.Popen(files, stdout=subprocess.PIPE) as tar:
            self("podman", "import", "--quiet", "-", tag, stdin=tar.stdout)

    def build(self, tag: str, *arguments: str) -> None:
        self("buildah", "bud", "--pull-never", "--isolation=chroot", "--format=docker", "-t", tag, *arguments)

    def size(self, image: str) -> int:
        return int(self("podman", "image", "inspect", image, "--format", "{{.Size}}"))

    def run(self, *arguments: str) -> str:
        return self("podman", "run", *arguments)

    def end(self) -> None:
        self("podman", "rm", "--all", "--force", "--time=2", check=False)
        self("podman", "rmi", "--all", "--force", check=False)
