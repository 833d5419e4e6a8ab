"""A damaged store never prevents a start: readable rows are read, and the others are counted."""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gpumond.config.settings import Settings
from gpumond.diagnosis.previous_runs import EarlierUses
from gpumond.facts.alerts import Notification, StoredAlert
from gpumond.facts.errors import StoreUnavailable
from gpumond.facts.frame import Alert, Matcher, Silence
from gpumond.facts.quota import StoredAdmission
from gpumond.facts.suspension import SuspendedMemory, SuspendedProgram
from gpumond.features.alerts.dispatcher import AlertDispatcher
from gpumond.features.baselines.recorder import baseline_table
from gpumond.features.baselines.statistics import Baseline
from gpumond.features.quotas.admissions import admission_table
from gpumond.features.quotas.quotas import quota_table
from gpumond.features.rules.built_in import BUILT_IN
from gpumond.features.rules.registry import RuleRegistry, override_table, rule_table
from gpumond.features.rules.settings import rule_body
from gpumond.features.silences.silences import silence_table
from gpumond.features.suspend.suspender import suspension_table
from gpumond.store.store import HistoryPersistence, Store
from gpumond.tick.history import TIERS, CoarseSeries, History
from tests.helpers.opened_store import RECEIPT, over, with_store

ALERT = Alert(
    rule="full", phase="firing", labels=(("alertname", "full"),), annotations=(), value=1.0, active_at=1.0, fired_at=2.0
)
SILENCE = Silence(
    id="0" * 16,
    matchers=(Matcher("rule", "=", "full"),),
    starts_at=1.0,
    ends_at=2.0,
    author="a",
    reason="b",
    created_at=1.0,
    created_by="token",
)
ADMISSION = StoredAdmission(
    id="",
    owner="uid:1000",
    device_uuid="GPU-a",
    device_index=0,
    need_bytes=1,
    grant_seconds=600.0,
    uid=1000,
    pid=42,
    start_ticks=100,
    program_uid=1000,
    deadline=5.0,
)
TABLES = {
    "rules": "body",
    "rule_overrides": "body",
    "audit": "detail",
    "receipts": "body",
    "alerts": "body",
    "notices": "alert",
    "told": "alert",
    "past_alerts": "body",
    "history": "body",
    "baselines": "body",
    "silences": "body",
    "quotas": "body",
    "admissions": "body",
    "suspensions": "body",
}
"""Tables with rows, and the longest column of each."""


async def fill(store: Store) -> None:
    for number in range(3):
        name = f"rule-{number}"
        await rule_table(store).put(name, rule_body(replace(BUILT_IN[0], name=name)), "token")
        await override_table(store).put(BUILT_IN[number].name, {"threshold": number}, "token")
        await store.audit("uid:4711", "flush.request", {"number": number})
        await store.audit("rule:full", "action", {"labels": [["alertname", f"full-{number}"]]})
        alert = replace(ALERT, labels=(("alertname", f"full-{number}"),))
        notices = [Notification("log", number, "raised", alert), Notification("log", 10 + number, "raised", alert)]
        await store.store_alerts([StoredAlert((), alert, 5.0)] * 3, notices, [over("a")])
        await store.record_delivery(notices[1:], accepted=True)
        await store.add_receipts([replace(RECEIPT, started_at=time.time())])
        silence = replace(SILENCE, id=f"{number:016}")
        await silence_table(store).put(silence.id, silence, "token")
        quota = {"name": name, "match": {"workload": "*"}, "soft_limit": number + 1}
        await quota_table(store).put(name, quota, "token")
        await baseline_table(store, "before").put(name, Baseline(name, None, 1.0, 10.0, 10.0, True, ()))
    series = CoarseSeries(
        device_uuid="GPU-a", pid=None, start_ticks=None, born_at=1.0, records=((None,) * 5,) * len(TIERS), blocks=()
    )
    await store.store_history([series] * 3)
    for number in range(3):
        program = SuspendedProgram(
            id=f"{number}-1",
            pid=number,
            start_ticks=1,
            uid=1000,
            workload="notebook",
            state="suspended",
            since=1.0,
            memory=(SuspendedMemory("GPU-a", 0, 1),),
        )
        await suspension_table(store).put(program.id, program)
    await admission_table(store).replace([replace(ADMISSION, id=f"{number:032}") for number in range(3)])


class SilentOutbox:
    def put(self, alerts: object, news: object) -> list[Notification]:
        return []


