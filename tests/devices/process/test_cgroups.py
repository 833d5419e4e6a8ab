from __future__ import annotations

import pytest

from gpumond.devices.process.containers import ProcessPlacement, place

A, B = "a1" * 32, "b2" * 32
POD = "2c48913c-b29f-11e7-9350-020968147796"
POD_ = POD.replace("-", "_")
BURSTABLE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_}.slice"

V1 = "12:devices:{0}\n11:memory:{0}\n2:cpu,cpuacct:{0}\n1:name=systemd:{0}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ProcessPlacement()),
        ("0::/\n", ProcessPlacement()),
        ("0::/init.scope\n", ProcessPlacement(unit="init.scope")),
        ("0::/system.slice/ollama.service\n", ProcessPlacement(unit="ollama.service")),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", ProcessPlacement(unit="session-3.scope")),
        (
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/jupyter.service\n",
            ProcessPlacement(unit="user@1000.service"),
        ),
        (f"0::/system.slice/docker-{A}.scope\n", ProcessPlacement(A)),
        (V1.format(f"/docker/{A}"), ProcessPlacement(A)),
        (f"0::/\n{V1.format(f'/docker/{A}')}", ProcessPlacement(A)),
        (
            f"1:name=systemd:/system.slice/docker-{A}.scope\n0::/system.slice/docker.service\n",
            ProcessPlacement(A, unit="docker.service"),
        ),
        (f"0::/machine.slice/libpod-{A}.scope/container\n", ProcessPlacement(A)),
        (f"0::/machine.slice/libpod-conmon-{A}.scope\n", ProcessPlacement(unit=f"libpod-conmon-{A}.scope")),
        (f"11:memory:/libpod_parent/libpod-{A}\n", ProcessPlacement(A)),
        (f"0::/system.slice/nerdctl-{A}.scope\n", ProcessPlacement(A)),
        (f"0::/default/{A}\n", ProcessPlacement(A)),
        (f"0::{BURSTABLE}/cri-containerd-{A}.scope\n", ProcessPlacement(A, POD)),
        (f"0::{BURSTABLE}/crio-{A}.scope/container\n", ProcessPlacement(A, POD)),
        (f"0::{BURSTABLE}/crio-conmon-{A}.scope\n", ProcessPlacement(unit=f"crio-conmon-{A}.scope")),
        (f"0::{BURSTABLE}/docker-{A}.scope\n", ProcessPlacement(A, POD)),
        (f"0::/kubepods.slice/kubepods-pod{POD_}.slice/cri-containerd-{A}.scope\n", ProcessPlacement(A, POD)),
        (V1.format(f"/kubepods/burstable/pod{POD}/{A}"), ProcessPlacement(A, POD)),
        (V1.format(f"/kubepods/besteffort/pod{POD}/crio-{A}"), ProcessPlacement(A, POD)),
        (V1.format(f"/kubepods/pod{POD}/{A}"), ProcessPlacement(A, POD)),
        (f"0::/kubepods/burstable/pod{'9f' * 16}/{A}\n", ProcessPlacement(A, "9f" * 16)),
        (
            f"0::/system.slice/containerd.service/kubepods-burstable-pod{POD_}.slice:cri-containerd:{A}\n",
            ProcessPlacement(A, POD, unit="containerd.service"),
        ),
        (f"0::/../../kubepods.slice/kubepods-pod{POD_}.slice/cri-containerd-{A}.scope\n", ProcessPlacement(A, POD)),
        (V1.format("/slurm/uid_1000/job_4711/step_0/task_0"), ProcessPlacement(slurm_job="4711")),
        (
            "4:cpuset:/slurm_node7/uid_1000/job_4711/step_batch\n1:name=systemd:/system.slice/slurmd.service\n",
            ProcessPlacement(unit="slurmd.service", slurm_job="4711"),
        ),
        (
            "0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n",
            ProcessPlacement(unit="slurmstepd.scope", slurm_job="4711"),
        ),
        (
            "0::/system.slice/node7_slurmstepd.scope/job_4711/step_batch/user/task_0\n",
            ProcessPlacement(unit="node7_slurmstepd.scope", slurm_job="4711"),
        ),
        ("0::/system.slice/job_4711.service\n", ProcessPlacement(unit="job_4711.service")),
        ("0::/job_4711\n", ProcessPlacement()),
        (f"0::/system.slice/docker-{A}.scope (deleted)\n", ProcessPlacement(A)),
        (f"0::/system.slice/docker-{A[:-1]}.scope\n", ProcessPlacement(unit=f"docker-{A[:-1]}.scope")),
        ("no colons here\n::\n0:\n", ProcessPlacement()),
    ],
)
def test_place_of_a_process_follows_from_its_cgroup(text: str, expected: ProcessPlacement):
    assert place(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"0::/system.slice/docker-{A}.scope/docker/{B}\n", ProcessPlacement(A)),
        (V1.format(f"/docker/{A}/docker/{B}"), ProcessPlacement(A)),
        (f"0::{BURSTABLE}/cri-containerd-{A}.scope/kubepods/pod{'0e' * 16}/{B}\n", ProcessPlacement(A, POD)),
        (
            f"0::/system.slice/docker-{A}.scope/kubepods.slice/kubepods-pod{POD_}.slice/cri-containerd-{B}.scope\n",
            ProcessPlacement(A),
        ),
        (f"0::/system.slice/docker-{A}.scope/slurm/uid_0/job_1\n", ProcessPlacement(A)),
        (f"0::/pod{POD}/{A}\n", ProcessPlacement(A)),
    ],
)
def test_cgroups_below_a_container_are_ignored(text: str, expected: ProcessPlacement):
    assert place(text) == expected


@pytest.mark.parametrize(
    "inner", [f"user.slice/libpod-{A}.scope/container", f"docker-{A}.scope", f"kubepods/pod{POD}/{A}"]
)
def test_units_of_user_managers_are_delegated(inner: str):
    found = place(f"0::/user.slice/user-1000.slice/user@1000.service/{inner}\n")
    assert (found.container, found.delegated, found.unit) == (A, True, "user@1000.service")
    assert place("0::/user.slice/user-1000.slice/user@1000.service/slurm/job_5\n").slurm_job is None
