from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpumond.devices.process.metadata import ContainerNameLookup, ContainerNames, ProcessPlacement, parse_placement

ID = "a1" * 32
POD = "2c48913c-b29f-11e7-9350-020968147796"
STORE = "var/lib/containers/storage/overlay-containers"


def write(root: Path, name: str, content: Any) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def names(root: Path, place: ProcessPlacement = ProcessPlacement(ID)) -> ContainerNames:
    return ContainerNameLookup(str(root)).names(place)


def test_docker_container_has_its_name(tmp_path: Path):
    write(tmp_path, f"var/lib/docker/containers/{ID}/config.v2.json", {"ID": ID, "Name": "/training"})
    assert names(tmp_path) == ContainerNames("training")


def test_docker_container_below_kubernetes_has_its_pod(tmp_path: Path):
    name = f"/k8s_worker_llama-0_research_{POD}_0"
    write(tmp_path, f"var/lib/docker/containers/{ID}/config.v2.json", {"Name": name})
    assert names(tmp_path, ProcessPlacement(ID, POD)) == ContainerNames("worker", "llama-0", "research")


@pytest.mark.parametrize(
    "index",
    [
        f"{STORE}/containers.json",
        f"{STORE}/volatile-containers.json",
        "run/containers/storage/overlay-containers/volatile-containers.json",
    ],
)
def test_podman_container_has_its_name(tmp_path: Path, index: str):
    write(tmp_path, index, [{"id": "b2" * 32, "names": ["other"]}, {"id": ID, "names": ["training"], "layer": "x"}])
    assert names(tmp_path) == ContainerNames("training")


def test_crio_container_has_its_pod(tmp_path: Path):
    annotations = {
        "io.kubernetes.container.name": "worker",
        "io.kubernetes.pod.name": "llama-0",
        "io.kubernetes.pod.namespace": "research",
    }
    write(
        tmp_path,
        f"run/containers/storage/overlay-containers/{ID}/userdata/config.json",
        {"ociVersion": "1.0", "annotations": annotations},
    )
    assert names(tmp_path, ProcessPlacement(ID, POD)) == ContainerNames("worker", "llama-0", "research")


@pytest.mark.parametrize("run", ["run/containerd", "run/k3s/containerd"])
def test_containerd_container_has_its_pod(tmp_path: Path, run: str):
    annotations = {
        "io.kubernetes.cri.container-name": "worker",
        "io.kubernetes.cri.sandbox-name": "llama-0",
        "io.kubernetes.cri.sandbox-namespace": "research",
    }
    write(tmp_path, f"{run}/io.containerd.runtime.v2.task/k8s.io/{ID}/config.json", {"annotations": annotations})
    assert names(tmp_path, ProcessPlacement(ID, POD)) == ContainerNames("worker", "llama-0", "research")


def test_kubelet_logs_name_container_and_pod_without_privilege(tmp_path: Path):
    write(tmp_path, f"var/log/containers/llama-0_research_worker-{ID}.log", "")
    assert names(tmp_path, ProcessPlacement(ID, POD)) == ContainerNames("worker", "llama-0", "research")


def test_log_directory_of_a_pod_names_it(tmp_path: Path):
    (tmp_path / f"var/log/pods/research_llama-0_{POD}/worker").mkdir(parents=True)
    (tmp_path / "var/log/pods/research_other_11111111-b29f-11e7-9350-020968147796").mkdir()
    assert names(tmp_path, ProcessPlacement(ID, POD)) == ContainerNames(None, "llama-0", "research")


def test_missing_names_are_taken_from_other_files(tmp_path: Path):
    (tmp_path / f"var/log/pods/research_llama-0_{POD}").mkdir(parents=True)
    write(tmp_path, f"{STORE}/containers.json", [{"id": ID, "names": [f"k8s_worker_x_y_{POD}_0"]}])
    assert names(tmp_path, ProcessPlacement(ID, POD)) == ContainerNames("worker", "llama-0", "research")


def test_delegated_place_has_no_name(tmp_path: Path):
    write(tmp_path, f"var/lib/docker/containers/{ID}/config.v2.json", {"Name": "/training"})
    assert names(tmp_path, ProcessPlacement(ID, delegated=True)) == ContainerNames()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "[" * 20000, '{"Name": 5, "annotations": [1]}', '[{"id": 3}, 4]']
)
def test_broken_files_yield_no_names(tmp_path: Path, content: str):
    for file in (
        f"var/lib/docker/containers/{ID}/config.v2.json",
        f"{STORE}/containers.json",
        f"run/containerd/io.containerd.runtime.v2.task/default/{ID}/config.json",
    ):
        write(tmp_path, file, content)
    assert names(tmp_path) == ContainerNames()


def test_name_is_made_safe_to_show(tmp_path: Path):
    write(tmp_path, f"var/lib/docker/containers/{ID}/config.v2.json", {"Name": "/a\nb\x1b" + "c" * 500})
    shown = names(tmp_path).container
    assert shown is not None
    assert shown.isprintable()
    assert len(shown) == 256


def test_names_are_unknown_without_files(tmp_path: Path):
    assert names(tmp_path) == names(tmp_path, ProcessPlacement()) == ContainerNames()


A, B = "a1" * 32, "b2" * 32
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
    assert parse_placement(text) == expected


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
    assert parse_placement(text) == expected


@pytest.mark.parametrize(
    "inner", [f"user.slice/libpod-{A}.scope/container", f"docker-{A}.scope", f"kubepods/pod{POD}/{A}"]
)
def test_units_of_user_managers_are_delegated(inner: str):
    found = parse_placement(f"0::/user.slice/user-1000.slice/user@1000.service/{inner}\n")
    assert (found.container, found.delegated, found.unit) == (A, True, "user@1000.service")
    assert parse_placement("0::/user.slice/user-1000.slice/user@1000.service/slurm/job_5\n").slurm_job is None
