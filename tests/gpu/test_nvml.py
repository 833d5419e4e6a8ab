"""The NVML source compared with nvidia-smi.

nvidia-smi runs between two readings of the source; its value is between theirs, within the stated tolerance.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

from gpumond.devices.nvml.source import NvmlSource
from gpumond.facts.errors import SourceUnavailable
from gpumond.facts.snapshot import DeviceReading

pytestmark = pytest.mark.gpu

MIB = 1 << 20
TOLERANCES = {
    # nvidia-smi's field: (field of the source, unit of nvidia-smi's number, tolerance in the source's unit)
    "memory.total": ("size_bytes", MIB, MIB),
    "memory.reserved": ("reserved_bytes", MIB, MIB),
    "memory.used": ("used_bytes", MIB, 64 * MIB),
    "memory.free": ("free_bytes", MIB, 64 * MIB),
    "utilization.gpu": ("gpu_utilization_ratio", 0.01, 0.2),
    "utilization.memory": ("memory_controller_utilization_ratio", 0.01, 0.2),
    "clocks.sm": ("sm_clock_hertz", 1e6, 300e6),
    "clocks.mem": ("memory_clock_hertz", 1e6, 300e6),
    "temperature.gpu": ("gpu_temperature_celsius", 1, 3),
    "power.draw": ("power_watts", 1, 30),
    "enforced.power.limit": ("power_limit_watts", 1, 1),
    "utilization.encoder": ("encoder_utilization_ratio", 0.01, 0.2),
    "utilization.decoder": ("decoder_utilization_ratio", 0.01, 0.2),
    "clocks.max.sm": ("sm_clock_max_hertz", 1e6, 0),
    "clocks.max.mem": ("memory_clock_max_hertz", 1e6, 0),
    "temperature.memory": ("memory_temperature_celsius", 1, 5),
    "fan.speed": ("fan_speed_ratio", 0.01, 0.1),
    "pcie.link.gen.current": ("pcie_generation", 1, 5),
    "pcie.link.gen.max": ("pcie_generation_max", 1, 0),
    "pcie.link.width.current": ("pcie_width", 1, 0),
    "pcie.link.width.max": ("pcie_width_max", 1, 0),
    "ecc.errors.corrected.volatile.total": ("ecc_corrected_volatile", 1, 0),
    "ecc.errors.uncorrected.aggregate.total": ("ecc_uncorrected_aggregate", 1, 0),
}


@pytest.fixture(scope="module")
def source() -> Iterator[NvmlSource]:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("needs an NVIDIA device and nvidia-smi")
    source = NvmlSource()
    try:
        source.open()
    except SourceUnavailable as error:
        pytest.skip(f"needs an NVIDIA device: {error}")
    for _ in range(8):  # slow sensors of many devices are spread over readings
        source.read()
    yield source
    source.close()


def smi(query: str, fields: Sequence[str]) -> list[dict[str, str]]:
    command = ["nvidia-smi", f"--query-{query}={','.join(fields)}", "--format=csv,noheader,nounits"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return [dict(zip(fields, line.split(", "), strict=True)) for line in output.splitlines()]


def devices(source: NvmlSource) -> dict[str, DeviceReading]:
    reading = source.read()
    assert not [fault for fault in reading.faults if fault.kind == "impossible_value"]
    return {device.uuid: device for device in reading.devices if device.parent_uuid is None}


def value(device: DeviceReading, field: str) -> float | None:
    found: float | None = getattr(device, field) if hasattr(device, field) else getattr(device.sensors, field)
    return found


def test_values_equal_those_of_nvidia_smi(source: NvmlSource) -> None:
    before = devices(source)
    rows = smi("gpu", ["uuid", "index", "name", "pci.bus_id", *TOLERANCES])
    after = devices(source)
    assert {row["uuid"] for row in rows} == before.keys()
    for row in rows:
        ours = after[row["uuid"]]
        assert (str(ours.index), ours.name, ours.pci_bus_id) == (row["index"], row["name"], row["pci.bus_id"])
        for smi_field, (field, unit, tolerance) in TOLERANCES.items():
            first, last = value(before[ours.uuid], field), value(ours, field)
            if not row[smi_field][:1].isdigit():
                assert last is None, f"{smi_field} is {row[smi_field]}"
                continue
            assert first is not None, smi_field
            assert last is not None, smi_field
            smi_value = float(row[smi_field]) * unit
            assert min(first, last) - tolerance <= smi_value <= max(first, last) + tolerance, smi_field


def test_parts_of_a_devices_memory_sum_to_its_size(source: NvmlSource) -> None:
    for device in devices(source).values():
        if device.size_bytes is not None and device.reserved_bytes is not None:
            assert device.used_bytes is not None
            assert device.free_bytes is not None
            parts = device.used_bytes + device.free_bytes + device.reserved_bytes
            assert abs(parts - device.size_bytes) <= 2 * MIB


HOLD = """
import cupy, sys
block = cupy.cuda.alloc({bytes})
print(cupy.cuda.Device().pci_bus_id, flush=True)
sys.stdin.read()
"""


def test_processes_equal_those_of_nvidia_smi(source: NvmlSource) -> None:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("needs CuPy to allocate on the device")
    size = 2048 * MIB
    before = devices(source)
    program = [sys.executable, "-c", HOLD.format(bytes=size)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        bus_id = holder.stdout.readline().strip()
        during = devices(source)
        rows = smi("compute-apps", ["gpu_uuid", "pid", "used_gpu_memory"])
        holder.communicate()
    (uuid,) = [device.uuid for device in during.values() if device.pci_bus_id.endswith(bus_id[-10:])]
    grown = (during[uuid].used_bytes or 0) - (before[uuid].used_bytes or 0)
    assert grown >= size
    ours = {
        (device.uuid, process.pid): process.used_bytes
        for device in during.values()
        for process in device.processes or ()
        if "compute" in process.kinds
    }
    assert {(row["gpu_uuid"], int(row["pid"])) for row in rows} == ours.keys()
    for row in rows:
        used = ours[row["gpu_uuid"], int(row["pid"])]
        if row["used_gpu_memory"].isdigit():
            assert used is not None
            assert abs(used - int(row["used_gpu_memory"]) * MIB) <= MIB
    if (uuid, holder.pid) in ours:  # not if the driver reports pids of another namespace, or none
        assert (ours[uuid, holder.pid] or 0) >= size


USE = """
import ctypes, sys, time
cuda, device, context, block = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
assert not cuda.cuInit(0) and not cuda.cuDeviceGet(ctypes.byref(device), 0)
assert not cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device)
assert not cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(1 << 30))
print("ready", flush=True)
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    assert not cuda.cuMemsetD8_v2(block, ctypes.c_ubyte(1), ctypes.c_size_t(1 << 30)) and not cuda.cuCtxSynchronize()
sys.stdin.read()
"""


def test_utilization_distinguishes_active_from_idle_processes(source: NvmlSource) -> None:
    """One program writes its memory for four seconds, the other one only holds its own."""
    now = [0.0]
    own = NvmlSource(clock=lambda: now[0])
    own.open()
    programs = [
        subprocess.Popen([sys.executable, "-c", USE, seconds], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for seconds in ("0", "4")
    ]
    try:
        for program in programs:
            assert program.stdout
            assert program.stdout.readline() == "ready\n"
        time.sleep(1)  # the utilization of their allocation is over
        own.read()
        time.sleep(3)
        now[0] += 11.0
        reading = own.read()
    finally:
        for program in programs:
            program.communicate()
        own.close()
    assert not reading.faults
    ratios = {p.pid: p.utilization_ratio for device in reading.devices for p in device.processes or ()}
    idle, busy = (ratios.get(program.pid) for program in programs)
    if idle is None or busy is None:
        pytest.skip("this driver does not tell processes apart, or says pids of another namespace")
    assert (idle, busy > 0.3) == (0.0, True)
    active = [device.sensors.sm_active_ratio for device in reading.devices]
    if any(ratio is not None for ratio in active):
        assert max(ratio or 0.0 for ratio in active) > 0.3
