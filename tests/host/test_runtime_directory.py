"""Runtime directories: permitted locations of sockets, the daemon's own files, and their discovery."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumond.facts.errors import ConfigError
from gpumond.host.runtime_directory import (
    SERVICE_RUNTIME_DIRECTORY,
    bind_agent_socket,
    bind_api_socket,
    nonstandard_directory,
    runtime_directories,
)
from tests.helpers.running import RunningDaemon, until

CONTAINER = """
set -e
machine=$1 given=$2; shift 2
mount --bind "$machine/agents" "$given"
mount -o remount,bind,ro "$given"
mount -t tmpfs none "$machine"
exec "$@"
"""
"""Bind a read-only volume as a container runtime does, in place of the host's directories."""

CONTAINER_PROGRAM = """
import errno, json, os, socket, sys
from gpumond.facts.messages import Hello, Report, encode
given, uid = sys.argv[1], int(sys.argv[2])
os.setgid(uid)
os.setuid(uid)

def outcome(act, *arguments):
    try:
        act(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"

unix = [socket.socket(socket.AF_UNIX) for _ in range(3)]
tried = {
    "read the token": outcome(open, given + "/token"),
    "ask the API": outcome(unix[0].connect, given + "/api.sock"),
    "listen there": outcome(unix[1].bind, given + "/api.sock"),
    "remove the socket": outcome(os.unlink, given + "/agent.sock"),
    "put another in its place": outcome(os.rename, given + "/agent.sock", given + "/old.sock"),
    "close it to others": outcome(os.chmod, given + "/agent.sock", 0),
    "speak as an agent": outcome(unix[2].connect, given + "/agent.sock"),
}
print(json.dumps({"entries": os.listdir(given), "tried": tried}), flush=True)
unix[2].sendall(encode(Hello("container")) + encode(Report()))
sys.stdin.read()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """Directory that every user can access."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        yield place


@pytest.fixture
def daemon(place: Path) -> Iterator[RunningDaemon]:
    """Daemon with its agent socket in ``agents`` and its own files in ``own``."""
    (place / "cards").mkdir()
    (place / "gpumond.yaml").write_text('socket_mode: "0666"\n')
    with RunningDaemon(
        place / "daemon",
        *("--source", "sim", "--config", str(place / "gpumond.yaml")),
        *("--socket", str(place / "agents" / "agent.sock"), "--runtime-dir", str(place / "own")),
        environ={"GPUMOND_SIM_DIR": str(place / "cards"), "GPUMOND_RUNTIME_DIR": str(place / "own")},
    ) as daemon:
        until(lambda: daemon.request("/api/v1/status")[0] == 200)
        yield daemon
        assert daemon.stop() == 0
        assert not [name for name in ("api.sock", "token") if (place / "own" / name).exists()]


def names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


def caller_of(daemon: RunningDaemon) -> str:
    """Return the user that the command line requested an (unsuccessful) flush as."""
    done = daemon.run("flush", "--all")
    assert done.returncode == 3, done.stderr
    actor: str = daemon.get("audit")[-1]["actor"]
    return actor


def test_agents_directory_has_their_socket_and_no_file_of_the_daemon(place: Path, daemon: RunningDaemon):
    token = place / "own" / "token"
    assert names(place / "agents") == {"agent.sock"}
    assert names(place / "own") == {"agent.sock.lock", "api.sock", "api.sock.lock", "token"}
    assert (token.stat().st_mode & 0o777, (place / "own").stat().st_mode & 0o777) == (0o600, 0o755)
    assert caller_of(daemon) == f"token@uid:{os.geteuid()}"
    token.unlink()
    assert caller_of(daemon) == f"uid:{os.geteuid()}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount and act as another user")
