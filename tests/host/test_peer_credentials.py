"""Identity of socket peers: ten thousand real connections that try to be mistaken for another process."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumond.devices.process.procfs import ProcessTable
from gpumond.facts.program import MAX_PID
from gpumond.host.machine import in_private_pid_namespace, read_start_ticks
from gpumond.host.peer import CREDENTIALS_SPACE, PeerIdentity, SubordinateUids, identify_peer, peer_pidfd, sender_pid

TRIALS = 10_000
PLAIN, DROPPED, SETUID, PASSED, DROPPED_LATER, NAMESPACE, PID_RETURNS = range(7)


@pytest.fixture
def peers_directory() -> Iterator[Path]:
    """Directory that every user can enter, with the connecting program, and ``as-root``, its setuid copy."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a setuid program and to choose pids")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        if os.statvfs(place).f_flag & os.ST_NOSUID:
            pytest.skip(f"setuid programs do not work in {place.parent}")
        place.chmod(0o755)
        program, source = place / "peers", Path(__file__).with_name("peers.c")
        subprocess.run(["cc", "-O1", "-Wall", "-Werror", "-o", program, source], check=True)
        shutil.copy(program, place / "as-root")
        (place / "as-root").chmod(0o4755)
        yield place


@pytest.mark.needs("cc")
def test_peer_is_never_identified_as_another_process(peers_directory: Path):
    listening_socket = peers_directory / "listening_socket"
    command = [peers_directory / "peers", listening_socket, peers_directory / "as-root", str(TRIALS), "1"]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(listening_socket))
        listening_socket.chmod(0o666)
        listener.listen()
        counts: Counter[int] = Counter()
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
            assert started.stdin
            assert started.stdout
            for line in started.stdout:
                way, pid, uid, successor = map(int, line.split())
                check_identity(listener, way, pid, uid, successor)
                counts[way] += 1
                started.stdin.write(b"x")
                started.stdin.flush()
    assert (started.returncode, sum(counts.values()), set(counts)) == (0, TRIALS, set(range(7)))


def check_identity(listener: socket.socket, way: int, pid: int, uid: int, successor: int) -> None:
    """Accept a connection and check its identity; ``pid`` and ``uid`` are the connecting process's at connect()."""
    connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        pidfd = peer_pidfd(connection)
        try:
            found = identify_peer(connection, pidfd)
        finally:
            if pidfd is not None:
                os.close(pidfd)
        if way == PID_RETURNS and pidfd is None:
            return  # this kernel cannot distinguish them
        if way in (PASSED, PID_RETURNS):
            assert found is None, (way, found, successor)
            return
        ticks = read_start_ticks(pid)
        assert ticks is not None
        assert found == PeerIdentity(pid, ticks, uid), way
        if way != DROPPED_LATER:
            assert ProcessTable().read([pid])[pid].uid == uid, way


def test_sender_is_distinguished_from_the_connecting_process():
    """A message of a child that inherited the connection names the child."""
    server_end, client_end = socket.socketpair()
    with server_end, client_end:
        server_end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        child = os.fork()
        if child == 0:
            client_end.send(b"x")
            os._exit(0)
        os.waitpid(child, 0)
        _, ancillary, _, _ = server_end.recvmsg(1, CREDENTIALS_SPACE)
        assert sender_pid(ancillary) == child != os.getpid()


def test_peer_of_another_pid_namespace_is_identified_by_its_connection_and_its_uid(tmp_path: Path):
    around = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*around, "true"], capture_output=True).returncode:
        pytest.skip("no new PID namespace may be made here")
    program = (
        "import socket, sys; from gpumond.host.peer import identify_peer, peer_pidfd\n"
        "with socket.socket(socket.AF_UNIX) as listening_socket:\n"
        "    listening_socket.bind(sys.argv[1]); listening_socket.listen(); print('open', flush=True)\n"
        "    for _ in range(2):\n"
        "        peer, _ = listening_socket.accept(); found = identify_peer(peer, peer_pidfd(peer))\n"
        "        print(found.pid, found.start_ticks, found.uid)"
    )
    command = [*around, sys.executable, "-c", program, str(tmp_path / "listening_socket")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout
        assert started.stdout.readline() == "open\n"
        with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
            for peer in (one, two):
                peer.connect(str(tmp_path / "listening_socket"))
            found = [line.split() for line in started.stdout]
    assert [each[1:] for each in found] == [["None", str(os.getuid())]] * 2
    first, second = (int(each[0]) for each in found)
    assert MAX_PID < first < second < 2**31


def test_namespace_that_cannot_be_seen_is_unknown(tmp_path: Path):
    assert in_private_pid_namespace(str(tmp_path)) is None


PASSWD = "root:x:0:0::/:/bin/sh\nkubelet:x:998:998::/:\nalice:x:1000:1000::/:/bin/sh\n"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    subuid, passwd = tmp_path / "subuid", tmp_path / "passwd"
    passwd.write_text(PASSWD)
    return subuid, passwd


@pytest.mark.parametrize(
    ("uid", "person"),
    [
        (99_999, 99_999),
        (100_000, 1000),
        (165_535, 1000),
        (165_536, 1001),  # the owner is a number
        (231_072, 231_072),  # an owner without a line in passwd, such as one of LDAP
        (231_072 + 65_535, 231_072),
        (1_000_000, 1_000_000),  # of a system account: each container has a block
        (1_000_000 + 65_535, 1_000_000),
        (1_000_000 + 65_536, 1_065_536),
        (1000, 1000),
        (0, 0),
    ],
)
def test_uid_of_a_range_counts_for_its_owner(files: tuple[Path, Path], uid: int, person: int):
    files[0].write_text(
        "alice:100000:65536\n1001:165536:65536\n\n# a remark\nbob:231072:65536\nkubelet:1000000:6553600\nbad:x:1\n"
    )
    assert SubordinateUids(*files).person_uid(uid) == person


def test_no_uid_counts_for_root(files: tuple[Path, Path]):
    files[0].write_text("root:100000:65536\n")
    assert SubordinateUids(*files).person_uid(100_001) == 100_000


@pytest.mark.parametrize("content", [None, b"\xff\xfe\n"])
def test_without_a_readable_file_each_uid_counts_for_itself(files: tuple[Path, Path], content: bytes | None):
    if content is not None:
        files[0].write_bytes(content)
    assert SubordinateUids(*files).person_uid(100_000) == 100_000
