"""Problems of several machines with their remedies."""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpumond.facts.errors import remedy
from gpumond.facts.frame import ConditionWithRemedy, FaultWithRemedy
from gpumond.features.fleet.connection import Client, Credentials, Machine, parse_machine
from gpumond.features.fleet.doctor import FleetFinding, examine, findings_by_subject
from gpumond.view.frame import MALFORMED
from tests.helpers.agents import GIB
from tests.helpers.frames import make_frame
from tests.helpers.running import free_port
from tests.helpers.stubs import fleet, stub, write_targets
from tests.helpers.values import make_device, make_pool, make_process, make_report

LOST = FaultWithRemedy("nvml", "gpu_is_lost", "GPU-a", "", remedy("gpu_is_lost"))
HIDDEN = ConditionWithRemedy("GPU-a", "unmapped_estimated", "none", "train (pid 10)")


def frame(agent: bool = True, version: str = "1.0.0", **fields: Any) -> dict[str, Any]:
    device = make_device(used_bytes=GIB, processes=(make_process(10, GIB),))
    reports = (make_report(10, (make_pool(live=GIB),)),) if agent else ()
    return {**make_frame(device, reports=reports, **fields), "version": version}


def examined(*frames: Any) -> list[FleetFinding]:
    with ExitStack() as stack:
        machines: list[Machine] = []
        for number, each in enumerate(frames):
            if each is None:
                address = f"127.0.0.1:{free_port()}"
            else:
                address = stack.enter_context(stub(lambda path, body, own=each: (200, own))).address
            machines.append(parse_machine(address, {"instance": f"node-{number}"}))
        client = Client(Credentials(ssl_context=ssl.create_default_context()), 10.0)
        return asyncio.run(examine(client, machines, 8))


def test_machine_without_a_problem_has_no_finding():
    assert examined(frame()) == []


def test_each_problem_has_a_state_and_a_remedy():
    found = examined(
        frame(),
        frame(faults=(LOST,), conditions=(HIDDEN,)),
        None,
        frame(agent=False),
        frame(version="0.9.0"),
        {"version": "1"},
    )
    assert [(each.machine, each.state, each.subject) for each in found] == [
        ("node-1", "bad", "gpu_is_lost"),
        ("node-1", "note", "unmapped_estimated"),
        ("node-2", "bad", "nothing is listening at this address"),
        ("node-3", "note", "programs without an agent"),
        ("node-5", "bad", f"{MALFORMED} (frame.host: expected a value)"),
        ("node-4", "note", "another version of gpumond"),
    ]
    assert all(each.remedy for each in found)


def test_another_build_of_the_same_version_is_named():
    builds = [frame() | {"revision": f"{commit:040x}"} for commit in (1 << 140, 1 << 140, 2 << 140)]
    (found,) = examined(*builds, frame() | {"revision": f"{1 << 140:040x}"})
    assert (found.machine, found.subject) == ("node-2", "another version of gpumond")
    assert found.detail == "1.0.0+000020000; most machines have 1.0.0+000010000"


def test_same_problem_of_several_machines_is_one_group():
    found = examined(*(frame(faults=(LOST,)) for _ in range(3)), frame(agent=False))
    groups = findings_by_subject(found)
    assert [(finding.subject, names) for finding, names in groups] == [
        ("gpu_is_lost", ["node-0", "node-1", "node-2"]),
        ("programs without an agent", ["node-3"]),
    ]


def test_command_prints_each_problem_once(tmp_path: Path):
    with stub(lambda path, body: (200, frame(agent=False))) as served:
        addresses = {f"node-{number}": served.address for number in range(7)}
        file = write_targets(tmp_path / "targets.json", addresses)
        shown = fleet("doctor", "--targets", str(file), "--timeout", "30s")
        assert shown.returncode == 0, shown.stderr
        first, second = shown.stdout.splitlines()
        assert first == "note  programs without an agent: node-0, node-1, node-2, node-3, node-4 and 2 more"
        assert second.startswith("      -> start them with")
        down = write_targets(tmp_path / "down.json", {"node-9": f"127.0.0.1:{free_port()}"})
        failed = fleet("doctor", "--targets", str(down), "--json")
        assert failed.returncode == 1
        assert [each["machine"] for each in json.loads(failed.stdout)] == ["node-9"]
