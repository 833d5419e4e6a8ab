"""Traces for Perfetto: the tracks add up to the used bytes of a device, and events are instants."""

from __future__ import annotations

import json
from pathlib import Path

from gpumond.commands.main import main
from gpumond.facts.frame import Frame
from gpumond.facts.units import GIB
from gpumond.features.recordings.record import counters, instants, program_names as names
from gpumond.tick.ledger import attribute
from tests.helpers.frames import busy_frame, fake_daemon
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot

SNAPSHOT = make_snapshot(
    make_device(used_bytes=30 * GIB, processes=(make_process(10, 20 * GIB), make_process(11, 5 * GIB))),
    reports=(make_report(10, (make_pool(live=12 * GIB, cached=6 * GIB),)),),
)
FRAME = Frame(SNAPSHOT, attribute(SNAPSHOT))
FLUSH = {"id": 5, "kind": "flush", "at": 7.5, "pid": 10, "summary": "flush of\x1b train"}


def test_the_tracks_of_a_device_add_up_to_its_used_bytes():
    tracks = {(entry["pid"], entry["name"]): entry["args"] for entry in counters(FRAME)}
    assert tracks[10, "GPU 0 memory"] == {"live": 12 * GIB, "cached": 6 * GIB, "stranded": 0, "overhead": 2 * GIB}
    assert sum(size for shares in tracks.values() for size in shares.values()) == 30 * GIB
    assert {entry["ts"] for entry in counters(FRAME)} == {SNAPSHOT.taken_at * 1e6}


def test_each_program_is_named_once():
    known: set[int] = set()
    assert {entry["pid"] for entry in names(FRAME.ledger, known)} == {0, 10, 11}
    assert list(names(FRAME.ledger, known)) == []


def test_events_are_instants_of_their_program():
    connected = FLUSH | {"kind": "agent-connected"}
    (entry,) = instants([connected, FLUSH])
    assert (entry["ph"], entry["pid"], entry["ts"]) == ("i", 10, 7.5e6)
    assert entry["args"] == {"summary": "flush of? train"}


def test_record_writes_a_whole_trace(tmp_path: Path):
    frame = busy_frame()
    with fake_daemon(frame) as fake:
        fake.answers["/api/v1/snapshot"] = (200, frame["snapshot"])
        fake.answers["/api/v1/events"] = (200, [FLUSH])
        out = tmp_path / "trace.json"
        assert main(["record", "--perfetto", str(out), "--for", "0.3s", "--url", fake.url]) == 0
    entries = json.loads(out.read_text())["traceEvents"]
    assert {entry["ph"] for entry in entries} == {"C", "M", "i"}
