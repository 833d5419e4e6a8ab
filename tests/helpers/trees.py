"""Directory trees with the layout of /proc and /sys. Field names are the kernel's, values are invented."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

MIB = 1024**2

AMDGPU_FDINFO = """\
pos:	0
flags:	02100002
mnt_id:	24
ino:	1239
drm-driver:	amdgpu
drm-client-id:	{id}
drm-pdev:	{pci}
pasid:	32773
drm-total-cpu:	0
drm-shared-cpu:	0
drm-resident-cpu:	0
drm-total-gtt:	6 MiB
drm-resident-gtt:	6 MiB
drm-total-vram:	{total} KiB
drm-shared-vram:	0
drm-active-vram:	0
drm-resident-vram:	{used} KiB
drm-purgeable-vram:	0
drm-memory-vram:	{used} KiB
drm-memory-gtt: 	6144 KiB
drm-memory-cpu: 	0 KiB
amd-evicted-vram:	0 KiB
amd-requested-vram:	{total} KiB
drm-engine-gfx:	{busy} ns
drm-engine-compute:	0 ns
"""

I915_FDINFO = """\
pos:	0
flags:	0100002
mnt_id:	21
ino:	397
drm-driver:	i915
drm-client-id:	{id}
drm-pdev:	{pci}
drm-total-system0:	64 MiB
drm-shared-system0:	0
drm-active-system0:	0
drm-resident-system0:	64 MiB
drm-purgeable-system0:	0
drm-total-local0:	{total} KiB
drm-shared-local0:	0
drm-active-local0:	0
drm-resident-local0:	{used} KiB
drm-purgeable-local0:	0
drm-total-stolen-local0:	0
drm-resident-stolen-local0:	0
drm-engine-render:	0 ns
drm-engine-copy:	0 ns
drm-engine-video:	0 ns
drm-engine-capacity-video:	2
drm-engine-video-enhance:	0 ns
drm-engine-compute:	{busy} ns
drm-engine-capacity-compute:	4
"""

XE_FDINFO = """\
pos:    0
flags:  0100002
mnt_id: 26
ino:    685
drm-driver:     xe
drm-client-id:  {id}
drm-pdev:       {pci}
drm-total-system:       0
drm-resident-system:    0
drm-total-gtt:  192 KiB
drm-resident-gtt:       192 KiB
drm-total-vram0:        {total} KiB
drm-shared-vram0:       16 MiB
drm-active-vram0:       0
drm-resident-vram0:     {used} KiB
drm-total-stolen:       0
drm-resident-stolen:    0
drm-cycles-rcs: 0
drm-total-cycles-rcs:   {cycles}
drm-cycles-ccs: {busy}
drm-total-cycles-ccs:   {cycles}
drm-engine-capacity-ccs:        4
"""


class ProcTree:
    """Tree of /proc with pid 1, which every PID namespace has."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(exist_ok=True)
        self.add(1, "systemd", start_ticks=1, uid=0)

    def add(
        self,
        pid: int,
        comm: str = "python",
        *,
        start_ticks: int = 500,
        uid: int = 1000,
        state: str = "S",
        flags: int = 0x400000,
        parent: int = 1,
        session: int = 1,
        cgroup: str = "0::/user.slice\n",
        nodes: Mapping[int, tuple[str, str]] | None = None,
    ) -> Path:
        """Add or replace a process. ``nodes``: path and fdinfo by descriptor."""
        directory = self.root / str(pid)
        shutil.rmtree(directory, ignore_errors=True)
        for name in ("fd", "fdinfo"):
            (directory / name).mkdir(parents=True)
        fields = [
            state,
            str(parent),
            "1",
            str(session),
            "0",
            "-1",
            str(flags),
            *map(str, range(10, 22)),
            str(start_ticks),
            "0",
            "0",
        ]
        (directory / "stat").write_text(f"{pid} ({comm}) {' '.join(fields)}\n")
        (directory / "status").write_text(f"Name:\t{comm}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nGid:\t5\t6\t7\t8\n")
        (directory / "cgroup").write_text(cgroup)
        os.symlink("/dev/null", directory / "fd" / "0")
        for descriptor, (path, text) in (nodes or {}).items():
            os.symlink(path, directory / "fd" / str(descriptor))
            (directory / "fdinfo" / str(descriptor)).write_text(text)
        return directory

    def remove(self, pid: int) -> None:
        shutil.rmtree(self.root / str(pid))


