"""The audit: a chain of entries, each of which contains the hash of the previous one. No I/O.

An entry that is changed, removed or inserted breaks the chain from there on. The removal of old entries is recorded by
an entry too: the chain then begins after the last entry that the newest entry of action ``trim`` names.

This does *not* protect against an attacker who rewrites the whole file; for that, keep the newest hash elsewhere.
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
"""Action of the entry that a daemon adds if the newest entries of a chain are missing at its start"""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One action with its actor and time (unix seconds). ``detail`` is any JSON value."""

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
    """Return the canonical JSON text of a value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def next_entry(last: tuple[int, str] | None, at: float, actor: str, action: str, detail: Any) -> AuditEntry:
    """Return the entry after ``last`` (number and hash)."""
    seq, prev_hash = (last[0] + 1, last[1]) if last else (1, GENESIS)
    return AuditEntry(seq, at, actor, action, detail, prev_hash, entry_hash(prev_hash, seq, at, actor, action, detail))


def verify(entries: Iterable[AuditEntry]) -> list[str]:
    """Return the defects of the chain as sentences; empty if it is intact. ``entries`` come oldest first."""
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
