"""``snapshot``: the framework's own memory snapshot, bounded, complete or absent, and private to its user."""

from __future__ import annotations

import json
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumond import agent
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import MIB
from tests.helpers.agent_daemon import FAKES, environment
from tests.helpers.simulated import UUID

TORCH = """
import signal, sys, torch, gpumond.agent as agent
from gpumond.agent.measure import snapshots
from torch.world import ACTIVE, Segment
signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as some programs have it
torch.WORLD.reset(segments=[Segment([(1 << 20, ACTIVE)])])
torch.cuda.memory._snapshot = lambda: {"segments": [], "device_traces": [], "filler": b"pickle" * 100_000}
path = sys.argv[1]
"""


def in_torch(code: str, path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", TORCH + code, os.fspath(path)],
        env=environment("/nowhere", FAKES),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_snapshot_is_complete_and_private(allocator: CachingAllocator, tmp_path: Path):
    allocator.malloc(5 * MIB)
    path = tmp_path / "memory.json"
    path.write_text("an older one")
    dump = agent.snapshot(path)
    assert (dump.allocator, dump.path, dump.reason) == ("sim", os.fspath(path), "")
    assert dump.size_bytes == path.stat().st_size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())[UUID] == [list(block) for block in allocator.blocks()]
    assert sorted(os.listdir(tmp_path)) == ["card", "memory.json"]


def test_snapshot_above_the_limit_leaves_no_file(tmp_path: Path):
    path = tmp_path / "memory.pickle"
    code = "print(snapshots.write(path, max_bytes=500_000)); print(agent.snapshot(path).size_bytes)"
    refused, whole = in_torch(code, path).splitlines()
    assert "larger than 488.3 KiB" in refused
    assert "path=None" in refused
    assert int(whole) == path.stat().st_size
    assert path.read_bytes() == pickle.dumps({"segments": [], "device_traces": [], "filler": b"pickle" * 100_000})
    assert [name.name for name in tmp_path.iterdir()] == ["memory.pickle"]


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        ("initialized=False", "CUDA isn't initialized"),
        ("bad_fork=True", "CUDA isn't initialized"),
        ("backend='cudaMallocAsync'", "only the native allocator"),
    ],
)
def test_torch_explains_a_missing_snapshot(world: str, reason: str, tmp_path: Path):
    out = in_torch(f"torch.WORLD.reset({world}); print(agent.snapshot(path))", tmp_path / "x")
    assert "path=None" in out
    assert reason in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        ("records_history=True", "records its memory history"),
        ("segments=[Segment([(512, ACTIVE)] * 50_001)]", "blocks would stall the program"),
    ],
)
def test_requested_snapshot_is_refused_if_it_would_stall_the_program(world: str, reason: str, tmp_path: Path):
    code = (
        f"torch.WORLD.reset({world}); print(snapshots.write(path, must_be_fast=True)); print(agent.snapshot(path).path)"
    )
    refused, own = in_torch(code, tmp_path / "x").splitlines()
    assert reason in refused
    assert own == os.fspath(tmp_path / "x")


def test_recorded_allocations_are_annotated_with_the_scope(tmp_path: Path):
    code = """
import asyncio
def shown():
    print(repr(torch.WORLD.metadata))
async def task():
    with agent.scope("task"):
        shown()
with agent.scope("before"):
    shown()
    torch.WORLD.reset(records_history=True, metadata="own")
    with agent.scope("epoch"):
        with agent.scope("forward"):
            shown()
            torch.WORLD.records_history = False
        shown()
    shown()
torch.WORLD.records_history = True
asyncio.run(task())
"""
    assert in_torch(code, tmp_path / "x").split() == [
        "''",
        "'before/epoch/forward'",
        "'before/epoch'",
        "'own'",
        "'own'",
    ]


def test_failure_of_the_library_is_a_reason_and_no_error(tmp_path: Path):
    code = """
def broken():
    raise RuntimeError("internal\\nassert")
torch.cuda.memory._snapshot = broken
print(agent.snapshot(path))
"""
    assert "RuntimeError: internal" in in_torch(code, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_directory_that_cannot_be_written_is_a_reason(allocator: CachingAllocator, tmp_path: Path):
    dump = agent.snapshot(tmp_path / "missing" / "memory.json")
    assert (dump.path, "No such file" in dump.reason) == (None, True)


def test_program_without_an_allocator_has_no_snapshot(allocator: CachingAllocator, tmp_path: Path):
    allocator.close()
    assert agent.snapshot(tmp_path / "x").reason == "sim: nothing has been allocated yet"


def test_requested_snapshots_are_limited_in_rate_and_number(tmp_path: Path):
    """At most four are kept, and at most one in ten seconds is written."""
    code = """
asked = snapshots.RequestedSnapshots()
for number in range(6):
    snapshots.time = type("Clock", (), {"time": lambda: 1e9 + number, "monotonic": lambda: 100.0 * number})
    dump = asked.write("team/train:" + "é" * 117)
    print(dump.path or dump.reason)
print(asked.write("team/train").reason)
"""
    done = subprocess.run(
        [sys.executable, "-c", TORCH + code, "-"],
        env=environment("/nowhere", FAKES, XDG_STATE_HOME=os.fspath(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    *paths, too_soon = done.stdout.splitlines()
    folder = tmp_path / "gpumond" / "snapshots"
    assert sorted(map(os.fspath, folder.iterdir())) == sorted(paths[-4:])
    assert all(Path(path).name.startswith("team-train--") and path.endswith(".pickle") for path in paths)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert "too many requests" in too_soon


def test_link_of_another_user_is_not_used(tmp_path: Path):
    """Any user can create a link in TMPDIR first."""
    (tmp_path / f"gpumond-{os.geteuid()}").symlink_to(tmp_path)
    environ = environment("/nowhere", FAKES, TMPDIR=os.fspath(tmp_path))
    for name in ("HOME", "XDG_STATE_HOME"):
        environ.pop(name, None)
    code = "print(snapshots.RequestedSnapshots().write('train').reason)"
    done = subprocess.run([sys.executable, "-c", TORCH + code, "-"], env=environ, capture_output=True, text=True)
    assert "isn't a directory that this user owns" in done.stdout


def test_directory_of_another_user_is_not_used(tmp_path: Path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a directory to another user")
    folder = tmp_path / "gpumond" / "snapshots"
    folder.mkdir(parents=True)
    os.chown(folder, 65534, 65534)
    code = "print(snapshots.RequestedSnapshots().write('train').reason)"
    environ = environment("/nowhere", FAKES, XDG_STATE_HOME=os.fspath(tmp_path))
    done = subprocess.run([sys.executable, "-c", TORCH + code, "-"], env=environ, capture_output=True, text=True)
    assert "isn't a directory that this user owns" in done.stdout


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: agent.snapshot(3), "snapshot: path: expected str or PathLike, got int"),
        (lambda: agent.snapshot(b"x"), "snapshot: path: expected str or PathLike, got bytes"),
        (lambda: agent.snapshot(""), "snapshot: path: expected the path"),
        (lambda: agent.snapshot("a\0b"), "snapshot: path: expected the path"),
    ],
)
def test_wrong_arguments_of_snapshot_are_named(call: Callable[[], object], says: str):
    with pytest.raises((TypeError, ValueError), match=says):
        call()
