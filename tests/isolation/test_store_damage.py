"""Start of a daemon on a damaged store."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import until
from tests.helpers.users import ADMINISTRATOR, VICTIM
from tests.isolation.machine import GIB, Machine

RULES = """
rules:
  - name: cached
    scope: device
    value: reclaimable_bytes
    above: 0
receivers:
  - {name: unreachable, type: webhook, url: "http://127.0.0.1:9/"}
"""
ROWS = {
    "rules": "(name, etag, body) VALUES ('bad-{number}', 'x', {text})",
    "receipts": "(at, body) VALUES ({number}, {text})",
    "alerts": "(body) VALUES ({text})",
    "past_alerts": "(at, body) VALUES ({number}, {text})",
    "history": "(body) VALUES ({text})",
    "notices": "(receiver, seq, kind, alert) VALUES ('unreachable', 100{number}, 'raised', {text})",
    "told": "(receiver, labels, alert) VALUES ('unreachable', 'labels-{number}', {text})",
    "silences": "(id, body) VALUES ('bad-{number}', {text})",
    "baselines": "(name, side, body) VALUES ('bad-{number}', 'reference', {text})",
}
DAMAGE = ("X'FF'", "'{}'", "'[]'", "'not JSON'", "7")


@pytest.fixture(scope="module")
def settings() -> str:
    return RULES


@pytest.fixture(scope="module")
def state(_machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State directory of a stopped daemon, with a row in most tables."""
    machine = _machine
    victim = machine.agents(VICTIM, listed=True, cached_bytes=8 * GIB)
    until(lambda: [alert for alert in machine.daemon.get("alerts") if alert["rule"] == "cached"])
    assert machine.flush(ADMINISTRATOR, target={"pid": victim.pid}).answer()[0] == 200
    rule = {"name": "kept", "scope": "device", "value": "used_ratio", "above": 2.0}
    assert machine.ask(ADMINISTRATOR, "POST", "/api/v1/rules", rule).answer()[0] == 201
    machine.end_programs()
    machine.stop()
    kept = tmp_path_factory.mktemp("kept") / "state"
    shutil.copytree(machine.state, kept)
    return kept


@pytest.fixture
def damaged(_machine: Machine, state: Path) -> Callable[[Callable[[Path], None]], Machine]:
    """Start the daemon on the original store after one kind of damage."""

    def start(damage: Callable[[Path], None]) -> Machine:
        _machine.stop()
        for kept in state.iterdir():
            # In place, so the file still belongs to the daemon's user.
            (_machine.state / kept.name).write_bytes(kept.read_bytes())
        for ending in ("-wal", "-shm"):
            (_machine.state / f"gpumond.db{ending}").unlink(missing_ok=True)
        damage(_machine.state / "gpumond.db")
        _machine.serve()
        return _machine

    return start


def faults(machine: Machine) -> list[dict[str, Any]]:
    return [fault for fault in machine.daemon.get("status")["faults"] if fault["source"] == "store"]


def test_damaged_rows_are_skipped_with_a_fault_for_each_table(damaged: Callable[..., Machine]):
    def damage(path: Path) -> None:
        db = sqlite3.connect(path)
        with db:
            for table, row in ROWS.items():
                for number, text in enumerate(DAMAGE):
                    db.execute(f"INSERT INTO {table} {row.format(number=number, text=text)}")
        db.close()

    machine = damaged(damage)
    assert machine.daemon.value("gpumond_store_writable") == 1
    details = " ".join(fault["detail"] for fault in faults(machine))
    assert {table for table in ROWS if f"of the table {table} " not in details} <= {"history", "baselines"}
    assert [receipt["released_bytes"] for receipt in machine.daemon.get("receipts")] == [GIB]
    assert "kept" in [rule["name"] for rule in machine.daemon.get("rules")]
    for route in ("alerts", "alerts/history", "audit", "frame"):
        assert machine.daemon.request(f"/api/v1/{route}")[0] == 200


@pytest.mark.parametrize("place", ["CREATE TABLE rules", "tablerules"])
def test_store_with_an_undecodable_schema_is_set_aside(damaged: Callable[..., Machine], place: str):
    def damage(path: Path) -> None:
        content = path.read_bytes()
        at = content.index(place.encode()) + 2
        path.write_bytes(content[:at] + b"\xff" + content[at + 1 :])

    machine = damaged(damage)
    until(lambda: machine.daemon.value("gpumond_store_writable") == 1)
    until(lambda: faults(machine))
    assert list(machine.state.glob("gpumond.db.corrupt-*"))


def test_file_that_is_no_database_is_set_aside(damaged: Callable[..., Machine]):
    machine = damaged(lambda path: path.write_bytes(b"\x00\xff" * 4096) and None)
    until(lambda: machine.daemon.value("gpumond_store_writable") == 1)
    assert list(machine.state.glob("gpumond.db.corrupt-*"))