class SysTree:
    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "class/drm").mkdir(parents=True)

    def write(self, directory: Path, files: Mapping[str, str | int]) -> None:
        for name, text in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    def device(self, pci: str, driver: str, number: int, files: Mapping[str, str | int]) -> Path:
        """Add a PCI device with its card and render nodes as in class/drm; ``number`` is the card's."""
        device = self.root / "devices/pci0000:00" / pci
        (self.root / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
        vendor = "0x1002" if driver == "amdgpu" else "0x8086"
        self.write(device, {"vendor": vendor, "device": "0x744c", "power/runtime_status": "active", **files})
        os.symlink(self.root / "bus/pci/drivers" / driver, device / "driver")
        for node in (f"card{number}", f"renderD{128 + number}", f"card{number}-DP-1"):
            directory = device / "drm" / node
            directory.mkdir(parents=True)
            os.symlink(device, directory / "device")
            os.symlink(directory, self.root / "class/drm" / node)
        return device

    def amdgpu(self, pci: str = "0000:03:00.0", number: int = 0, **files: str | int) -> Path:
        hwmon = {
            "name": "amdgpu",
            "temp1_input": 45000,
            "temp1_label": "edge",
            "temp2_input": 51000,
            "temp3_input": 60000,
        }
        hwmon |= {"power1_average": 87_000_000, "power1_cap": 300_000_000, "freq1_input": 2_124_000_000, "pwm1": 51}
        device = {
            "unique_id": "f1a2b3c4d5e60718",
            "product_name": "Radeon PRO W7900",
            "mem_info_vram_total": 1000 * MIB,
            "mem_info_vram_used": 400 * MIB,
            "mem_info_vram_vendor": "samsung",
            "gpu_busy_percent": 37,
            "mem_busy_percent": 12,
            "pp_dpm_mclk": "0: 96Mhz\n1: 456Mhz *\n2: 1249Mhz",
        }
        device |= {f"hwmon/hwmon4/{name}": text for name, text in hwmon.items()}
        return self.device(pci, "amdgpu", number, device | files)

    def i915(self, pci: str = "0000:04:00.0", number: int = 1, energy: int = 5_000_000) -> Path:
        device = self.device(
            pci,
            "i915",
            number,
            {"hwmon/hwmon5/name": "i915", "hwmon/hwmon5/energy1_input": energy, "hwmon/hwmon5/power1_max": 190_000_000},
        )
        self.write(device / f"drm/card{number}", {"gt_act_freq_mhz": 2400, "gt/gt0/rps_act_freq_mhz": 2350})
        return device

    def xe(self, pci: str = "0000:05:00.0", number: int = 2, vram: int = 2000 * MIB) -> Path:
        files = {"tile0/gt0/freq0/act_freq": 1200, "hwmon/hwmon6/name": "xe", "hwmon/hwmon6/energy1_input": 7_000_000}
        files |= {"hwmon/hwmon6/temp2_input": 47000, "hwmon/hwmon6/temp3_input": 52000}
        return self.device(pci, "xe", number, files | {"tile0/physical_vram_size_bytes": vram})

    def kfd(self, pid: int, used: int, gpu: int = 30381, location: int = 0x300) -> None:
        root = self.root / "class/kfd/kfd"
        self.write(root, {"topology/nodes/0/gpu_id": 0, "topology/nodes/0/properties": "cpu_cores_count 16"})
        properties = f"simd_count 192\nlocation_id {location}\ndomain 0\ndrm_render_minor 128"
        self.write(root, {"topology/nodes/1/gpu_id": gpu, "topology/nodes/1/properties": properties})
        self.write(root, {f"proc/{pid}/vram_{gpu}": used, f"proc/{pid}/pasid": 32770})


def amdgpu(id: int, used: int, total: int | None = None, busy: int = 0, pci: str = "0000:03:00.0") -> str:
    """Return the fdinfo of one client; sizes in MiB."""
    return AMDGPU_FDINFO.format(id=id, used=used * 1024, total=(total or used) * 1024, busy=busy, pci=pci)


def i915(id: int, used: int, busy: int = 0, pci: str = "0000:04:00.0") -> str:
    return I915_FDINFO.format(id=id, used=used * 1024, total=used * 2048, busy=busy, pci=pci)


def xe(id: int, used: int, busy: int = 0, cycles: int = 1, pci: str = "0000:05:00.0") -> str:
    return XE_FDINFO.format(id=id, used=used * 1024, total=used * 1024, busy=busy, cycles=cycles, pci=pci)
