""".ci/release: everything that a release publishes, up to the upload."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://code.example/gpumond"

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def test_release_builds_everything_and_uploads_nothing(tmp_path: Path):
    """From the committed files; pip downloads the dependencies for the packages."""
    environ = {**os.environ, "PYTHON": sys.executable, "REPOSITORY": REPOSITORY, "REGISTRY": ""}
    subprocess.run([ROOT / ".ci/release", tmp_path], env=environ, check=True, timeout=850)
    names = {path.name for path in tmp_path.iterdir()}
    (wheel,) = tmp_path.glob("*.whl")
    assert {"NOTES.md", "SHA256SUMS", wheel.name} <= names
    assert [name for name in names if name.endswith(".tar.gz")]
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        readme = archive.read(metadata).decode().partition("\n\n")[2]
    links = re.findall(r"\]\(([^)#\s]+)", readme)
    assert f"{REPOSITORY}/raw/v0.1.0/docs/images/page-light.png" in links
    assert [link for link in links if not link.startswith("https://")] == []
    sums = dict(reversed(line.split()) for line in (tmp_path / "SHA256SUMS").read_text().splitlines())
    assert sums.keys() == names - {"SHA256SUMS"}
