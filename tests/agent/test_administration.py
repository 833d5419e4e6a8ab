"""Requests of an administrator: classes of live bytes, recordings of the history, and the files of snapshots."""

from __future__ import annotations

import base64
import json
import math
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from gpumond.agent.requests import MAX_ENCODED_BYTES, RequestHandler, supported_requests
from gpumond.agent.settings import AgentSettings
from gpumond.facts.messages import MAX_MESSAGE_BYTES, AgentRequest, AgentResponse, encode
from gpumond.facts.pools import FlushPolicy
from gpumond.facts.program import Dump
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import MIB
from tests.helpers.agent_daemon import FAKES, FakeDaemon, environment, finished, host

SETTINGS = AgentSettings([], [])


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RequestHandler:
    monkeypatch.setenv("XDG_STATE_HOME", os.fspath(tmp_path))
    return RequestHandler(SETTINGS)


def whole(handler: RequestHandler, number: int) -> bytes:
    """Return a file from its parts."""
    content = b""
    while True:
        answer = handler.respond(AgentRequest("x", "fetch", snapshot_id=number, offset=len(content)))
        assert len(encode(answer)) < MAX_MESSAGE_BYTES
        part = zlib.decompress(base64.b64decode("".join(answer.part)))
        assert len(part) == answer.part_bytes
        content += part
        if len(content) == answer.file_bytes:
            return content
        assert part


def test_file_of_a_snapshot_is_sent_in_parts(allocator: CachingAllocator, handler: RequestHandler):
    for _ in range(20):
        allocator.malloc(2 * MIB)
    dump = handler.respond(AgentRequest("x", "snapshot")).dump
    assert dump is not None
    assert dump.path is not None
    assert dump.id == 1
    assert whole(handler, 1) == Path(dump.path).read_bytes()


def test_memory_that_is_not_live_is_stated_instead_of_its_classes(allocator: CachingAllocator):
    def reason() -> str:
        return RequestHandler(SETTINGS).respond(AgentRequest("x", "classes")).reason

    assert reason() == "the program's allocators hold no memory on a device, so there is nothing to classify"
    allocator.free(allocator.malloc(300 * MIB))
    assert reason() == "the program's allocators hold 300.0 MiB, and none of it is live: only live memory is classified"


def test_parts_of_any_content_are_bounded(handler: RequestHandler):
    noise = os.urandom(700_000)

    def fill(path: str) -> None:
        with open(path, "wb") as file:
            file.write(noise)

    dump = handler._snapshots.save("train", ".bin", "torch", fill)
    assert dump.id is not None
    assert whole(handler, dump.id) == noise
    answer = handler.respond(AgentRequest("x", "fetch", snapshot_id=dump.id))
    assert sum(map(len, answer.part)) <= MAX_ENCODED_BYTES
    after_the_end = AgentRequest("x", "fetch", snapshot_id=dump.id, offset=2**62)
    assert handler.respond(after_the_end).part_bytes == 0


@pytest.mark.parametrize("number", [None, 0, 5])
def test_unknown_snapshot_is_refused_with_those_that_are_kept(handler: RequestHandler, number: int | None):
    answer = handler.respond(AgentRequest("x", "fetch", snapshot_id=number))
    assert (answer.part, answer.file_bytes) == ((), None)
    assert "available: none" in answer.reason


def test_only_files_of_snapshots_are_sent(handler: RequestHandler, tmp_path: Path):
    """A link that replaced a file is not followed."""
    dump = handler._snapshots.save("train", ".bin", "torch", lambda path: Path(path).write_bytes(b"1"))
    assert dump.path is not None
    Path(dump.path).unlink()
    Path(dump.path).symlink_to("/etc/hostname")
    assert handler.respond(AgentRequest("x", "fetch", snapshot_id=dump.id)).part == ()


def test_all_requests_but_the_limit_are_answered_without_permission():
    kinds = ("snapshot", "classes", "fetch", "retainers")
    assert supported_requests(allow_limit=False, can_end=False) == kinds
    assert supported_requests(allow_limit=True, can_end=True) == ("limit", *kinds, "end")


def test_repeated_request_gets_the_last_result_with_its_age(allocator: CachingAllocator, handler: RequestHandler):
    first = handler.respond(AgentRequest("x", "classes"))
    again = handler.respond(AgentRequest("y", "classes"))
    assert (first.age_seconds, again.id, again.reason) == (0.0, "y", first.reason)
    assert 0.0 < again.age_seconds < 60.0


def test_recording_is_refused_before_an_allocation_and_by_the_policy(
    handler: RequestHandler, monkeypatch: pytest.MonkeyPatch
):
    request = AgentRequest("x", "classes", record_seconds=1.0)
    refused = handler.start_recording(request)
    assert refused is not None
    assert refused.reason == "sim: nothing has been allocated yet"
    policies: tuple[FlushPolicy, ...] = ("step", "never")
    for policy in policies:
        monkeypatch.setattr(SETTINGS, "flush_policy", policy)
        refused = handler.start_recording(request)
        assert refused is not None
        assert f"flush_policy is {policy}" in refused.reason


