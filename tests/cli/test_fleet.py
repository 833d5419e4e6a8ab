"""`gpumond fleet targets` and `status` with real daemons, and with machines that fail in each way."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumond import __version__
from tests import certificates
from tests.fleet.stubs import SimulatedMachine, fleet, simulated, stub, write_targets
from tests.grafana.prometheus import Prometheus
from tests.running import free_port, until

FRAME = "/api/v1/frame"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[list[SimulatedMachine]]:
    directory = tmp_path_factory.mktemp("fleet")
    with simulated(directory, nvml_library, {"node-1": {"train": {}, "serve": {}}, "node-2": {"train": {}}}) as started:
        yield started


def command(directory: Path, name: str, script: str) -> dict[str, str]:
    """Put a command with this name first in PATH. It writes its arguments to a file."""
    path = directory / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {directory}/arguments\n{script}\n')
    path.chmod(0o755)
    return {"PATH": f"{path.parent}{os.pathsep}{os.environ['PATH']}"}


def test_targets_are_printed_in_the_format_in_which_they_are_read(tmp_path: Path):
    file = write_targets(tmp_path / "a.json", {"node-1": "10.0.0.1:9917", "node-2": "10.0.0.2"})
    shown = fleet("targets", "--targets", str(file), "--scheme", "https", "--json")
    assert shown.returncode == 0, shown.stderr
    (tmp_path / "b.json").write_text(shown.stdout)
    again = fleet("targets", "--targets", str(tmp_path / "b.json"))
    assert [line.split() for line in again.stdout.splitlines()] == [
        ["MACHINE", "ADDRESS", "LABELS"],
        ["node-1", "https://10.0.0.1:9917"],
        ["node-2", "https://10.0.0.2:9917"],
    ]
    some = fleet("targets", "--targets", str(file), "--machine", "*-2", "--machine", "x", "--json")
    assert [group["labels"]["instance"] for group in json.loads(some.stdout)] == ["node-2"]
    assert fleet("targets", "--targets", str(file), "--machine", "x").returncode == 3


def test_targets_of_an_http_service():
    groups = [{"targets": ["10.0.0.1:9917"], "labels": {"instance": "node-1"}}]
    with stub(lambda path, body: (200, groups) if path == "/sd" else (404, {})) as service:
        shown = fleet("targets", "--http-sd", f"http://{service.address}/sd", "--json", GPUMOND_TOKEN="secret")
        assert json.loads(shown.stdout)[0]["labels"] == {"instance": "node-1", "__scheme__": "http"}
        assert service.requests == [("/sd", None, "")]  # no token is sent to it
        refused = fleet("targets", "--http-sd", f"http://{service.address}/other")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "it answered 404" in refused.stderr


def test_targets_of_kubernetes(tmp_path: Path):
    endpoint = {"addresses": ["10.0.0.1"], "nodeName": "node-1"}
    slices = {"items": [{"addressType": "IPv4", "ports": [{"port": 9917}], "endpoints": [endpoint]}]}
    (tmp_path / "slices.json").write_text(json.dumps(slices))
    path = command(tmp_path, "kubectl", f"cat {tmp_path}/slices.json")
    shown = fleet("targets", "--kubernetes", "monitoring/gpus", "--json", **path)
    assert [group["targets"] for group in json.loads(shown.stdout)] == [["10.0.0.1:9917"]]
    given = (tmp_path / "arguments").read_text().split()
    assert {"--namespace=monitoring", "--selector=kubernetes.io/service-name=gpus"} <= {*given}
    path = command(tmp_path, "kubectl", "echo 'no such server' >&2; exit 1")
    refused = fleet("targets", "--kubernetes", **path)
    assert refused.returncode == 1
    assert "kubectl failed with status 1: no such server" in refused.stderr
    assert fleet("targets", "--kubernetes", "gpumond").returncode == 2


def test_targets_of_slurm(tmp_path: Path):
    shown = fleet("targets", "--slurm", **command(tmp_path, "sinfo", "printf 'gpu-1\\ngpu-2\\ngpu-1\\n'"))
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["MACHINE", "gpu-1", "gpu-2"]
    assert (tmp_path / "arguments").read_text().split() == ["-h", "-N", "-o", "%N"]
    missing = fleet("targets", "--slurm", PATH=str(tmp_path / "nowhere"))
    assert missing.returncode == 1
    assert "sinfo: No such file" in missing.stderr


def test_targets_of_prometheus(tmp_path: Path, machines: list[SimulatedMachine]):
    named = [{"targets": [each.address], "labels": {"instance": each.name}} for each in machines]
    other = {"static_configs": [{"targets": [machines[0].address]}]}
    prometheus = Prometheus(tmp_path / "prometheus", {"gpumond": {"static_configs": named}, "other": other})
    try:
        until(lambda: len(prometheus.instant("up")) == 3)
        shown = fleet("targets", "--prometheus", prometheus.url, "--json")
        found = {group["labels"]["instance"]: group["targets"][0] for group in json.loads(shown.stdout)}
        assert found == {each.name: each.address for each in machines}
    finally:
        prometheus.stop()


def test_status_of_machines_that_answer(tmp_path: Path, machines: list[SimulatedMachine]):
    file = write_targets(tmp_path / "targets.json", {each.name: each.address for each in machines})
    shown = fleet("status", "--targets", str(file), "--timeout", "30")
    assert shown.returncode == 0, shown.stderr
    header, first, second, _, totals = shown.stdout.splitlines()
    assert header.split()[:4] == ["MACHINE", "VERSION", "DRIVER", "GPUS"]
    assert first.split()[:4] == ["node-1", __version__, "580.65.06", "1"]
    assert "2 of 3" in first
    assert "1 of 2" in second
    assert totals == "2 of 2 machines answer; 3 of 5 programs have an agent"


def test_status_names_each_machine_that_does_not_answer_and_the_reason(
    tmp_path: Path, machines: list[SimulatedMachine]
):
    place = certificates.make(tmp_path / "certificates")

    def slow(path: str, body: str) -> Any:
        return None

    def refusing(path: str, body: str) -> Any:
        return 401, {"detail": "reads require a token"}

    with (
        stub(slow) as stalled,
        stub(refusing) as refused,
        stub(lambda path, body: (200, []), place / "client.crt") as wrong,
        stub(lambda path, body: (200, {"hello": "world"})) as other,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        addresses = {
            "node-1": machines[0].address,
            "down": f"127.0.0.1:{free_port()}",
            "slow": stalled.address,
            "silent": f"127.0.0.1:{silent.getsockname()[1]}",
            "refusing": refused.address,
            "wrong": wrong.address,
            "other": other.address,
            "node-2": machines[1].address,
        }
        https = {"__scheme__": "https"}
        file = write_targets(tmp_path / "targets.json", addresses, wrong=https, silent=https)
        options = ("status", "--targets", str(file), "--timeout", "10")
        shown = fleet(*options, GPUMOND_CA_FILE=str(place / "ca.crt"), GPUMOND_TOKEN="secret")
        assert shown.returncode == 1
        assert [line.split()[0] for line in shown.stdout.splitlines()[1:3]] == ["node-1", "node-2"]
        reasons = dict(line.split(" ", 2)[1:] for line in shown.stdout.splitlines() if line.startswith("missing "))
        assert {name: reason.partition("): ")[2] for name, reason in reasons.items()} == {
            "down": "nothing listens at its address",
            "slow": "no answer within 10 s",
            "silent": "no answer within 10 s",
            "refusing": "it answered 401: reads require a token",
            "wrong": reasons["wrong"].partition("): ")[2],
            "other": "its answer is not that of a gpumond daemon of a compatible version",
        }
        assert "certificate is not valid" in reasons["wrong"]
        assert wrong.requests == []
        assert refused.requests == [(FRAME, "Bearer secret", "")]
        states = json.loads(fleet(*options, "--json", GPUMOND_CA_FILE=str(place / "ca.crt")).stdout)
        assert [state["machine"] for state in states] == list(addresses)
        assert states[1]["devices"] is None
        assert states[0]["alerts"] is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("status",), "no list of machines"),
        (("status", "--targets", "a.json", "--parallel", "0"), "must be positive"),
        (("status", "--targets", "missing.json"), "missing.json: No such file"),
        (("status", "--slurm", "--client-key", "x"), "requires --client-cert"),
        (("status", "--slurm", "--token-file", "/missing"), "/missing: No such file"),
    ],
)
def test_wrong_use_exits_with_2(arguments: tuple[str, ...], message: str):
    refused = fleet(*arguments)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr


def test_file_of_tokens_that_others_may_read_is_refused(tmp_path: Path):
    file = tmp_path / "tokens.yaml"
    file.write_text("node-1: secret\n")
    file.chmod(0o644)
    refused = fleet("status", "--slurm", "--tokens", str(file))
    assert refused.returncode == 2
    assert "chmod 0600" in refused.stderr
    file.chmod(0o600)
    file.write_text("node-1: 'two lines\n\n  x'\n")
    assert "expected a token" in fleet("status", "--slurm", "--tokens", str(file)).stderr
