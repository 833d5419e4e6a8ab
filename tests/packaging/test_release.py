""".ci/release: everything that a release publishes, up to the upload."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.helpers.container_engine import BASE, Engine
from tests.helpers.machine import missing, wheels

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://code.example/gpumond"

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture
def signing(tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """Environment of gpg with a key; without gpg, an empty one."""
    if shutil.which("gpg") is None:
        yield {}
        return
    home = tmp_path / "gpg"
    home.mkdir(mode=0o700)
    environ = {"GNUPGHOME": str(home), "SIGNING_KEY": "release@code.example"}
    command = ["gpg", "--batch", "--passphrase", "", "--quick-gen-key", environ["SIGNING_KEY"], "ed25519", "sign"]
    subprocess.run(command, env={**os.environ, **environ}, check=True, capture_output=True, timeout=60)
    yield environ
    subprocess.run(["gpgconf", "--kill", "gpg-agent"], env={**os.environ, **environ}, check=False, timeout=60)


@pytest.fixture
def imaging(tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """Environment of buildah with a base image of Debian files; without its tools, one without any image."""
    if missing("mmdebstrap", "buildah", "podman", "runc"):
        yield {}
        return
    directory = tmp_path / "engine"
    directory.mkdir()
    engine = Engine(directory)
    (directory / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    engine.load(f"docker.io/library/{BASE}")
    options = f"--isolation=chroot --volume={wheels()}:/wheels:ro --volume={directory}/pip.conf:/etc/pip.conf:ro"
    yield {**engine.environ, "PLATFORMS": "linux/amd64", "IMAGE_OPTIONS": options}
    engine.end()


@pytest.mark.needs  # it uses the optional programs that are installed
def test_release_builds_everything_and_uploads_nothing(
    tmp_path: Path, signing: Mapping[str, str], imaging: Mapping[str, str]
):
    """From the committed files; pip downloads the dependencies for the packages."""
    out = tmp_path / "out"
    environ = {**os.environ, "PYTHON": sys.executable, "REPOSITORY": REPOSITORY, "REGISTRY": "", **signing, **imaging}
    subprocess.run([ROOT / ".ci/release", out], env=environ, check=True, timeout=850)
    names = {path.name for path in out.iterdir()}
    (wheel,) = out.glob("*.whl")
    assert {"NOTES.md", "SHA256SUMS", wheel.name, "gpumond-0.1.0.tar.gz", "gpumond-0.1.0.tgz"} <= names
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        fields, _, readme = archive.read(metadata).decode().partition("\n\n")
    assert f"Project-URL: Changelog, {REPOSITORY}/blob/v0.1.0/CHANGELOG.md" in fields.splitlines()
    links = re.findall(r"\]\(([^)#\s]+)", readme)
    assert f"{REPOSITORY}/raw/v0.1.0/docs/images/page-light.png" in links
    assert [link for link in links if not link.startswith("https://")] == []
    check_chart(out / "gpumond-0.1.0.tgz")
    sums = dict(reversed(line.split()) for line in (out / "SHA256SUMS").read_text().splitlines())
    assert sums.keys() == {name for name in names if not name.startswith("SHA256SUMS")}
    if signing:
        command = ["gpg", "--verify", out / "SHA256SUMS.asc", out / "SHA256SUMS"]
        subprocess.run(command, env={**os.environ, **signing}, check=True, capture_output=True, timeout=60)
    if imaging:
        check_image(out / "gpumond-0.1.0-image.tar")


def check_chart(archive: Path) -> None:
    """The chart contains the files to which the repository has links, and no link."""
    with tarfile.open(archive) as chart:
        members = chart.getmembers()
    assert not [member.name for member in members if not (member.isfile() or member.isdir())]
    needed = {"Chart.yaml", "values.schema.json", "files/dashboards/fleet.json", "files/gpumond.rules.yaml"}
    assert {f"gpumond/{name}" for name in needed} <= {member.name for member in members}


def check_image(archive: Path) -> None:
    """The image is one of the platform, with the revision as a label."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    with tarfile.open(archive) as image:
        blobs = [image.extractfile(member) for member in image.getmembers() if member.isfile()]
        documents = [text for blob in blobs if blob and (text := blob.read(1 << 20)).startswith(b"{")]
    (config,) = [found for text in documents if "architecture" in (found := json.loads(text))]
    assert config["architecture"] == "amd64"
    assert config["config"]["Labels"]["org.opencontainers.image.revision"] == head.stdout.strip()
