from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpumond.devices.process.containers import Containers, Names, ProcessPlacement

ID = "a1" * 32
POD = "2c48913c-b29f-11e7-9350-020968147796"
STORE = "var/lib/containers/storage/overlay-containers"


def write(root: Path, name: str, content: Any) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def names(root: Path, place: ProcessPlacement = ProcessPlacement(ID)) -> Names:
    return Containers(str(root)).names(place)


def test_docker_container_has_its_name(tmp_path: Path):
    write(tmp_path, f"var/lib/docker/containers/{ID}/config.v2.json", {"ID": ID, "Name": "/training"})
    assert names(tmp_path) == Names("training")


def test_docker_container_below_kubernetes_has_its_pod(tmp_path: Path):
    name = f"/k8s_worker_llama-0_research_{POD}_0"
    write(tmp_path, f"var/lib/docker/containers/{ID}/config.v2.json", {"Name": name})
    assert names(tmp_path, ProcessPlacement(ID, POD)) == Names("worker", "llama-0", "research")


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
    assert names(tmp_path) == Names("training")


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
    assert names(tmp_path, ProcessPlacement(ID, POD)) == Names("worker", "llama-0", "research")


@pytest.mark.parametrize("run", ["run/containerd", "run/k3s/containerd"])
def test_containerd_container_has_its_pod(tmp_path: Path, run: str):
    annotations = {
        "io.kubernetes.cri.container-name": "worker",
        "io.kubernetes.cri.sandbox-name": "llama-0",
        "io.kubernetes.cri.sandbox-namespace": "research",
    }
    write(tmp_path, f"{run}/io.containerd.runtime.v2.task/k8s.io/{ID}/config.json", {"annotations": annotations})
    assert names(tmp_path, ProcessPlacement(ID, POD)) == Names("worker", "llama-0", "research")


def test_kubelet_logs_name_container_and_pod_without_privilege(tmp_path: Path):
    write(tmp_path, f"var/log/containers/llama-0_research_worker-{ID}.log", "")
    assert names(tmp_path, ProcessPlacement(ID, POD)) == Names("worker", "llama-0", "research")


def test_log_directory_of_a_pod_names_it(tmp_path: Path):
    (tmp_path / f"var/log/pods/research_llama-0_{POD}/worker").mkdir(parents=True)
    (tmp_path / "var/log/pods/research_other_11111111-b29f-11e7-9350-020968147796").mkdir()
    assert names(tmp_path, ProcessPlacement(ID, POD)) == Names(None, "llama-0", "research")


def test_missing_names_are_taken_from_other_files(tmp_path: Path):
    (tmp_path / f"var/log/pods/research_llama-0_{POD}").mkdir(parents=True)
    write(tmp_path, f"{STORE}/containers.json", [{"id": ID, "names": [f"k8s_worker_x_y_{POD}_0"]}])
    assert names(tmp_path, ProcessPlacement(ID, POD)) == Names("worker", "llama-0", "research")


def test_delegated_place_has_no_name(tmp_path: Path):
    write(tmp_path, f"var/lib/docker/containers/{ID}/config.v2.json", {"Name": "/training"})
    assert names(tmp_path, ProcessPlacement(ID, delegated=True)) == Names()


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
    assert names(tmp_path) == Names()


def test_name_is_made_safe_to_show(tmp_path: Path):
    write(tmp_path, f"var/lib/docker/containers/{ID}/config.v2.json", {"Name": "/a\nb\x1b" + "c" * 500})
    shown = names(tmp_path).container
    assert shown is not None
    assert shown.isprintable()
    assert len(shown) == 256


def test_names_are_unknown_without_files(tmp_path: Path):
    assert names(tmp_path) == names(tmp_path, ProcessPlacement()) == Names()