async def flush(*_: object) -> Any:
    raise AssertionError("nothing is flushed")


async def start(store: Store) -> dict[str, int]:
    """Return the number of rows of each part that a daemon reads at its start, and that its API reads later. A part
    that the store refuses is absent.
    """
    found: dict[str, int] = {}

    async def read(name: str, work: Callable[[], Awaitable[Any]]) -> None:
        try:
            found[name] = len(await work())
        except StoreUnavailable:
            found[name] = 0

    consequences = AlertDispatcher(store, SilentOutbox(), flush, 0.0)
    await read("activities", consequences.restore)
    history = History()
    await HistoryPersistence(store).restore(history, EarlierUses())
    await read("history", store.history)
    await read("receipts", store.receipts)
    await read("past_alerts", store.past_alerts)
    await read("alerts", lambda: _first(store.stored_alerts()))
    await read("notices", lambda: _first(store.undelivered_notifications(["log"])))
    await read("told", lambda: _second(store.undelivered_notifications(["log"])))
    await read("audit", lambda: store.audit_entries(include_users=False))
    await read("silences", silence_table(store).rows)
    await read("quotas", quota_table(store).rows)
    await read("admissions", admission_table(store).rows)
    await read("suspensions", suspension_table(store).rows)
    await read("baselines", baseline_table(store, "before").rows)
    book = RuleRegistry(Settings(), store)
    await read("wrong", book.load)
    found["rules"] = len([entry for entry in book.entries() if entry.origin == "api"])
    found["rule_overrides"] = len([entry for entry in book.entries() if entry.overrides])
    return found


async def _first(pair: Awaitable[tuple[Any, Any]]) -> Any:
    return (await pair)[0]


async def _second(pair: Awaitable[tuple[Any, Any]]) -> Any:
    return (await pair)[1]


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("intact") / "state" / "gpumond.db"
    with_store(path, fill)
    return path


def copy_of(intact: Path, directory: Path) -> Path:
    shutil.copytree(intact.parent, directory)
    directory.chmod(0o700)
    return directory / intact.name


@pytest.fixture(scope="module")
def expected(intact: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    return with_store(copy_of(intact, tmp_path_factory.mktemp("copy") / "state"), start)


WRONG = (b"\xff", "{}", "[]", 7, "7", '"text"', "null", '{"labels":[["a"]]}', '{"\\ud800":1}', "[" * 5000, "\x00")


@pytest.mark.parametrize("table", TABLES)
def test_unreadable_row_is_skipped_alone_with_a_fault(
    intact: Path, expected: dict[str, int], tmp_path: Path, table: str
):
    column = TABLES[table]
    assert expected[table] >= 3
    for number, wrong in enumerate(WRONG):
        path = copy_of(intact, tmp_path / str(number))
        db = sqlite3.connect(path)
        with db:
            db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT min(rowid) FROM {table})", (wrong,))
        db.close()

        async def work(store: Store) -> tuple[dict[str, int], list[str], bool]:
            found = await start(store)
            return found, [fault.detail for fault in store.faults()], store.writable

        found, faults, writable = with_store(path, work)
        assert writable
        if table == "audit":  # any JSON is a valid detail
            assert found[table] >= expected[table] - 1
        else:
            assert found[table] == expected[table] - 1, wrong
            assert found["wrong"] or faults == [f"1 of the table {table} can't be read and are skipped"]


FLIPS = 200


def test_store_with_flipped_bits_is_opened_or_set_aside(intact: Path, tmp_path: Path):
    rng = Random(14)
    for number in range(FLIPS):
        path = copy_of(intact, tmp_path / str(number))
        content = bytearray(path.read_bytes())
        # Half of them in the header and the schema, where a flip affects the intact file.
        reach = 8192 if number % 2 else len(content)
        for _ in range(rng.choice((1, 1, 3, 50))):
            content[rng.randrange(reach)] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        with_store(path, works)
        shutil.rmtree(path.parent)


async def works(store: Store) -> None:
    await start(store)
    try:
        await change(store)
    except StoreUnavailable:
        if "written by a newer gpumond" not in store.problem:  # it remains unchanged
            await change(store)  # damage that a change detects: the next change sets the file aside


async def change(store: Store) -> None:
    await rule_table(store).put("after", rule_body(BUILT_IN[0]), "token")
    await store.audit("uid:4711", "flush.request", {})
