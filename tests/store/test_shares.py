"""Flushes of one user displace no rows of administrators or of other users."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

from gpumond.facts.pools import Receipt
from gpumond.store.audit import MAX_READ_BYTES
from gpumond.store.store import Store, StoreLimits
from tests.helpers.opened_store import RECEIPT, over, with_store

SMALL = StoreLimits(
    max_bytes=400_000, max_audit_entries=500, max_audit_entries_of_user=50, max_receipts=40, max_past_alerts=40
)
ADMINISTRATORS = tuple(dict.fromkeys(("token", "token:nightly", "uid:0", f"uid:{os.geteuid()}", "rule:full")))


def test_audit_entry_has_at_most_4_kib_with_totals_and_a_hash(path: Path):
    async def work(store: Store) -> list[int]:
        detail = {"id": "f1", "released_bytes": 7, "receipts": [{"pid": number} for number in range(100_000)]}
        await store.audit("uid:4711", "flush.receipts", detail)
        (entry,) = await store.audit_entries()
        assert (entry.detail["id"], entry.detail["released_bytes"]) == ("f1", 7)
        assert len(entry.detail["sha256"]) == 64
        db = sqlite3.connect(path)
        sizes = db.execute("SELECT length(actor) + length(action) + length(detail) + 128 FROM audit").fetchall()
        db.close()
        return [size for (size,) in sizes]

    assert max(with_store(path, work)) <= 4096


async def receipts(store: Store, actor: str, number: int) -> None:
    receipt = replace(RECEIPT, requested_by=actor, reason="x" * 500, started_at=time.time())
    await store.add_receipts([receipt] * number)


def of(actor: str, receipts: list[Receipt]) -> int:
    return sum(receipt.requested_by == actor for receipt in receipts)


def test_flushes_of_a_user_remove_no_entry_and_no_receipt_of_others(path: Path):
    async def work(store: Store) -> None:
        for actor in ADMINISTRATORS:
            await store.audit(actor, "reload", {"by": actor})
            await receipts(store, actor, 2)
        await store.audit("uid:4712", "flush.request", {})
        await receipts(store, "uid:4712", 2)
        for number in range(300):
            await store.audit("uid:4711", "flush.receipts", {"number": number, "text": "x" * 3000})
            await receipts(store, "uid:4711", 3)
        entries, kept = await store.audit_entries(), await store.receipts()
        others = [entry.actor for entry in entries if entry.actor not in ("gpumond", "uid:4711")]
        assert others == [*ADMINISTRATORS, "uid:4712"]
        assert {entry.actor for entry in await store.audit_entries(include_users=False)} == set(ADMINISTRATORS)
        assert 10 <= sum(entry.actor == "uid:4711" for entry in entries) <= 50
        assert {actor: of(actor, kept) for actor in (*ADMINISTRATORS, "uid:4712")} == dict.fromkeys(
            (*ADMINISTRATORS, "uid:4712"), 2
        )
        assert len(kept) <= 40

    with_store(path, work, SMALL)


def test_users_together_have_half_of_the_receipts_if_administrators_use_the_rest(path: Path):
    async def work(store: Store) -> tuple[int, int, int]:
        await receipts(store, "token", 40)
        for _ in range(40):
            await receipts(store, "uid:4711", 3)
            await receipts(store, "uid:4712", 1)
        kept = await store.receipts()
        return of("token", kept), of("uid:4711", kept), of("uid:4712", kept)

    assert with_store(path, work, SMALL) == (20, 10, 10)


def test_alerts_of_one_rule_do_not_displace_those_of_others(path: Path):
    async def work(store: Store) -> list[str]:
        await store.store_alerts([], [], [replace(over("lost"), rule="device-lost")])
        for number in range(200):
            await store.store_alerts([], [], [over(str(number))])
        return [alert.rule for alert in await store.past_alerts()]

    rules = with_store(path, work, SMALL)
    assert (rules.count("device-lost"), len(rules)) == (1, 40)


def test_audit_of_an_older_version_is_read_with_a_bound(path: Path):
    with_store(path, lambda store: store.audit("token", "reload", {}))
    db = sqlite3.connect(path)
    with db:
        long = json.dumps({"receipts": ["x" * 100] * 100_000})
        db.execute("UPDATE audit SET detail = ?", (long,))
    db.close()

    async def work(store: Store) -> tuple[object, int]:
        first = (await store.audit_entries())[0].detail
        for _ in range(2000):
            await store.audit("token", "reload", {"text": "x" * 3000})
        return first, sum(len(json.dumps(entry.detail)) for entry in await store.audit_entries(100_000))

    detail, size = with_store(path, work)
    assert detail == {"omitted_bytes": len(long)}
    assert MAX_READ_BYTES * 0.9 < size <= MAX_READ_BYTES
