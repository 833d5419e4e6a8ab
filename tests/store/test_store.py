"""Acknowledged rows are kept and read back unchanged."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpumond.facts.alerts import ClockTimes, StoredAlert, from_stored
from gpumond.facts.errors import EntryChanged
from gpumond.facts.frame import Alert
from gpumond.facts.pools import Receipt
from gpumond.features.rules.registry import override_table, rule_table
from gpumond.store.database import MIGRATIONS
from gpumond.store.store import Store
from gpumond.store.table import Row, to_text
from tests.helpers.opened_store import RECEIPT, over, with_store


def test_rule_survives_a_restart_with_its_etag(path: Path):
    etag = with_store(path, lambda store: rule_table(store).put("full", {"above": 0.9}, "token"))
    assert with_store(path, lambda store: rule_table(store).rows()) == [Row("full", {"above": 0.9}, etag)]


def test_override_survives_a_restart_and_is_in_the_audit(path: Path):
    async def work(store: Store) -> None:
        await override_table(store).put("leak", {"threshold": 1.0}, "token")
        await override_table(store).put("leak", {"for": 60.0, "enabled": False}, "token")
        await override_table(store).put("idle-holder", {"severity": "warning"}, "token")
        await override_table(store).delete("idle-holder", "token")
        assert not await override_table(store).delete("idle-holder", "token")

    with_store(path, work)
    assert with_store(path, lambda store: override_table(store).rows()) == [
        Row("leak", {"for": 60.0, "enabled": False})
    ]
    actions = [entry.action for entry in with_store(path, lambda store: store.audit_entries())]
    assert actions == ["rule.override"] * 3 + ["rule.restore"]


def test_store_is_readable_by_its_user_only(path: Path):
    with_store(path, lambda store: store.audit("token", "reload", {}))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}


def test_change_of_another_version_is_refused(path: Path):
    async def work(store: Store) -> None:
        etag = await rule_table(store).put("full", {"above": 0.9}, "token")
        newer = await rule_table(store).put("full", {"above": 0.8}, "token", if_match=etag)
        with pytest.raises(EntryChanged):
            await rule_table(store).put("full", {"above": 0.7}, "token", if_match=etag)
        with pytest.raises(EntryChanged):
            await rule_table(store).delete("full", "token", if_match=etag)
        await rule_table(store).delete("full", "token", if_match=newer)
        assert not await rule_table(store).delete("full", "token")
        assert [entry.action for entry in await store.audit_entries()] == ["rule.create", "rule.replace", "rule.delete"]

    with_store(path, work)


def test_receipts_round_trip(path: Path):
    with_store(path, lambda store: store.add_receipts([RECEIPT]))
    assert with_store(path, lambda store: store.receipts()) == [RECEIPT]


def test_alerts_are_resumed_with_their_age(path: Path):
    now = ClockTimes(1e6, 5000.0)
    fired = Alert(
        rule="full", phase="firing", labels=(("alertname", "full"),), annotations=(), value=1e6, active_at=1e6 + 60
    )

    async def fire(store: Store) -> None:
        nonlocal now
        now = ClockTimes(1e6 + 60, 5060.0)
        await store.store_alerts([StoredAlert((), fired, 5000.0)], [])

    with_store(path, fire, clock=lambda: now)
    alerts, alive = with_store(path, lambda store: store.stored_alerts(), clock=lambda: now)
    (activity,) = from_stored(alerts, alive, 1e6 + 61)["full"].values()
    assert (activity.alert, activity.active_monotonic) == (fired, -60.0)


def test_store_of_the_first_version_is_upgraded(path: Path):
    path.parent.mkdir(mode=0o700)
    db = sqlite3.connect(path)
    db.executescript(f"{MIGRATIONS[0]} PRAGMA user_version = 1;")
    with db:
        db.execute("INSERT INTO receipts (body) VALUES (?)", (to_text(RECEIPT),))
    db.close()

    async def work(store: Store) -> tuple[list[Receipt], list[Alert]]:
        await store.store_alerts([], [], [over("a")])
        return await store.receipts(), await store.past_alerts()

    receipts, alerts = with_store(path, work)
    assert (receipts, [alert.labels for alert in alerts]) == ([RECEIPT], [over("a").labels])
    db = sqlite3.connect(path)
    assert db.execute("SELECT at FROM receipts").fetchall() == [(1.5,)]
    db.close()


WRITER = """
import asyncio, sys
from pathlib import Path
from gpumond.features.rules.registry import rule_table
from gpumond.store.store import Store
async def main():
    store = Store(Path(sys.argv[1]))
    await store.open()
    number = 0
    while True:
        number += 1
        await rule_table(store).put(f"rule{number % 50}", {"number": number}, "token")
        print(number, flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("after", [1, 7, 40, 111])
def test_acknowledged_changes_survive_a_kill_of_the_writer(path: Path, after: int):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert writer.stdout
    for _ in range(after):
        acknowledged = int(writer.stdout.readline())
    writer.kill()
    acknowledged = max([acknowledged, *(int(line) for line in writer.stdout if line.endswith("\n"))])
    writer.wait()
    writer.stdout.close()
    entries = with_store(path, lambda store: store.audit_entries(10_000))
    assert len(entries) >= acknowledged
