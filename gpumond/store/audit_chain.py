"""The audit: a chain of entries, each of which holds the hash of the one before. Pure.

Whoever changes an entry, removes one or puts one in breaks the chain from there on. Old entries are
removed by an entry too: the chain then begins where its newest entry of action ``trim`` says.

This does *not* protect against someone who rewrites the whole file; for that, keep the newest hash elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

GENESIS = "0" * 64
TRIM = "trim"
MISSING = "audit.missing"
"""The daemon found at its start that the newest entries of a chain were not there any more."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Who did what, when (unix seconds). ``detail`` is any JSON value."""

    seq: int
    at: float
    actor: str
    action: str
    detail: Any
    prev_hash: str
    hash: str


def entry_hash(prev_hash: str, seq: int, at: float, actor: str, action: str, detail: Any) -> str:
    """SHA-256 of the entry as canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical([prev_hash, seq, at, actor, action, detail]).encode()).hexdigest()


def canonical(value: Any) -> str:
    """The one JSON text of a value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def follow(last: tuple[int, str] | None, at: float, actor: str, action: str, detail: Any) -> AuditEntry:
    """The entry that comes after ``last`` (number and hash)."""
    seq, prev_hash = (last[0] + 1, last[1]) if last else (1, GENESIS)
    return AuditEntry(seq, at, actor, action, detail, prev_hash, entry_hash(prev_hash, seq, at, actor, action, detail))


def verify(entries: Iterable[AuditEntry]) -> list[str]:
    """What is wrong with the chain, in sentences; empty if it holds. ``entries`` come oldest first."""
    problems: list[str] = []
    first: AuditEntry | None = None
    before: AuditEntry | None = None
    removed: AuditEntry | None = None
    for entry in entries:
        own = entry_hash(entry.prev_hash, entry.seq, entry.at, entry.actor, entry.action, entry.detail)
        if own != entry.hash:
            problems.append(f"entry {entry.seq} was changed")
        if before is None:
            first = entry
        elif entry.seq != before.seq + 1:
            problems.append(f"entries {before.seq + 1} to {entry.seq - 1} are missing")
        elif entry.prev_hash != before.hash:
            problems.append(f"entry {entry.seq} does not follow entry {before.seq}")
        if entry.action == MISSING:
            problems.append(f"entry {entry.seq} reports that entries were missing when a daemon started")
        removed = entry if entry.action == TRIM else removed
        before = entry
    if first is not None:
        stated = removed.detail if removed else {"through": 0, "hash": GENESIS}
        start = {"through": first.seq - 1, "hash": first.prev_hash}
        if stated != start:
            problems.append(f"entries before {first.seq} are missing, and no entry says that they were trimmed")
    return problems
