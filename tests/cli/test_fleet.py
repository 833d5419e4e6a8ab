"""`gpumond fleet targets` and `status` with machines that fail in each way."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import certificates
from tests.helpers.agents import GIB
from tests.helpers.frames import make_frame
from tests.helpers.prometheus import Prometheus
from tests.helpers.running import free_port, until
from tests.helpers.stubs import fleet, stub, write_targets
from tests.helpers.values import make_device, make_pool, make_process, make_report

FRAME = "/api/v1/frame"
REPORTS = (make_report(10, (make_pool(live=GIB),)),)


def frame() -> dict[str, Any]:
    """Return the frame of a machine with one device and two programs, one of which has an agent."""
    processes = (make_process(10, GIB), make_process(11, GIB))
    return make_frame(make_device(used_bytes=2 * GIB, processes=processes), reports=REPORTS)


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
    assert "sinfo: not found in $PATH" in missing.stderr


@pytest.mark.needs("prometheus")
def test_targets_of_prometheus(tmp_path: Path):
    addresses = {"node-1": f"127.0.0.1:{free_port()}", "node-2": f"127.0.0.1:{free_port()}"}
    named = [{"targets": [address], "labels": {"instance": name}} for name, address in addresses.items()]
    other = {"static_configs": [{"targets": [addresses["node-1"]]}]}
    with Prometheus(tmp_path / "prometheus", {"gpumond": {"static_configs": named}, "other": other}) as prometheus:
        until(lambda: len(prometheus.instant("up")) == 3, 60)
        shown = fleet("targets", "--prometheus", prometheus.url, "--json")
        found = {group["labels"]["instance"]: group["targets"][0] for group in json.loads(shown.stdout)}
        assert found == addresses


@pytest.mark.needs("openssl")
def test_status_names_each_machine_that_does_not_answer_and_the_reason(tmp_path: Path):
    place = certificates.make(tmp_path / "certificates")
    with (
        stub(lambda path, body: (200, frame())) as present,
        stub(lambda path, body: (401, {"detail": "reads require a token"})) as refused,
        stub(lambda path, body: (200, []), place / "client.crt") as wrong,
        stub(lambda path, body: (200, {"hello": "world"})) as other,
    ):
        addresses = {
            "node-1": present.address,
            "down": f"127.0.0.1:{free_port()}",
            "refusing": refused.address,
            "wrong": wrong.address,
            "other": other.address,
            "node-2": present.address,
        }
        file = write_targets(tmp_path / "targets.json", addresses, wrong={"__scheme__": "https"})
        options = ("status", "--targets", str(file), "--timeout", "60s")
        shown = fleet(*options, GPUMOND_CA_FILE=str(place / "ca.crt"), GPUMOND_TOKEN="secret")
        assert shown.returncode == 1
        assert [line.split()[0] for line in shown.stdout.splitlines()[1:3]] == ["node-1", "node-2"]
        assert shown.stdout.splitlines()[-1] == (
            "2 of 6 machines reachable; 2 of 2 GPUs up, 4.0 GiB of 160.0 GiB used; 0 B reclaimable; "
            "2 of 4 programs have an agent"
        )
        reasons = dict(line.split(" ", 2)[1:] for line in shown.stdout.splitlines() if line.startswith("unavailable: "))
        assert {name: reason.partition("): ")[2] for name, reason in reasons.items()} == {
            "down": "nothing is listening at this address",
            "refusing": "HTTP status 401: reads require a token",
            "wrong": reasons["wrong"].partition("): ")[2],
            "other": "the server isn't gpumond, or has an incompatible version (frame.version: expected a value)",
        }
        assert "certificate isn't valid" in reasons["wrong"]
        assert wrong.requests == []
        assert refused.requests == [(FRAME, "Bearer secret", "")]
        states = json.loads(fleet(*options, "--json", GPUMOND_CA_FILE=str(place / "ca.crt")).stdout)
        assert [state["machine"] for state in states] == list(addresses)
        assert states[1]["devices"] is None
        assert states[0]["alerts"] is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("status",), "or --slurm, as in `gpumond fleet status --targets gpus.json`"),
        (("status", "--targets", "a.json", "--parallel", "0"), "must be above 0"),
        (
            ("status", "--targets", "missing.json"),
            "missing.json: No such file or directory; expected a file that lists",
        ),
        (("status", "--slurm", "--tokens", "none"), "none: No such file or directory; expected the token of each"),
        (("status", "--slurm", "--client-key", "x"), "requires --client-cert"),
        (("status", "--slurm", "--token-file", "/missing"), "token file /missing can't be read: No such file"),
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
    assert "chmod 600" in refused.stderr
    file.chmod(0o600)
    file.write_text("node-1: 'two lines\n\n  x'\n")
    assert "expected a token" in fleet("status", "--slurm", "--tokens", str(file)).stderr
