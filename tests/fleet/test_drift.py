"""Machines whose version, configuration or rules differ from those of most machines."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gpumond.facts.errors import DaemonError
from gpumond.features.fleet.drift import Build, build_of, differences, usual
from tests.helpers.running import free_port
from tests.helpers.stubs import fleet, stub, write_targets

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
    assert build_of(status(faults=[INVALID])) == Build("1.0+111111111", "c1", "r1", "a.yaml, line 3")
    assert build_of({"version": "0.9", "faults": []}) == Build("0.9", None, None)
    with pytest.raises(DaemonError, match="incompatible version"):
        build_of({"hello": "world"})


def test_differences_are_from_the_most_frequent_known_values():
    builds = [Build("1", "c1", "r1"), Build("1", "c1", "r2"), Build("2", "c2", "r1"), Build("1", None, None)]
    most = usual(builds)
    assert most == {"version": "1", "config": "c1", "rules": "r1"}
    assert [differences(each, most) for each in builds] == [[], ["rules"], ["version", "config"], ["config", "rules"]]


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
