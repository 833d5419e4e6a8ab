"""`gpumond fleet status` of many machines: which are shown, in which order, and the totals."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gpumond.facts.errors import DaemonError
from gpumond.facts.frame import FaultWithRemedy
from gpumond.features.fleet.status import Deployment, deployment_of, differing_fields, majority_of
from tests.helpers.agents import GIB
from tests.helpers.frames import make_frame
from tests.helpers.running import free_port
from tests.helpers.stubs import Answer, fleet, stub, write_targets
from tests.helpers.values import make_device, make_pool, make_process, make_report

LOST = FaultWithRemedy("nvml", "gpu_is_lost", "GPU-a", "", "replace it")
USED = {"node-1": 10, "node-2": 40, "node-3": 20}
ZONES = {"node-1": {"zone": "eu-1"}, "node-2": {"zone": "eu-2", "rack": "7"}, "node-3": {"zone": "us-1"}}


def frame(used: int, **fields: Any) -> dict[str, Any]:
    device = make_device(used_bytes=used * GIB, processes=(make_process(10, used * GIB),))
    return make_frame(device, reports=(make_report(10, (make_pool(live=GIB, cached=GIB),)),), **fields)


@pytest.fixture
def targets(tmp_path: Path):
    """Serve three machines, of which node-3 has a fault."""
    with ExitStack() as stack:
        frames = {name: frame(used, faults=(LOST,) if name == "node-3" else ()) for name, used in USED.items()}
        served = {
            name: stack.enter_context(stub(lambda path, body, own=own: (200, own))).address
            for name, own in frames.items()
        }
        yield str(write_targets(tmp_path / "targets.json", served, **ZONES))


def machines(targets: str, *options: str) -> list[str]:
    shown = fleet("status", "--targets", targets, "--json", *options)
    assert shown.returncode in (0, 3), shown.stderr
    return [each["machine"] for each in json.loads(shown.stdout)]


def test_machines_are_sorted_and_limited(targets: str):
    assert machines(targets) == ["node-1", "node-2", "node-3"]
    assert machines(targets, "--sort", "used") == ["node-2", "node-3", "node-1"]
    assert machines(targets, "--sort", "free", "--limit", "2") == ["node-1", "node-3"]
    assert machines(targets, "--problems") == ["node-3"]


def test_machines_are_selected_by_their_labels(targets: str):
    assert machines(targets, "--label", "zone=eu-*") == ["node-1", "node-2"]
    assert machines(targets, "--label", "zone=eu-*", "--label", "rack=7") == ["node-2"]
    assert machines(targets, "--label", "zone=eu-*", "--machine", "node-[13]") == ["node-1"]
    assert machines(targets, "--label", "rack=") == ["node-1", "node-3"]
    assert machines(targets, "--label", "zone=asia") == []


def test_last_line_has_the_totals_of_all_machines(targets: str):
    shown = fleet("status", "--targets", targets, "--limit", "1")
    assert shown.stdout.splitlines()[-3:] == [
        "2 machines not shown",
        "",
        "3 of 3 machines reachable; 3 of 3 GPUs up, 70.0 GiB of 240.0 GiB used; 3.0 GiB reclaimable; "
        "3 of 3 programs have an agent",
    ]


def test_machine_that_does_not_answer_is_read_again_once(tmp_path: Path):
    failures = {"node-1": 1, "node-2": 2}
    lock = threading.Lock()

    def answering(name: str) -> Any:
        def answer(path: str, body: str) -> Answer:
            with lock:
                failures[name] -= 1
                return (503, {"detail": "busy"}) if failures[name] >= 0 else (200, frame(10))

        return answer

    with stub(answering("node-1")) as first, stub(answering("node-2")) as second:
        file = write_targets(tmp_path / "targets.json", {"node-1": first.address, "node-2": second.address})
        shown = json.loads(fleet("status", "--targets", str(file), "--json").stdout)
    assert [each["problem"] for each in shown] == ["", "HTTP status 503: busy"]
    assert failures == {"node-1": -1, "node-2": 0}


def test_failing_lying_and_silent_machines_cost_one_line_each(tmp_path: Path):
    lie = frame(10)
    lie["snapshot"]["devices"][0]["used_bytes"] = "much"
    answers: dict[str, Answer] = {
        "healthy": (200, frame(10)),
        "failing": (503, {"detail": "busy"}),
        "lying": (200, lie),
        "silent": None,
    }
    with ExitStack() as stack:
        served = {
            name: stack.enter_context(stub(lambda path, body, own=own: own)).address for name, own in answers.items()
        }
        file = write_targets(tmp_path / "targets.json", served)
        shown = fleet("status", "--targets", str(file), "--timeout", "500ms")
    _, healthy, empty, *missing, end, totals = shown.stdout.splitlines()
    assert (healthy.split()[0], empty, end) == ("healthy", "", "")
    assert [line.split()[:2] for line in missing] == [["unavailable:", name] for name in ("failing", "lying", "silent")]
    reasons = (
        "HTTP status 503: busy",
        "frame.snapshot.devices.used_bytes: expected an integer",
        "no response within 0.5 s",
    )
    for line, reason in zip(missing, reasons, strict=True):
        assert reason in line
    assert totals.startswith("1 of 4 machines reachable; 1 of 1 GPU up, 10.0 GiB of 80.0 GiB used")


COMMIT = "1" * 40
INVALID = {
    "source": "configuration",
    "kind": "not_loaded",
    "device_uuid": None,
    "detail": "a.yaml, line 3",
    "remedy": "",
}


def status(**fields: Any) -> dict[str, Any]:
    known = {"version": "1.0", "revision": COMMIT, "config_hash": "c1", "rules_hash": "r1", "faults": []}
    return known | fields


def test_what_a_daemon_runs_is_read_from_its_status():
    assert deployment_of(status(faults=[INVALID])) == Deployment("1.0+111111111", "c1", "r1", "a.yaml, line 3")
    assert deployment_of({"version": "0.9", "faults": []}) == Deployment("0.9", None, None)
    with pytest.raises(DaemonError, match="incompatible version"):
        deployment_of({"hello": "world"})


def test_differences_are_from_the_most_frequent_known_values():
    builds = [
        Deployment("1", "c1", "r1"),
        Deployment("1", "c1", "r2"),
        Deployment("2", "c2", "r1"),
        Deployment("1", None, None),
    ]
    most = majority_of(builds)
    assert most == {"version": "1", "config": "c1", "rules": "r1"}
    assert [differing_fields(each, most) for each in builds] == [
        [],
        ["rules"],
        ["version", "config"],
        ["config", "rules"],
    ]


def test_machines_that_differ_are_listed(tmp_path: Path):
    answers = [status(), status(config_hash="c2"), status(), status(faults=[INVALID]), status(revision="2" * 40)]
    with ExitStack() as stack:
        served = [stack.enter_context(stub(lambda path, body, own=own: (200, own))) for own in answers]
        addresses = {f"node-{number}": each.address for number, each in enumerate(served)}
        file = write_targets(tmp_path / "targets.json", addresses)
        shown = fleet("status", "--targets", str(file), "--drift")
        found = json.loads(fleet("status", "--targets", str(file), "--drift", "--json").stdout)
        same = write_targets(tmp_path / "same.json", {name: addresses[name] for name in ("node-0", "node-2")})
        none = fleet("status", "--targets", str(same), "--drift")
        down = write_targets(tmp_path / "down.json", {"node-9": f"127.0.0.1:{free_port()}"})
        missing = fleet("status", "--targets", str(down), "--drift")
    assert shown.returncode == 1
    assert [line.split() for line in shown.stdout.splitlines()[1:5]] == [
        ["most", "machines", "1.0+111111111", "c1", "r1"],
        ["node-1", "same", "c2", "same"],
        ["node-3", "same", "same", "same", "a.yaml,", "line", "3"],
        ["node-4", "1.0+222222222", "same", "same"],
    ]
    assert shown.stdout.splitlines()[-1] == "3 of 5 reachable machines differ"
    assert [(each["machine"], each["differences"]) for each in found["differing"]] == [
        ("node-1", ["config"]),
        ("node-3", []),
        ("node-4", ["version"]),
    ]
    assert (none.returncode, none.stdout.splitlines()[-1]) == (
        0,
        "2 machines with the same version, configuration and rules",
    )
    assert (missing.returncode, missing.stdout.strip()[:19]) == (1, "unavailable: node-9")
