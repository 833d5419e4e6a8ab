"""Whose daemon is obeyed: what root alone can have said counts, and nothing that the program's environment says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpumond.agent.daemon_trust import OVERFLOW_UID, service_uid, trusted_uids
from gpumond.agent.transport import Transport
from gpumond.cli.doctor_checks import agent_socket
from tests.running import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give directories to others")

SERVICE, STRANGER = 47110, 47111
LISTENER = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o666)
listener.listen(8)
sys.stdin.read()
"""


@pytest.fixture
def run() -> Iterator[Path]:
    """A directory like /run: root's alone, and so is all above it."""
    directory = Path(tempfile.mkdtemp(prefix="gpumond-test-", dir="/run"))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def given(directory: Path, uid: int, mode: int = 0o755) -> str:
    """The service's directory, as an administrator gives it to a user."""
    directory.mkdir(exist_ok=True)
    directory.chmod(mode)
    os.chown(directory, uid, uid)
    return str(directory)


@contextmanager
def listening(path: str, uid: int) -> Iterator[None]:
    """A daemon's socket, of a process of that user."""
    command = [
        "setpriv",
        f"--reuid={uid}",
        f"--regid={uid}",
        "--clear-groups",
        "/usr/bin/python3",
        "-c",
        LISTENER,
        path,
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            until(lambda: process.poll() is not None or (os.path.exists(path) and os.stat(path).st_mode & 0o002))
            assert process.poll() is None
            yield
        finally:
            process.kill()


def test_the_owner_of_the_services_directory_is_trusted(run: Path):
    directory = given(run / "gpumond", SERVICE)
    with listening(f"{directory}/agent.sock", SERVICE):
        link = Transport(trusted_uids(directory))
        assert link.connect(f"{directory}/agent.sock", 0.0)
        link.close(0.0)
        found = agent_socket({"GPUMOND_SOCKET": f"{directory}/agent.sock"}, directory)
    assert found.state == "good"


def test_another_users_daemon_is_refused_and_doctor_explains_it(run: Path):
    service, theirs = given(run / "gpumond", SERVICE), given(run / "theirs", STRANGER)
    with listening(f"{theirs}/agent.sock", STRANGER):
        link = Transport(trusted_uids(service))
        assert not link.connect(f"{theirs}/agent.sock", 0.0)
        assert link.refusals == 1
        found = agent_socket({"GPUMOND_SOCKET": f"{theirs}/agent.sock"}, service)
    assert found.state == "bad"
    assert f"do not trust uid {STRANGER}; {service} belongs to uid {SERVICE}" in found.detail
    assert found.remedy == f"as root: install -d -o {STRANGER} -m 755 {service}"


def test_no_variable_of_the_environment_names_another_directory():
    """A program that was made to think itself elsewhere obeys those whom it would have obeyed."""
    names = ("GPUMOND_SOCKET", "GPUMOND_STATE_DIR", "GPUMOND_TRUSTED_UIDS", "XDG_RUNTIME_DIR", "HOME")
    with tempfile.TemporaryDirectory(dir="/run") as directory:
        theirs = given(Path(directory) / "gpumond", STRANGER)
        environ = {**os.environ, **dict.fromkeys(names, theirs)}
        command = [sys.executable, "-c", "from gpumond.agent.daemon_trust import trusted_uids; print(*trusted_uids())"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert str(STRANGER) not in done.stdout.split()


def writable_by_others(run: Path) -> str:
    return given(run / "gpumond", SERVICE, 0o777)


def writable_by_its_group(run: Path) -> str:
    return given(run / "gpumond", SERVICE, 0o775)


def below_a_directory_of_everybody(run: Path) -> str:
    run.chmod(0o1777)
    return given(run / "gpumond", SERVICE)


def below_a_directory_of_a_user(run: Path) -> str:
    os.chown(run, STRANGER, STRANGER)
    return given(run / "gpumond", SERVICE)


def below_a_directory_that_leads_elsewhere(run: Path) -> str:
    given(run / "real", 0)
    (run / "link").symlink_to(run / "real")
    return given(run / "link" / "gpumond", SERVICE)


def that_leads_elsewhere(run: Path) -> str:
    (run / "gpumond").symlink_to(given(run / "real", SERVICE))
    return str(run / "gpumond")


def of_nobody_known(run: Path) -> str:
    return given(run / "gpumond", OVERFLOW_UID)


def that_is_a_file(run: Path) -> str:
    (run / "gpumond").touch()
    os.chown(run / "gpumond", SERVICE, SERVICE)
    return str(run / "gpumond")


def that_is_not_there(run: Path) -> str:
    return str(run / "gpumond")


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (writable_by_others, "its owner alone can change"),
        (writable_by_its_group, "its owner alone can change"),
        (below_a_directory_of_everybody, "root alone can change"),
        (below_a_directory_of_a_user, "root alone can change"),
        (below_a_directory_that_leads_elsewhere, "root alone can change"),
        (that_leads_elsewhere, "its owner alone can change"),
        (of_nobody_known, "unknown in this user namespace"),
        (that_is_a_file, "its owner alone can change"),
        (that_is_not_there, "No such file"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_unsafe_directory_is_not_trusted(run: Path, made, why: str):
    directory = made(run)
    assert trusted_uids(directory) == {0, os.geteuid()}
    with pytest.raises(OSError, match=why):
        service_uid(directory)
