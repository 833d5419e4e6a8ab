from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumond.devices.sim import SimSource
from gpumond.facts.errors import SourceUnavailable
from gpumond.sim.device import MIB
from tests.helpers.holding import holder, small_device


@pytest.fixture
def source(tmp_path: Path) -> Iterator[SimSource]:
    source = SimSource({"GPUMOND_SIM_DIR": str(tmp_path)})
    source.open()
    yield source
    source.close()


@pytest.mark.parametrize(("environ", "reason"), [({}, "unset"), ({"GPUMOND_SIM_DIR": "/nowhere"}, "missing")])
def test_missing_directory_has_a_remedy(environ: dict[str, str], reason: str) -> None:
    with pytest.raises(SourceUnavailable, match="gpumond demo") as caught:
        SimSource(environ).open()
    assert caught.value.reason == reason


def test_devices_and_processes_are_read(source: SimSource, tmp_path: Path) -> None:
    small_device(tmp_path, "SIM-b", index=0)
    with holder(small_device(tmp_path, "SIM-a", index=1), 100 * MIB) as process:
        reading = source.read()
    assert [(d.index, d.uuid, d.vendor, d.used_bytes) for d in reading.devices] == [
        (0, "SIM-b", "sim", 0),
        (1, "SIM-a", "sim", 116 * MIB),
    ]
    processes = reading.devices[1].processes
    assert processes is not None
    assert [(p.pid, p.used_bytes, p.uid) for p in processes] == [(process.pid, 116 * MIB, os.getuid())]
    assert processes[0].comm
    assert (processes[0].command or "").startswith("python")
    assert reading.faults == ()


def test_damaged_device_is_a_fault_and_the_others_are_read(source: SimSource, tmp_path: Path) -> None:
    good, bad = small_device(tmp_path, "SIM-good"), small_device(tmp_path, "SIM-bad")
    source.read()
    (bad.directory / "card.json").write_text("{")
    reading = source.read()
    assert [device.uuid for device in reading.devices] == [good.spec().uuid]
    assert [(fault.source, fault.kind, fault.device_uuid) for fault in reading.faults] == [
        ("sim", "damaged", "SIM-bad")
    ]


def test_removed_device_is_lost(source: SimSource, tmp_path: Path) -> None:
    device = small_device(tmp_path, "SIM-gone")
    source.read()
    shutil.rmtree(device.directory)
    for _ in range(2):
        reading = source.read()
        assert reading.devices == ()
        assert [(fault.kind, fault.device_uuid) for fault in reading.faults] == [("lost", "SIM-gone")]
