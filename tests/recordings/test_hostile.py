"""Files with any content give snapshots or a ConfigError, and time always advances."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from gpumond.facts.errors import ConfigError
from gpumond.facts.messages import from_json, to_json
from gpumond.facts.snapshot import Snapshot
from gpumond.features.recordings.formats import FORMATS
from tests.helpers.values import make_device, make_snapshot
from tests.recordings.reading import read
from tests.recordings.samples import (
    DMON,
    HEADER as SENSORS,
    PROCESSES,
    ROWS as SENSOR_ROWS,
    WITH_UNITS,
    answer,
    date,
    process,
    series,
    table,
)

LOGS = (
    WITH_UNITS,
    PROCESSES,
    table(5, process(7, "4MiB"), at=date(0)) + table(6, at=date(1)),
    "time,gpu_id,memory_used_mib,mem_allocated_gb,utilization_gpu_pct\n0,1,5.5,0.001,7\n1,1,6,,8\n",
    "time,uuid,pid,used_bytes,live_bytes,held_bytes,size_bytes,utilization\n0,a,7,5,1,2,9,0.5\n1,a,,6,,,,\n",
    answer(series("", 5, 6, uuid="GPU-a", pid="7"), series("DCGM_FI_DEV_FB_FREE", 5, UUID="GPU-a")),
    (to_json(make_snapshot(make_device())) + b"\n").decode(),
    DMON,
    "#Time gpu pid fb command\n 23:59:59 0 7 5 a b\n 00:00:00 0 7 6 a b\n 00:00:00 1 - - -\n",
    "#Entity FBUSD GPUTL\nID\nGPU 0 5 7\nGPU-I 1 5 7\nGPU 0 6 N/A\n",
    SENSORS + SENSOR_ROWS,
)
PIECES = st.sampled_from(
    [
        b",",
        b"\n",
        b" ",
        b"-1",
        b"1e400",
        b"NaN",
        b"\x00",
        b"\xff",
        b'"',
        b"{",
        b"]",
        b"null",
        b"9" * 400,
        b"MiB",
        b"\xd9\xa3",
        b"2024/",
    ]
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = draw(st.sampled_from(LOGS)).encode() * draw(st.integers(1, 2))
    for _ in range(draw(st.integers(1, 5))):
        at, length = draw(st.integers(0, len(data))), draw(st.integers(0, 8))
        data = data[:at] + draw(PIECES) + data[at + length :]
    return data


@pytest.mark.parametrize("format_name", ["auto", *(each.name for each in FORMATS)])
@given(data=st.one_of(damaged(), st.binary(max_size=200)))
def test_arbitrary_file_is_read_or_refused(format_name: str, data: bytes):
    try:
        snapshots = read(data, format_name)
    except ConfigError:
        return
    for snapshot in snapshots:
        assert from_json(Snapshot, to_json(snapshot)) == snapshot
    assert all(one.elapsed_seconds < other.elapsed_seconds for one, other in pairwise(snapshots))
