from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpumond.devices.process.metadata import ProcessMetadata, parse_placement
from gpumond.facts.snapshot import DeviceReading, ProcessUsage, Reading
from gpumond.sim.device import MIB
from tests.helpers.agents import GIB
from tests.helpers.holding import holder, small_device
from tests.helpers.running import until
from tests.helpers.trees import ProcTree, SysTree
from tests.helpers.values import make_device, make_process

A, B = "a1" * 32, "b2" * 32
NODE = "/dev/nvidia0"


class Host:
    def __init__(self, root: Path, **options: Any) -> None:
        self.root, self.now = root, 0.0
        self.proc, self.sys = ProcTree(root / "proc"), SysTree(root / "sys")
        (root / "dev/dri").mkdir(parents=True)
        places = {name: str(root / name) for name in ("proc", "sys", "dev")}
        self.owners = ProcessMetadata(
            **places, root=str(root), clock=lambda: self.now, **{"is_private": False} | options
        )

    def complete(self, *devices: DeviceReading) -> tuple[DeviceReading, ...]:
        return self.owners.complete(Reading(devices=devices)).devices

    def process(self, process: ProcessUsage, **fields: Any) -> ProcessUsage:
        (device,) = self.complete(make_device(processes=(process,), used_bytes=GIB, **fields))
        (completed,) = device.processes or ()
        return completed


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_process_in_a_container_is_named(host: Host):
    file = host.root / f"var/lib/docker/containers/{A}/config.v2.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"Name": "/training"}))
    host.proc.add(7, start_ticks=100, cgroup=f"0::/system.slice/docker-{A}.scope\n")
    process = host.process(make_process(7))
    assert (process.container, process.container_name, process.unit, process.state) == (A, "training", None, "alive")


def test_pod_unit_and_job_are_named(host: Host):
    pod = "2c48913c-b29f-11e7-9350-020968147796"
    (host.root / f"var/log/pods/research_llama-0_{pod}").mkdir(parents=True)
    host.proc.add(7, start_ticks=100, cgroup=f"0::/kubepods/burstable/pod{pod}/{A}\n")
    process = host.process(make_process(7))
    assert (process.container, process.pod_name, process.pod_namespace) == (A, "llama-0", "research")
    assert process.pod_uid == pod
    host.proc.add(8, start_ticks=100, cgroup="0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n")
    process = host.process(make_process(8))
    assert (process.unit, process.slurm_job, process.container) == ("slurmstepd.scope", "4711", None)


@pytest.mark.parametrize(
    ("letter", "state"),
    [("S", "alive"), ("R", "alive"), ("I", "alive"), ("Z", "zombie"), ("T", "stopped")],
)
def test_state_of_a_process_is_shown(host: Host, letter: str, state: str):
    host.proc.add(7, start_ticks=100, state=letter)
    assert host.process(make_process(7)).state == state


def test_process_is_uninterruptible_after_a_while_in_that_state(host: Host):
    directory = host.proc.add(7, start_ticks=100, state="D")
    states = []
    for _ in range(3):
        states.append(host.process(make_process(7)).state)
        host.now += 6.0
    (directory / "stat").write_text((directory / "stat").read_text().replace(") D", ") S"))
    assert [*states, host.process(make_process(7)).state] == ["alive", "alive", "uninterruptible", "alive"]


def test_missing_pid_is_gone(host: Host):
    assert host.process(make_process(7, start_ticks=None)).state == "gone"


