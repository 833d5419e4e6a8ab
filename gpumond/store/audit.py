"""The audit log in the store: append, remove the oldest, read, and verify it against the daemon's log.

After each commit, the daemon logs the number and the digest of each new entry. A copy of this log on another machine
shows whether somebody changed or removed entries, even somebody who can write the store.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from time import time
from typing import Any

from gpumond.host.logs import source_and_message
from gpumond.host.peer import rate_limit_name

log = logging.getLogger(__name__)

LOCK_TIMEOUT_SECONDS = 2.0
"""Seconds to wait for another program that has the file locked."""
CURRENT_OPERATION_ID: ContextVar[str] = ContextVar("OPERATION", default="")
"""Id of the operation on several machines that the present request belongs to, for its entries; empty without one."""
ADMINISTRATORS = "administrators"
"""Counted user (the column ``owner``) of the entries of tokens, root, the daemon's own user, rules and gpumond itself.
A user's have the name of the person, as in ``uid:1000``."""
EVERYONE = "everyone"
MAX_DETAIL_BYTES = 3584
"""Limit of a detail: an entry with all its fields has at most 4 KiB."""
MAX_READ_BYTES = 4 * 1024**2
MAX_OLD_DETAIL_BYTES = 65536
"""Entries of older versions were not limited; ``newest_entries`` omits a longer detail."""

ENTRY_MESSAGE = re.compile(r"audit entry (\d+) of (\S+): \S+, sha256 ([0-9a-f]{64})")
REMOVAL_MESSAGE = re.compile(r"audit entries of (\S+) up to (\d+) were removed")
RENEWAL_MESSAGE = re.compile(r"the store \S+ is corrupt .* and a new one is created")
"""Logged when a store is replaced; the entries of the new store are numbered from 1."""
RENEWAL_LOGGER = "gpumond.store.database"


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One action with its actor and time (Unix seconds). ``detail`` is any JSON value."""

    seq: int
    at: float
    actor: str
    action: str
    detail: Any


def canonical_json(value: Any) -> str:
    """Return the canonical JSON text of a value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def is_user(actor: str) -> bool:
    """Return True if the actor is a local user who is neither root nor the daemon's own user."""
    name = actor.partition("/")[0].partition("@")[0]
    return name.startswith("uid:") and name not in ("uid:0", f"uid:{os.geteuid()}")


def append_entry(db: sqlite3.Connection, actor: str, action: str, detail: Any) -> str:
    """Add an entry in the open transaction, and return its counted user."""
    counted_user = rate_limit_name(actor) if is_user(actor) else ADMINISTRATORS
    db.execute(
        "INSERT INTO audit (at, owner, actor, action, detail) VALUES (?, ?, ?, ?, ?)",
        (time(), counted_user, actor, action, canonical_json(truncate_detail(detail))),
    )
    return counted_user


def truncate_detail(detail: Any) -> Any:
    """Return the detail; if it is too long, its short top-level values, its length and its SHA-256."""
    text = canonical_json(detail)
    if len(text) <= MAX_DETAIL_BYTES:
        return json.loads(text)
    shortened: dict[str, Any] = {"omitted_bytes": len(text), "sha256": sha256(text.encode()).hexdigest()}
    for name, value in detail.items() if isinstance(detail, dict) else ():
        with_value = shortened | {name: value}
        if not isinstance(value, (dict, list, tuple)) and len(canonical_json(with_value)) <= MAX_DETAIL_BYTES:
            shortened = with_value
    return json.loads(canonical_json(shortened))


def newest_entries(
    db: sqlite3.Connection, limit: int, include_users: bool = True, operation: str | None = None
) -> list[AuditEntry]:
    """Return the newest entries, oldest first, up to 4 MiB of detail; all if ``limit`` is negative.

    Unreadable rows are left out, and text that UTF-8 cannot encode is replaced by ``?``. Without ``include_users``:
    only the administrators' entries. ``operation``: only entries of this operation.
    """
    detail_column = (
        f"iif(length(detail) > {MAX_OLD_DETAIL_BYTES}, json_object('omitted_bytes', length(detail)), detail)"
    )
    conditions: dict[str, str] = {}
    if not include_users:
        conditions["owner = ?"] = ADMINISTRATORS
    if operation is not None:
        conditions["instr(detail, ?)"] = canonical_json({"operation": operation})[1:-1]
    where = " AND ".join(conditions) or "1"
    query = f"SELECT seq, at, actor, action, {detail_column} FROM audit WHERE {where} ORDER BY seq DESC"
    rows = db.execute(query, tuple(conditions.values()))
    entries: list[AuditEntry] = []
    size_bytes = 0
    for entry, length in islice(_readable_entries(rows), limit if limit >= 0 else None):
        size_bytes += length
        if size_bytes > MAX_READ_BYTES:
            break
        entries.append(entry)
    return entries[::-1]


def count_entries(db: sqlite3.Connection, counted_user: str) -> int:
    """Return the number of entries of a counted user."""
    return int(db.execute("SELECT count(*) FROM audit WHERE owner = ?", (counted_user,)).fetchone()[0])


