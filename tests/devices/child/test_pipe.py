"""A reading is the same on both ends of the pipe, whatever changed since the previous one."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from gpumond.devices.child.pipe import ReadingCodec, ReadResponse
from gpumond.facts.errors import ProtocolError
from gpumond.facts.messages import from_json, to_json
from gpumond.facts.snapshot import DeviceReading, ProcessUsage, Reading

processes = st.builds(
    ProcessUsage,
    pid=st.integers(1, 5),
    start_ticks=st.sampled_from([None, 1, 2]),
    used_bytes=st.sampled_from([None, 0, 7]),
    comm=st.sampled_from([None, "python"]),
)
devices = st.builds(
    DeviceReading,
    uuid=st.sampled_from(["GPU-a", "GPU-b", "GPU-c"]),
    index=st.integers(0, 3),
    processes=st.none() | st.lists(processes, max_size=4, unique_by=lambda process: process.pid).map(tuple),
)
readings = st.builds(Reading, devices=st.lists(devices, max_size=3, unique_by=lambda device: device.uuid).map(tuple))


def test_only_changed_processes_are_sent():
    sender, receiver = ReadingCodec(), ReadingCodec()
    first, second = (ProcessUsage(pid=pid, start_ticks=1, used_bytes=1) for pid in (1, 2))
    grown = ProcessUsage(pid=2, start_ticks=1, used_bytes=2)
    before = receiver.decode(*sender.encode(reading(first, second)))
    changed, pids = sender.encode(reading(first, grown))
    assert changed.devices[0].processes == (grown,)
    assert pids == ((1, 2),)
    after = receiver.decode(changed, pids)
    assert after == reading(first, grown)
    assert (after.devices[0].processes or ())[0] is (before.devices[0].processes or ())[0]


@given(st.lists(readings, max_size=6))
def test_readings_of_any_sequence_arrive_unchanged(sequence: list[Reading]):
    sender, receiver = ReadingCodec(), ReadingCodec()
    for sent in sequence:
        answer = from_json(ReadResponse, to_json(ReadResponse(*sender.encode(sent))))
        assert answer.reading is not None
        assert receiver.decode(answer.reading, answer.pids) == sent


@pytest.mark.parametrize("pids", [((3,),), ((1,), (2,)), ()])
def test_reading_with_an_unknown_process_is_rejected(pids: tuple[tuple[int, ...], ...]):
    receiver = ReadingCodec()
    with pytest.raises(ProtocolError):
        receiver.decode(reading(ProcessUsage(pid=1, start_ticks=1, used_bytes=1)), pids)


def reading(*listed: ProcessUsage) -> Reading:
    return Reading(devices=(DeviceReading(uuid="GPU-a", index=0, processes=listed),))