@pytest.mark.parametrize("uid", [0, 4242])
def test_container_with_the_agents_directory_can_only_report(place: Path, daemon: RunningDaemon, uid: int):
    with tempfile.TemporaryDirectory() as given:
        Path(given).chmod(0o755)
        program = (sys.executable, "-c", CONTAINER_PROGRAM, given, str(uid))
        container = subprocess.Popen(
            ["unshare", "--mount", "--propagation=private", "sh", "-c", CONTAINER, "sh", str(place), given, *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert container.stdout
            assert json.loads(container.stdout.readline()) == {
                "entries": ["agent.sock"],
                "tried": {
                    "read the token": "ENOENT",
                    "ask the API": "ENOENT",
                    "listen there": "EROFS",
                    "remove the socket": "EROFS",
                    "put another in its place": "EROFS",
                    "close it to others": "EROFS",
                    "speak as an agent": "done",
                },
            }
            (agent,) = until(lambda: daemon.get("agents"))
            assert (agent["workload"], agent["uid"], agent["pid"]) == ("container", uid, container.pid)
        finally:
            container.communicate()


def test_two_daemons_do_not_share_their_own_files(place: Path, daemon: RunningDaemon):
    """The second daemon does not change the token and socket of the first."""
    with pytest.raises(AssertionError, match=r"another daemon uses the socket .*agent\.sock; stop that daemon"):
        RunningDaemon(place / "second", "--source", "sim", "--runtime-dir", str(place / "own"))
    with pytest.raises(AssertionError, match=r"another daemon uses the socket .*/own/api\.sock; .* with --runtime-dir"):
        RunningDaemon(
            *(place / "third", "--source", "sim", "--runtime-dir", str(place / "own")),
            *("--socket", str(place / "third" / "other.sock")),
        )
    assert caller_of(daemon) == f"token@uid:{os.geteuid()}"


@pytest.mark.parametrize("obstacle", ["file", "link", "open directory"])
def test_unsafe_directory_is_refused_with_the_setting_to_change(tmp_path: Path, obstacle: str):
    own = tmp_path / "own"
    if obstacle == "file":
        own.write_text("")
    elif obstacle == "link":
        (tmp_path / "elsewhere").mkdir()
        own.symlink_to(tmp_path / "elsewhere")
    else:
        own.mkdir()
        own.chmod(0o777)
    with pytest.raises(ConfigError, match=r"runtime directory .*own.* with --runtime-dir"):
        bind_api_socket(own, 0o600)
    with pytest.raises(ConfigError, match=r"runtime directory .*own.* with --runtime-dir"):
        bind_agent_socket(tmp_path / "agent.sock", 0o600, own)


SERVICE = [SERVICE_RUNTIME_DIRECTORY, "/run/gpumond"]
USERS = SERVICE if os.geteuid() == 0 else ["/run/user/7/gpumond"]


@pytest.mark.parametrize(
    ("environ", "places"),
    [
        ({}, [*USERS, *SERVICE]),
        ({"GPUMOND_SOCKET": "/run/gpumond/agent.sock"}, SERVICE),
        ({"GPUMOND_SOCKET": "/srv/agent.sock"}, ["/srv"]),
        ({"GPUMOND_SOCKET": "/srv/agent.sock", "GPUMOND_RUNTIME_DIR": "/own"}, ["/own"]),
    ],
)
def test_command_line_uses_the_runtime_directory_of_the_daemon(environ: dict[str, str], places: list[str]):
    """The service's directory precedes the agents' directory, which may contain an outdated token."""
    found = runtime_directories({"XDG_RUNTIME_DIR": "/run/user/7", **environ})
    assert [str(place) for place in found] == places


def test_socket_has_its_mode_before_anyone_can_connect(tmp_path: Path):
    with bind_agent_socket(tmp_path / "agent.sock", 0o600):
        assert (tmp_path / "agent.sock").stat().st_mode & 0o777 == 0o600


def test_socket_of_an_ended_daemon_is_replaced_and_of_a_running_one_is_not(tmp_path: Path):
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "agent.sock"))
    stale.close()
    with (
        bind_agent_socket(tmp_path / "agent.sock", 0o600),
        pytest.raises(ConfigError, match="another daemon uses the socket"),
    ):
        bind_agent_socket(tmp_path / "agent.sock", 0o600)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_directory_of_another_user_is_refused_with_the_remedy():
    """The directory belongs to root, as a container engine creates it, and the daemon runs as another user."""
    program = (
        "import os, sys; from pathlib import Path; from gpumond.host.runtime_directory import bind_agent_socket\n"
        "os.setgid(47110); os.setuid(47110)\n"
        "bind_agent_socket(Path(sys.argv[1]) / 'agent.sock', 0o666)"
    )
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        done = subprocess.run([sys.executable, "-c", program, directory], capture_output=True, text=True)
    assert f"ConfigError: runtime directory {directory} isn't writable by the daemon's user" in done.stderr
    assert f"install -d -o 47110 -m 755 {directory}" in done.stderr


@pytest.mark.parametrize("obstacle", ["file", "link", "open directory"])
def test_unsafe_parent_directory_is_refused_with_the_remedy(tmp_path: Path, obstacle: str):
    path = tmp_path / "place" / "agent.sock"
    path.parent.mkdir(mode=0o755)
    if obstacle == "file":
        path.write_text("precious")
    elif obstacle == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="--socket"):
        bind_agent_socket(path, 0o600)


@pytest.mark.parametrize(
    ("directory", "found"), [("/srv/own", Path("/srv/own")), ("/run/gpumond-api", None), ("/run/gpumond", None)]
)
def test_only_an_unusual_directory_needs_the_variable(directory: str, found: Path | None):
    environ = {"XDG_RUNTIME_DIR": "/run/user/7", "GPUMOND_RUNTIME_DIR": "/srv/own", "GPUMOND_SOCKET": "/srv/a.sock"}
    assert nonstandard_directory(Path(directory), environ) == found