def test_recording_that_ends_without_live_memory_says_so(allocator: CachingAllocator, handler: RequestHandler):
    block = allocator.malloc(2 * MIB)
    assert handler.start_recording(AgentRequest("x", "classes", record_seconds=60.0)) is None
    allocator.free(block)
    answer = handler.finish_due_recording(math.inf)
    assert answer is not None
    assert (answer.sites, answer.classes) == ((), ())
    assert "none of it is live" in answer.reason


RECORDING = """
import json, pickle, time, torch
from gpumond.agent.requests import RequestHandler
from gpumond.agent.settings import AgentSettings
from gpumond.facts.messages import AgentRequest, encode
from torch.world import ACTIVE, FREE, WORLD, Segment
WORLD.reset(segments=[Segment([(4 << 20, ACTIVE), (2 << 20, ACTIVE), (1 << 20, FREE), (8 << 20, ACTIVE)])])
plain = WORLD.snapshot
def snapshot():
    segments = plain()
    own = {"filename": "/home/a/train.py", "line": 31, "name": "step"}
    other = [{"filename": file, "line": 9, "name": "cpp"} for file in ("??", "/torch/csrc/python.cpp", "<frozen os>")]
    frames = [*other, own]
    for block in segments[0]["blocks"][:2]:
        block["frames"] = frames
    return segments
WORLD.snapshot = snapshot
handler = RequestHandler(AgentSettings([], []))
request = AgentRequest("one", "snapshot", record_seconds=60.0)
now = time.monotonic()
print(handler.start_recording(request), torch._C._cuda_isHistoryEnabled())
print(handler.start_recording(request).reason)
print(handler.finish_due_recording(now + 50.0), torch._C._cuda_isHistoryEnabled())
found = handler.finish_due_recording(now + 70.0)
print(torch._C._cuda_isHistoryEnabled(), handler.finish_due_recording(now + 80.0))
print(json.dumps([found.id, found.unrecorded_bytes, found.dump.path, found.folded.path, len(encode(found))]))
(site,) = found.sites
print(site.size_bytes, site.blocks, *site.calls)
print(pickle.load(open(found.dump.path, "rb"))["segments"][0]["total_size"])
print(handler.start_recording(request))
handler.cancel_recording()
print(torch._C._cuda_isHistoryEnabled(), [call for call in WORLD.calls if call.startswith("record")][0])
WORLD.records_history = True
print(handler.start_recording(request).reason)
"""


def test_history_is_on_for_the_requested_time_and_then_off(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", RECORDING],
        env=environment("/nowhere", FAKES, XDG_STATE_HOME=os.fspath(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:4] == ["None True", "a recording is already in progress", "None True", "False None"]
    name, unrecorded, pickle, folded, size = json.loads(lines[4])
    assert (name, unrecorded) == ("one", 8 * MIB)
    assert size < MAX_MESSAGE_BYTES
    assert lines[5] == f"{6 * MIB} 2 Call(file='/home/a/train.py', line=31, function='step')"
    assert lines[6] == str(15 * MIB)
    assert Path(folded).read_text().splitlines() == [
        f"step (/home/a/train.py:31) {6 * MIB}",
        f"allocated before the recording {8 * MIB}",
    ]
    assert (Path(pickle).suffix, Path(folded).suffix) == (".pickle", ".folded")
    assert lines[7] == "None"
    assert lines[8].startswith("False record all [('context', 'all'), ('max_entries', 10000), ('stacks', 'python')]")
    assert "the program records its memory history" in lines[9]


STEPPING = """
import sys, torch
from torch.world import ACTIVE, WORLD, Segment
WORLD.reset(segments=[Segment([(4 << 20, ACTIVE)])])
import gpumond.agent as agent
agent.start(flush_policy="step")
for line in sys.stdin:
    agent.step()
    print("stepped", flush=True)
"""


def test_program_with_policy_step_is_interrupted_in_its_steps_only(daemon: FakeDaemon):
    """The fake has no classes of tensors: the answer has no classes, but it is that of the step."""
    with host(STEPPING, environment(daemon.path, FAKES)) as process:
        peer = daemon.wait_peer(process.pid)
        peer.send(AgentRequest("recorded", "classes", record_seconds=1.0), AgentRequest("one", "classes"))
        answer = daemon.wait_message(AgentResponse)
        assert (answer.id, "flush_policy is step" in answer.reason) == ("recorded", True)
        assert process.stdin is not None
        assert process.stdout is not None
        while "one" not in {each.id for each in daemon.received(AgentResponse)}:
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdout.readline()
        answer = daemon.wait_message(AgentResponse)
        assert "this version of PyTorch isn't supported" in answer.reason
        finished(process)


def test_failed_file_has_a_reason(handler: RequestHandler):
    def fill(path: str) -> None:
        raise RuntimeError("of the\nlibrary")

    dump = handler._snapshots.save("train", ".bin", "torch", fill)
    assert dump == Dump("torch", None, 0, "RuntimeError: of the\N{REPLACEMENT CHARACTER}library")
