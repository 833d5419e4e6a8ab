"""Traces for Perfetto: the tracks add up to the used bytes of a device, and events are instants."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpumond.commands.main import main
from gpumond.facts.frame import Frame
from gpumond.facts.units import GIB
from gpumond.features.recordings.record import CounterTracks, instants, program_names as names, trace_base_time
from gpumond.tick.ledger import make_ledger
from tests.helpers.frames import busy_frame, fake_daemon
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot

SNAPSHOT = make_snapshot(
    make_device(used_bytes=30 * GIB, processes=(make_process(10, 20 * GIB), make_process(11, 5 * GIB))),
    reports=(make_report(10, (make_pool(live=12 * GIB, cached=6 * GIB),)),),
)
FRAME = Frame(SNAPSHOT, make_ledger(SNAPSHOT))
FLUSH = {"id": 5, "kind": "flush", "at": 7.5, "pid": 10, "summary": "flush of\x1b train"}


def tracks(frame: Frame, known: CounterTracks) -> dict[tuple[int, str], dict[str, int]]:
    return {(entry["pid"], entry["name"]): entry["args"] for entry in known.counters(frame)}


def test_the_tracks_of_a_device_add_up_to_its_used_bytes():
    found = tracks(FRAME, CounterTracks(0))
    assert found[10, "GPU 0 memory"] == {"live": 12 * GIB, "cached": 6 * GIB, "stranded": 0, "overhead": 2 * GIB}
    assert sum(size for shares in found.values() for size in shares.values()) == 30 * GIB
    base = int(SNAPSHOT.taken_at) - 1
    assert {entry["ts"] for entry in CounterTracks(base).counters(FRAME)} == {(SNAPSHOT.taken_at - base) * 1e6}


def test_a_share_or_program_that_is_gone_has_0_once():
    """The agent of 10 has left, and 11 has ended."""
    snapshot = make_snapshot(make_device(used_bytes=20 * GIB, processes=(make_process(10, 20 * GIB),)))
    later, known = Frame(snapshot, make_ledger(snapshot)), CounterTracks(0)
    tracks(FRAME, known)
    found = tracks(later, known)
    assert found[10, "GPU 0 memory"] == dict.fromkeys(("live", "cached", "stranded", "overhead"), 0) | {
        "opaque": 20 * GIB
    }
    assert set(found[11, "GPU 0 memory"].values()) == {0}
    assert sum(size for shares in found.values() for size in shares.values()) == 20 * GIB
    again = tracks(later, known)
    assert again[10, "GPU 0 memory"] == {"opaque": 20 * GIB}
    assert (11, "GPU 0 memory") not in again


def test_tracks_of_a_device_that_cannot_be_read_have_no_value():
    unread, known = make_snapshot(), CounterTracks(0)
    tracks(FRAME, known)
    assert tracks(Frame(unread, make_ledger(unread)), known) == {}


def test_each_program_is_named_once():
    known: set[int] = set()
    assert {entry["pid"] for entry in names(FRAME.ledger, known)} == {0, 10, 11}
    assert list(names(FRAME.ledger, known)) == []


def test_events_are_instants_of_their_program():
    connected = FLUSH | {"kind": "agent-connected"}
    (entry,) = instants([connected, FLUSH], 5)
    assert (entry["ph"], entry["pid"], entry["ts"]) == ("i", 10, 2.5e6)
    assert entry["args"] == {"summary": "flush of� train"}


def test_record_writes_a_whole_trace(tmp_path: Path):
    frame = busy_frame()
    with fake_daemon(frame) as fake:
        fake.answers["/api/v1/snapshot"] = (200, frame["snapshot"])
        fake.answers["/api/v1/events"] = (200, [FLUSH])
        out = tmp_path / "trace.json"
        assert main(["record", "--perfetto", str(out), "--for", "0.3s", "--url", fake.url]) == 0
    entries = json.loads(out.read_text())["traceEvents"]
    assert {entry["ph"] for entry in entries} == {"C", "M", "i"}


PROFILE = """
import sys, time, torch
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    print(time.time())
    torch.ones(1).add_(1)
    print(time.time())
profile.export_chrome_trace(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_times_are_those_of_the_profiler(tmp_path: Path):
    path = tmp_path / "torch.json"
    done = subprocess.run([sys.executable, "-c", PROFILE, str(path)], capture_output=True, text=True, check=True)
    before, after = map(float, done.stdout.split())
    trace = json.loads(path.read_text())
    base = trace_base_time(before)
    assert trace["baseTimeNanoseconds"] == base * 10**9
    (add,) = [entry for entry in trace["traceEvents"] if entry["name"] == "aten::add_"]
    assert before < base + add["ts"] / 1e6 < after
