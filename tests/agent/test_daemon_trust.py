"""Trusted daemons: the service's directory decides, and no environment variable of the program."""

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

from gpumond.agent.transport import OVERFLOW_UID, Transport, service_uid, trusted_uids
from gpumond.commands.doctor import check_agent_socket
from tests.helpers.running import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give directories to others")

SERVICE, OTHER_USER = 47110, 47111
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
    """Directory like /run, which only root can change, as are its parents."""
    directory = Path(tempfile.mkdtemp(prefix="gpumond-test-", dir="/run"))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def owned_directory(directory: Path, uid: int, mode: int = 0o755) -> str:
    """Create the service's directory and give it to the user."""
    directory.mkdir(exist_ok=True)
    directory.chmod(mode)
    os.chown(directory, uid, uid)
    return str(directory)


@contextmanager
def listening(path: str, uid: int) -> Iterator[None]:
    """Listen on the socket in a process of that user."""
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


def test_owner_of_the_service_directory_is_trusted(run: Path):
    directory = owned_directory(run / "gpumond", SERVICE)
    with listening(f"{directory}/agent.sock", SERVICE):
        link = Transport(trusted_uids(directory))
        assert link.connect(f"{directory}/agent.sock", 0.0)
        link.close(0.0)
        found = check_agent_socket({"GPUMOND_SOCKET": f"{directory}/agent.sock"}, directory)
    assert found.state == "good"


def test_daemon_of_another_user_is_refused_and_doctor_explains_it(run: Path):
    service, other_directory = (
        owned_directory(run / "gpumond", SERVICE),
        owned_directory(run / "other_directory", OTHER_USER),
    )
    with listening(f"{other_directory}/agent.sock", OTHER_USER):
        link = Transport(trusted_uids(service))
        assert not link.connect(f"{other_directory}/agent.sock", 0.0)
        assert link.refusals == 1
        found = check_agent_socket({"GPUMOND_SOCKET": f"{other_directory}/agent.sock"}, service)
    assert found.state == "bad"
    assert f"this user's agents don't trust uid {OTHER_USER}; {service} belongs to uid {SERVICE}" in found.detail
    assert found.remedy == f"as root: install -d -o {OTHER_USER} -m 755 {service}"


def test_environment_variables_do_not_change_the_service_directory():
    """A program with a manipulated environment trusts the same users."""
    names = ("GPUMOND_SOCKET", "GPUMOND_STATE_DIR", "GPUMOND_TRUSTED_UIDS", "XDG_RUNTIME_DIR", "HOME")
    with tempfile.TemporaryDirectory(dir="/run") as directory:
        other_directory = owned_directory(Path(directory) / "gpumond", OTHER_USER)
        environ = {**os.environ, **dict.fromkeys(names, other_directory)}
        command = [sys.executable, "-c", "from gpumond.agent.transport import trusted_uids; print(*trusted_uids())"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert str(OTHER_USER) not in done.stdout.split()


def writable_by_others(run: Path) -> str:
    return owned_directory(run / "gpumond", SERVICE, 0o777)


def writable_by_its_group(run: Path) -> str:
    return owned_directory(run / "gpumond", SERVICE, 0o775)


def below_a_world_writable_directory(run: Path) -> str:
    run.chmod(0o1777)
    return owned_directory(run / "gpumond", SERVICE)


def below_a_directory_of_a_user(run: Path) -> str:
    os.chown(run, OTHER_USER, OTHER_USER)
    return owned_directory(run / "gpumond", SERVICE)


def below_a_symbolic_link(run: Path) -> str:
    owned_directory(run / "real", 0)
    (run / "link").symlink_to(run / "real")
    return owned_directory(run / "link" / "gpumond", SERVICE)


def symbolic_link(run: Path) -> str:
    (run / "gpumond").symlink_to(owned_directory(run / "real", SERVICE))
    return str(run / "gpumond")


def owned_by_an_unmapped_uid(run: Path) -> str:
    return owned_directory(run / "gpumond", OVERFLOW_UID)


def regular_file(run: Path) -> str:
    (run / "gpumond").touch()
    os.chown(run / "gpumond", SERVICE, SERVICE)
    return str(run / "gpumond")


def missing(run: Path) -> str:
    return str(run / "gpumond")


@pytest.mark.parametrize(
    ("create", "reason"),
    [
        (writable_by_others, "only its user can change"),
        (writable_by_its_group, "only its user can change"),
        (below_a_world_writable_directory, "only root can change"),
        (below_a_directory_of_a_user, "only root can change"),
        (below_a_symbolic_link, "only root can change"),
        (symbolic_link, "only its user can change"),
        (owned_by_an_unmapped_uid, "unknown in this user namespace"),
        (regular_file, "only its user can change"),
        (missing, "No such file"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_unsafe_directory_is_not_trusted(run: Path, create, reason: str):
    directory = create(run)
    assert trusted_uids(directory) == {0, os.geteuid()}
    with pytest.raises(OSError, match=reason):
        service_uid(directory)