def remove_old(db: sqlite3.Connection, oldest_at: float) -> None:
    """Remove the entries before the first one that is not older than ``oldest_at`` (Unix seconds)."""
    query = "SELECT coalesce((SELECT min(seq) - 1 FROM audit WHERE at >= ?), (SELECT max(seq) FROM audit))"
    last_removed_seq = db.execute(query, (oldest_at,)).fetchone()[0]
    if db.execute("DELETE FROM audit WHERE seq <= ?", (last_removed_seq,)).rowcount:
        _log_removal(EVERYONE, last_removed_seq)


def remove_oldest_tenth(db: sqlite3.Connection, counted_user: str) -> None:
    """Remove the oldest tenth of a user's entries."""
    query = "SELECT seq FROM audit WHERE owner = ? ORDER BY seq LIMIT 1 OFFSET ?"
    last_removed_seq = db.execute(query, (counted_user, count_entries(db, counted_user) // 10)).fetchone()[0]
    db.execute("DELETE FROM audit WHERE owner = ? AND seq <= ?", (counted_user, last_removed_seq))
    _log_removal(counted_user, last_removed_seq)


def user_with_most_bytes(db: sqlite3.Connection) -> str:
    """Return the user whose entries have the most bytes; there is one."""
    query = "SELECT owner FROM audit WHERE owner <> ? GROUP BY owner ORDER BY sum(length(detail) + 300) DESC LIMIT 1"
    return str(db.execute(query, (ADMINISTRATORS,)).fetchone()[0])


def last_seq(db: sqlite3.Connection) -> int:
    """Return the number of the newest entry; 0 without entries."""
    return int(db.execute("SELECT coalesce(max(seq), 0) FROM audit").fetchone()[0])


def log_entries(db: sqlite3.Connection, after: int) -> int:
    """Log the number and the digest of each entry after this number; return the last one's number."""
    for row in db.execute(
        "SELECT seq, at, owner, actor, action, detail FROM audit WHERE seq > ? ORDER BY seq", (after,)
    ):
        after = row[0]
        log.info("audit entry %d of %s: %s, sha256 %s", after, row[2], row[4], entry_digest(row))
    return after


def entry_digest(row: tuple[Any, ...]) -> str:
    """Return the SHA-256 of an entry's columns (seq, at, owner, actor, action, detail), in hexadecimal."""
    return sha256(json.dumps(row, default=repr).encode()).hexdigest()


def verify(path: Path, lines: Iterable[str]) -> tuple[int, list[str]]:
    """Compare the audit log in a store's file with lines of the daemon's log. Works while a daemon runs.

    Returns the number of entries that the lines name, and a sentence for each one that was changed or removed since.
    """
    logged: dict[tuple[int, str], str] = {}
    removed: dict[str, int] = {}
    problems = []
    for line in lines:
        source, message = source_and_message(line)
        if source == RENEWAL_LOGGER and RENEWAL_MESSAGE.match(message):
            problems.append(f"{len(logged)} logged entries were in a corrupt store, which was renamed")
            logged, removed = {}, {}
        elif source != __name__:
            continue
        elif match := ENTRY_MESSAGE.match(message):
            logged[int(match[1]), match[3]] = match[2]
        elif match := REMOVAL_MESSAGE.match(message):
            removed[match[1]] = max(int(match[2]), removed.get(match[1], 0))
    try:
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=LOCK_TIMEOUT_SECONDS)
        ) as db:
            db.text_factory = decode_lossless
            for (seq, expected), counted_user in logged.items():
                columns = "seq, at, owner, actor, action, detail"
                row = db.execute(f"SELECT {columns} FROM audit WHERE seq = ?", (seq,)).fetchone()
                if row is None and seq > max(removed.get(counted_user, 0), removed.get(EVERYONE, 0)):
                    problems.append(f"entry {seq} is missing")
                elif row is not None and entry_digest(row) != expected:
                    problems.append(f"entry {seq} was changed")
    except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
        problems.append(f"the audit log can't be read: {error}")
    return len(logged), problems


def decode_lossless(content: bytes) -> str:
    """Return text of the file; bytes that are not UTF-8 become lone surrogates, which no reader of rows accepts."""
    return content.decode("utf-8", "surrogateescape")


def _log_removal(user: str, last_removed_seq: int) -> None:
    log.info("audit entries of %s up to %d were removed: they exceed the store's limits", user, last_removed_seq)


def _readable_entries(rows: sqlite3.Cursor) -> Iterator[tuple[AuditEntry, int]]:
    """Yield the entries that can be written as JSON, each with the length of its detail."""
    for seq, at, actor, action, detail in rows:
        try:
            if not (isinstance(actor, str) and isinstance(action, str)):
                continue
            text = json.dumps([actor, action, json.loads(detail)], ensure_ascii=False)
            actor, action, detail = json.loads(text.encode("utf-8", "replace"))
            entry = AuditEntry(int(seq), float(at), actor, action, detail)
        except (ValueError, TypeError, RecursionError):
            continue
        yield entry, len(text)