def test_real_zombie_is_a_zombie():
    """Reads the kernel's own files for a child that exited and was not reaped."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    start_ticks = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    device = make_device(used_bytes=GIB, processes=(make_process(child.pid, start_ticks=start_ticks),))
    (completed,) = ProcessMetadata().complete(Reading(devices=(device,))).devices
    assert [process.state for process in completed.processes or ()] == ["zombie"]
    child.wait()


def test_real_stopped_process_is_stopped():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        start_ticks = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        device = make_device(used_bytes=GIB, processes=(make_process(child.pid, start_ticks=start_ticks),))
        (completed,) = ProcessMetadata().complete(Reading(devices=(device,))).devices
        assert [process.state for process in completed.processes or ()] == ["stopped"]
        child.send_signal(signal.SIGCONT)
        child.communicate(b"\n")


def test_collectors_child_completes_its_readings(tmp_path: Path):
    with holder(small_device(tmp_path, "SIM-a"), 100 * MIB) as process, (tmp_path / "place").open("w+b") as place:
        done = subprocess.run(
            [sys.executable, "-m", "gpumond.devices.child.worker", str(place.fileno()), "sim"],
            input="{}\n",
            pass_fds=(place.fileno(),),
            env={**os.environ, "GPUMOND_SIM_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
    reading = json.loads(done.stdout.splitlines()[1])["reading"]
    assert [(p["pid"], p["state"]) for p in reading["devices"][0]["processes"]] == [(process.pid, "alive")]


def test_reused_pid_gets_its_own_container(host: Host):
    host.proc.add(7, start_ticks=100, cgroup=f"0::/docker/{A}\n")
    assert host.process(make_process(7)).container == A
    host.proc.add(7, start_ticks=200, cgroup=f"0::/docker/{B}\n")
    stale = host.process(make_process(7, start_ticks=100))
    assert (stale.container, stale.state) == (None, None)
    assert host.process(make_process(7, start_ticks=200)).container == B


def test_pids_are_never_confused(host: Host):
    """10 000 processes with five pids, each in a container of its own."""
    chance = random.Random(1)
    processes: dict[int, tuple[int, str]] = {}
    for number in range(10_000):
        pid = 10 + chance.randrange(5)
        if chance.random() < 0.2 or pid not in processes:
            processes[pid] = (number + 1000, f"{number:064x}")
            directory = host.proc.root / str(pid)
            if directory.exists():
                stat = (directory / "stat").read_text().split()
                stat[21] = str(number + 1000)
                (directory / "stat").write_text(" ".join(stat))
                (directory / "cgroup").write_text(f"0::/docker/{processes[pid][1]}\n")
            else:
                host.proc.add(pid, start_ticks=number + 1000, cgroup=f"0::/docker/{processes[pid][1]}\n")
        start_ticks, container = processes[pid]
        listed = start_ticks if chance.random() < 0.9 else start_ticks - 1
        found = host.process(make_process(pid, start_ticks=listed)).container
        assert found == (container if listed == start_ticks else None)


def test_places_are_looked_up_once_and_refreshed_periodically(host: Host):
    directory = host.proc.add(7, start_ticks=100, cgroup=f"0::/docker/{A}\n")
    host.process(make_process(7))
    (directory / "cgroup").write_text(f"0::/docker/{B}\n")
    assert host.process(make_process(7)).container == A
    host.now += 31.0
    assert host.process(make_process(7)).container == B


def test_private_pid_namespace_accepts_only_processes_with_the_device_open(tmp_path: Path):
    host = Host(tmp_path, is_private=True)
    host.proc.add(7, start_ticks=100, cgroup=f"0::/docker/{A}\n")
    listed = make_process(7, comm="sshd", uid=0, user="root")
    other = host.process(listed)
    assert (other.start_ticks, other.comm, other.uid, other.container, other.state) == (None,) * 5
    assert other.used_bytes == GIB
    assert host.process(listed, vendor="sim").container == A
    host.proc.add(7, start_ticks=100, cgroup=f"0::/docker/{A}\n", nodes={3: (NODE, "")})
    assert host.process(listed).container == A
    assert host.process(make_process(99, start_ticks=None)).state is None


@pytest.mark.parametrize(("around", "shown"), [([], "itself"), (["unshare", "--pid", "--fork", "--mount-proc"], None)])
def test_private_pid_namespace_is_noticed(tmp_path: Path, around: list[str], shown: str | None):
    (tmp_path / "nvidiactl").touch()
    if around and subprocess.run([*around, "true"], capture_output=True).returncode:
        pytest.skip("no new PID namespace may be made here")
    program = (
        "import os, sys; from gpumond.facts.snapshot import *\n"
        "from gpumond.devices.process.metadata import ProcessMetadata\n"
        "from gpumond.host.machine import read_process_stat\n"
        "started = read_process_stat('/proc', os.getpid()).start_ticks\n"
        "listed = ProcessUsage(pid=os.getpid(), start_ticks=started, used_bytes=1, comm='itself')\n"
        "device = DeviceReading(uuid='GPU-a', index=0, processes=(listed,))\n"
        "owners = ProcessMetadata(dev=sys.argv[1])\n"
        "(device,) = owners.complete(Reading(devices=(device,))).devices\n"
        "print(device.processes[0].comm)"
    )
    command = [*around, sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{shown}\n"


SESSION = "0::/user.slice/user-1000.slice/session-3.scope\n"


@pytest.mark.parametrize(
    ("parents", "cgroup", "orphaned"),
    [
        ({5: 5}, SESSION, False),  # a parent of the same session, which leads it
        ({5: 4}, SESSION, False),
        ({1: 1}, SESSION, True),
        ({900: 800}, SESSION, True),  # a subreaper: a user's systemd, a container's shim
        ({1: 1}, f"0::/docker/{A}\n", True),
        ({1: 1}, "0::/system.slice/nvidia-persistenced.service\n", False),
        ({1: 1}, "0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-x.scope\n", False),
        ({}, SESSION, None),  # a parent of another PID namespace
    ],
)
def test_process_with_a_reaper_as_parent_is_an_orphan(
    host: Host, parents: dict[int, int], cgroup: str, orphaned: bool | None
):
    parent, session = next(iter(parents.items()), (0, 4))
    host.proc.add(7, start_ticks=100, parent=parent, session=4 if parent != 5 else session, cgroup=cgroup)
    for pid, its_session in parents.items():
        host.proc.add(pid, session=its_session)
    assert host.process(make_process(7)).orphaned is orphaned


def test_session_leader_is_no_orphan(host: Host):
    host.proc.add(1, session=1)
    host.proc.add(7, start_ticks=100, parent=1, session=7, cgroup=SESSION)
    assert host.process(make_process(7)).orphaned is False


def test_process_becomes_an_orphan_when_its_parent_ends(host: Host):
    host.proc.add(1, session=1)
    host.proc.add(5, session=4)
    host.proc.add(7, start_ticks=100, parent=5, session=4, cgroup=SESSION)
    assert host.process(make_process(7)).orphaned is False
    host.proc.add(7, start_ticks=100, parent=1, session=4, cgroup=SESSION)
    assert host.process(make_process(7)).orphaned is True


def test_holder_of_the_device_may_be_an_orphan(host: Host):
    nvidia(host)
    host.proc.add(1, session=1)
    host.proc.add(7, session=4, cgroup=SESSION, nodes={3: (NODE, "")})
    (device,) = host.complete(orphaned())
    assert [(p.kinds, p.orphaned) for p in device.processes or ()] == [(("holder",), True)]


def test_real_orphan_is_an_orphan(tmp_path: Path):
    """A session leader starts two programs and exits; one of them has created its own session."""
    program = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    script = f"exec 3<&0; {sys.executable} -c '{program}' <&3 & setsid {sys.executable} -c '{program}' <&3 & exit 0"
    read, write = os.pipe()
    with open(tmp_path / "pids", "w+b") as pids_file, os.fdopen(write, "wb"):
        with os.fdopen(read, "rb") as stdin:
            subprocess.run(["sh", "-c", script], stdin=stdin, stdout=pids_file, start_new_session=True, check=True)
        until(lambda: (tmp_path / "pids").read_text().count("\n") == 2)
        pids = [int(line) for line in (tmp_path / "pids").read_text().splitlines()]
        ticks = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) for pid in pids}
        listed = tuple(make_process(pid, start_ticks=ticks[pid]) for pid in pids)
        (device,) = (
            ProcessMetadata(dev=str(tmp_path))
            .complete(Reading(devices=(make_device(used_bytes=GIB, processes=listed),)))
            .devices
        )
        leads = {pid: os.getsid(pid) == pid for pid in pids}
        unit = parse_placement(Path("/proc/self/cgroup").read_text()).unit
        kept = unit is not None and not unit.startswith("session-")  # the service that runs the tests adopts it
        assert {p.pid: p.orphaned for p in device.processes or ()} == {pid: not (leads[pid] or kept) for pid in pids}
        assert sorted(leads.values()) == [False, True]


def nvidia(host: Host, minor: int = 0, pci: str = "0000:3b:00.0") -> None:
    directory = host.proc.root / "driver/nvidia/gpus" / pci
    directory.mkdir(parents=True)
    (directory / "information").write_text(f"Model: \t\t NVIDIA H100\nIRQ:   \t\t 42\nDevice Minor: \t {minor}\n")


def orphaned(**fields: Any) -> DeviceReading:
    return make_device(**{"used_bytes": 40 * GIB, "pci_bus_id": "00000000:3B:00.0", "processes": ()} | fields)


def holders(device: DeviceReading) -> list[int]:
    return [process.pid for process in device.processes or () if process.kinds == ("holder",)]


def test_holders_are_listed_while_memory_is_unattributed(host: Host):
    nvidia(host)
    nvidia(host, 1, "0000:af:00.0")
    host.proc.add(7, "python", start_ticks=100, cgroup=f"0::/docker/{A}\n", nodes={3: (NODE, ""), 4: (NODE, "")})
    host.proc.add(8, nodes={3: ("/dev/nvidia1", "")})
    host.proc.add(9, nodes={3: ("/dev/nvidiactl", "")})
    (device,) = host.complete(orphaned())
    (holder,) = device.processes or ()
    assert holder == ProcessUsage(
        pid=7,
        start_ticks=100,
        used_bytes=None,
        kinds=("holder",),
        comm="python",
        uid=1000,
        user=holder.user,
        container=A,
        state="alive",
        orphaned=False,
    )


def test_nodes_of_amd_and_intel_are_searched(host: Host):
    host.sys.amdgpu(pci="0000:03:00.0")
    host.proc.add(7, nodes={3: ("/dev/dri/renderD128", "")})
    assert holders(host.complete(orphaned(pci_bus_id="0000:03:00.0"))[0]) == [7]


@pytest.mark.parametrize(
    "fields",
    [
        {"used_bytes": 4 * GIB},
        {"used_bytes": None},
        {"size_bytes": None},
        {"unified": True},
        {"processes": (make_process(8, 37 * GIB),)},
        {"processes": (make_process(8, None),)},
    ],
)
def test_holders_are_not_searched_without_unattributed_memory(host: Host, fields: dict[str, Any]):
    nvidia(host)
    host.proc.add(7, nodes={3: (NODE, "")})
    assert holders(host.complete(orphaned(**fields))[0]) == []


def test_processes_listed_by_the_driver_are_no_holders(host: Host):
    nvidia(host)
    host.proc.add(7, nodes={3: (NODE, "")})
    host.proc.add(8, nodes={3: (NODE, "")})
    instance = make_device("MIG-a", parent_uuid="GPU-a", processes=(make_process(8, GIB),))
    device, _ = host.complete(orphaned(processes=(make_process(7, GIB),)), instance)
    assert holders(device) == []


def test_ended_holder_is_removed_at_once_and_a_new_one_found_at_the_next_search(host: Host):
    nvidia(host)
    host.proc.add(7, nodes={3: (NODE, "")})
    assert holders(host.complete(orphaned())[0]) == [7]
    host.proc.add(7, start_ticks=900)
    host.proc.add(8, nodes={3: (NODE, "")})
    assert holders(host.complete(orphaned())[0]) == []
    host.now += 31.0
    assert holders(host.complete(orphaned())[0]) == [8]
