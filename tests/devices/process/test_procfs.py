from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from gpumond.devices.process.procfs import UNKNOWN_IDENTITY, ProcessIdentity, ProcessTable, command_of, user_name
from gpumond.host.machine import read_process_stat
from tests.helpers.running import until


def write(root: Path, pid: int, comm: bytes = b"python", start_ticks: int = 500, uid: int = 1000) -> None:
    directory = root / str(pid)
    directory.mkdir(exist_ok=True)
    fields = ["S", *map(str, range(4, 22)), str(start_ticks), *map(str, range(23, 53))]
    (directory / "stat").write_bytes(b"%d (%s) %s\n" % (pid, comm, " ".join(fields).encode()))
    (directory / "status").write_text(f"Name:\tx\nUmask:\t0022\nUid:\t1\t{uid}\t3\t4\nGid:\t5\t6\t7\t8\n")


def look_up(root: Path, pid: int) -> ProcessIdentity:
    return ProcessTable(str(root)).read([pid])[pid]


def test_real_process_is_identified() -> None:
    identity = ProcessTable().read([os.getpid()])[os.getpid()]
    assert identity.uid == os.geteuid()
    assert identity.comm == Path("/proc/self/comm").read_text().rstrip("\n")
    assert identity.start_ticks == int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


@pytest.mark.parametrize(
    ("comm", "shown"),
    [
        (b"a b", "a b"),
        (b") S 1 (x", ") S 1 (x"),
        (b"((", "(("),
        (b"", ""),
        (b"x\ny\x1b", "x\N{REPLACEMENT CHARACTER}y\N{REPLACEMENT CHARACTER}"),
        (b"caf\xe9", "caf\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_arbitrary_command_names_are_read(tmp_path: Path, comm: bytes, shown: str) -> None:
    write(tmp_path, 7, comm)
    assert look_up(tmp_path, 7) == ProcessIdentity(500, shown, 1000, user_name(1000))


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("/usr/bin/python3 train.py --token s3cret", "python3 train.py"),
        ("python3.12 -u -W ignore -Xdev jobs/train.py s3cret", "python3.12 jobs/train.py"),
        (
            "python -m vllm.entrypoints.openai.api_server --api-key s3cret",
            "python -m vllm.entrypoints.openai.api_server",
        ),
        ("python -Imtorch.distributed.run --token s3cret", "python -m torch.distributed.run"),
        ("python3 -c s3cret", "python3"),
        ("python3 -uc s3cret", "python3"),
        ("python3 - s3cret", "python3"),
        ("python3 --check-hash-based-pycs s3cret train.py", "python3"),
        ("python3 -m", "python3 -m"),
        ("python3", "python3"),
        ("/opt/bin/trtllm-serve --api-key s3cret", "trtllm-serve"),
        ("pythonic s3cret", "pythonic"),
        ("", None),
    ],
)
def test_command_excludes_arguments_that_may_be_secrets(arguments: str, shown: str | None) -> None:
    assert command_of("".join(f"{each}\0" for each in arguments.split()).encode()) == shown


@pytest.mark.parametrize(
    ("command_line", "shown"),
    [
        (b"python3 train.py --token s3cret\0", None),  # a title that the program has set
        (b"VLLM::EngineCore\0\0\0", "VLLM::EngineCore"),
        (b"/bin/caf\xe9\x1b\0", "caf\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_titles_and_any_bytes_are_read(command_line: bytes, shown: str | None) -> None:
    assert command_of(command_line) == shown


def test_process_without_a_readable_command_line_is_identified(tmp_path: Path) -> None:
    write(tmp_path, 7)
    assert look_up(tmp_path, 7).command is None
    (tmp_path / "7/cmdline").write_bytes(b"python\0train.py\0")
    assert look_up(tmp_path, 7) == ProcessIdentity(500, "python", 1000, user_name(1000), "python train.py")


def test_ended_process_is_unknown(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert look_up(Path("/proc"), ended.pid) == UNKNOWN_IDENTITY
    assert look_up(tmp_path, 7) == UNKNOWN_IDENTITY


@pytest.mark.parametrize("stat", [b"", b"7", b"7 (x) S 1", b"\xff\x00"])
def test_broken_stat_is_unknown(tmp_path: Path, stat: bytes) -> None:
    write(tmp_path, 7)
    (tmp_path / "7/stat").write_bytes(stat)
    assert look_up(tmp_path, 7) == UNKNOWN_IDENTITY


def test_reused_pid_is_another_process(tmp_path: Path) -> None:
    table = ProcessTable(str(tmp_path))
    write(tmp_path, 7, start_ticks=500, uid=1000)
    first = table.read([7])[7]
    write(tmp_path, 7, start_ticks=900, uid=1001)
    assert (first, table.read([7])[7]) == (
        ProcessIdentity(500, "python", 1000, user_name(1000)),
        ProcessIdentity(900, "python", 1001, user_name(1001)),
    )


def test_exec_may_change_name_and_owner(tmp_path: Path) -> None:
    table = ProcessTable(str(tmp_path))
    write(tmp_path, 7, b"slurmstepd", uid=0)
    table.read([7])
    write(tmp_path, 7, b"python", uid=1000)
    assert table.read([7])[7] == ProcessIdentity(500, "python", 1000, user_name(1000))


def test_exit_of_a_running_process_is_known_at_the_next_reading() -> None:
    table = ProcessTable()
    program = subprocess.Popen(["sleep", "3600"])
    assert table.read([program.pid])[program.pid].comm == "sleep"
    program.kill()
    until(lambda: read_process_stat("/proc", program.pid).state == "Z")  # type: ignore[union-attr]
    table.read([program.pid])
    assert table.process_stats[program.pid].state == "Z"
    program.wait()
    assert table.read([program.pid])[program.pid] == UNKNOWN_IDENTITY
    assert table.process_stats == {}


def test_state_of_a_process_is_read_at_each_reading() -> None:
    table = ProcessTable()
    program = subprocess.Popen(["sleep", "3600"])
    try:
        program.send_signal(signal.SIGSTOP)
        until(lambda: read_process_stat("/proc", program.pid).state == "T")  # type: ignore[union-attr]
        table.read([program.pid])
        assert table.process_stats[program.pid].state == "T"
        program.send_signal(signal.SIGCONT)
        until(lambda: read_process_stat("/proc", program.pid).state == "S")  # type: ignore[union-attr]
        table.read([program.pid])
        assert table.process_stats[program.pid].state == "S"
    finally:
        program.kill()
        program.wait()


def test_owner_is_read_once(tmp_path: Path) -> None:
    table = ProcessTable(str(tmp_path))
    write(tmp_path, 7)
    before = table.read([7])[7]
    (tmp_path / "7/status").unlink()
    assert table.read([7, 7])[7] == before


def test_unrequested_processes_are_dropped(tmp_path: Path) -> None:
    table = ProcessTable(str(tmp_path))
    write(tmp_path, 7)
    table.read([7])
    table.read([])
    (tmp_path / "7/status").unlink()
    assert table.read([7])[7] == UNKNOWN_IDENTITY


def test_largest_pid_equals_that_of_the_kernel(tmp_path: Path) -> None:
    assert ProcessTable(str(tmp_path)).pid_max() == 4194304
    assert ProcessTable().pid_max() == int(Path("/proc/sys/kernel/pid_max").read_text())
