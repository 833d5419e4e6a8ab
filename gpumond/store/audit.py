"""The audit in the store's file: append, trim, read, verify. All within the open transaction.

The newest entry of each chain of the audit is also in a file next to it, which shows whether entries were removed from
the end of the audit. This does not protect against an attacker who can change that file as well: for that, keep the
newest hash on another machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import Any

from gpumond.host.peer import counted_name

LOCK_SECONDS = 2.0
"""Seconds to wait for another program that has the file locked."""
Ends = dict[str, tuple[int, str]]
"""By chain: number and hash of its newest entry"""
ENDS_NAME = "gpumond.db-audit"
ENDS_SUFFIX = "-audit"
MAX_ENDS_BYTES = 1 << 20

GENESIS = "0" * 64
TRIM = "trim"
MISSING = "audit.missing"
OPERATION: ContextVar[str] = ContextVar("OPERATION", default="")
"""Id of the operation on several machines that the present request belongs to, for its entries; empty without one."""
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
            problems.append(f"entry {entry.seq} doesn't follow entry {before.seq}")
        if entry.action == MISSING:
            problems.append(f"entry {entry.seq} reports that entries were missing when a daemon started")
        removed = entry if entry.action == TRIM else removed
        before = entry
    if first is not None:
        stated = removed.detail if removed else {"through": 0, "hash": GENESIS}
        start = {"through": first.seq - 1, "hash": first.prev_hash}
        if stated != start:
            problems.append(f"entries before {first.seq} are missing, and no entry records their removal")
    return problems


ADMINISTRATORS = ""
"""Name of the administrators' chain. A user's chain has the name of the person, as in ``uid:1000``."""
OTHER_USERS = "uid:*"
MAX_CHAINS = 256
"""Number of users with a chain of their own; the others share one."""
MAX_DETAIL_BYTES = 3584
"""Limit of a detail, so that an entry with all its fields has at most 4 KiB."""
MAX_READ_BYTES = 4 * 1024**2
MAX_OLD_DETAIL_BYTES = 65536
"""Entries of older versions were not limited; ``newest`` omits a detail that is longer than this."""

_COLUMNS = "seq, at, actor, action, detail, prev_hash, hash"


def is_user(actor: str) -> bool:
    """Return True if the actor is a local user who is neither root nor the daemon's own user."""
    return actor.startswith("uid:") and actor not in ("uid:0", f"uid:{os.geteuid()}")


def append(db: sqlite3.Connection, actor: str, action: str, detail: Any) -> str:
    """Add an entry, and return the name of its chain."""
    chain = _chain_of(db, actor)
    _append(db, chain, actor, action, detail)
    return chain


def bounded(detail: Any) -> Any:
    """Return the detail; if it is too long, its short top-level values, its length and its SHA-256."""
    text = canonical(detail)
    if len(text) <= MAX_DETAIL_BYTES:
        return json.loads(text)
    kept: dict[str, Any] = {"omitted_bytes": len(text), "sha256": sha256(text.encode()).hexdigest()}
    for name, value in detail.items() if isinstance(detail, dict) else ():
        longer = kept | {name: value}
        if not isinstance(value, (dict, list, tuple)) and len(canonical(longer)) <= MAX_DETAIL_BYTES:
            kept = longer
    return json.loads(canonical(kept))


def newest(db: sqlite3.Connection, limit: int, users: bool = True, operation: str | None = None) -> list[AuditEntry]:
    """The newest entries, oldest first, up to 4 MiB of detail; all if ``limit`` is negative. Unreadable rows are left
    out, and text that UTF-8 cannot encode is replaced by ``?``. ``operation``: only entries of this operation."""
    size = f"iif(length(detail) > {MAX_OLD_DETAIL_BYTES}, json_object('omitted_bytes', length(detail)), detail)"
    tables = (("audit", "seq"), ("user_audit", "number"))[: 2 if users else 1]
    columns, where = _COLUMNS.replace("detail", size), ""
    values: tuple[str, ...] = ()
    if operation is not None:
        where, values = "WHERE instr(detail, ?)", (canonical({"operation": operation})[1:-1],)
    streams = [
        _readable(db.execute(f"SELECT {columns} FROM {table} {where} ORDER BY {key} DESC", values))
        for table, key in tables
    ]
    found: list[AuditEntry] = []
    size_bytes = 0
    for entry, length in islice(
        merge(*streams, key=lambda each: each[0].at, reverse=True), limit if limit >= 0 else None
    ):
        size_bytes += length
        if size_bytes > MAX_READ_BYTES:
            break
        found.append(entry)
    return found[::-1]


def verify_audit(path: Path) -> list[str]:
    """Return a sentence for each thing that is wrong with the audit in a store's file. Works while a daemon runs."""
    problems: list[str] = []
    recorded = read_ends(path)  # before the entries: a daemon may add some meanwhile
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=LOCK_SECONDS)
        try:
            db.text_factory = lossless
            db.execute("BEGIN")
            for chain in (ADMINISTRATORS, *_chains(db)):
                about = f"chain {chain}: " if chain else ""
                problems += [f"{about}{problem}" for problem in _verify_chain(db, chain, recorded.pop(chain, None))]
            problems += [f"chain {chain}: entries 1 to {seq} are missing" for chain, (seq, _) in recorded.items()]
        finally:
            db.close()
    except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
        problems.append(f"the audit log can't be read: {error}")
    return problems


def count(db: sqlite3.Connection, chain: str = ADMINISTRATORS) -> int:
    first, last = _ends(db, chain)
    return last - first + 1


def trim_old(db: sqlite3.Connection, late: float, cut: float) -> None:
    """Drop entries from before ``cut`` (unix seconds) from each chain whose first entry is from before ``late``."""
    for chain in (ADMINISTRATORS, *_chains(db)):
        table, own, values = _place(chain)
        row = db.execute(f"SELECT at FROM {table} WHERE {own} ORDER BY seq LIMIT 1", values).fetchone()
        if row and isinstance(row[0], float) and row[0] < late:
            query = f"SELECT min(seq) FROM {table} WHERE {own} AND at >= ?"
            young = db.execute(query, (*values, cut)).fetchone()[0]
            _trim(db, chain, (_ends(db, chain)[1] if young is None else young) - 1)


def trim_oldest(db: sqlite3.Connection, chain: str = ADMINISTRATORS) -> None:
    """Drop the oldest tenth of a chain."""
    first, last = _ends(db, chain)
    _trim(db, chain, first + max(1, (last - first) // 10))


def largest_user_chain(db: sqlite3.Connection) -> str | None:
    """The user's chain with the most bytes, of those that can be trimmed."""
    query = "SELECT chain FROM user_audit GROUP BY chain HAVING count(*) > 2 ORDER BY sum(length(detail) + 300) DESC"
    row = db.execute(f"{query} LIMIT 1").fetchone()
    return str(row[0]) if row else None


def newest_ends(db: sqlite3.Connection) -> Iterator[tuple[str, int, str]]:
    """Chain, number and hash of the newest entry of each table."""
    for query in (
        f"SELECT '{ADMINISTRATORS}', seq, hash FROM audit ORDER BY seq DESC LIMIT 1",
        "SELECT chain, seq, hash FROM user_audit ORDER BY number DESC LIMIT 1",
    ):
        for chain, seq, own_hash in db.execute(query):
            yield str(chain), int(seq), str(own_hash)


def note_missing(db: sqlite3.Connection, recorded: Ends) -> list[str]:
    """Compare the chains with what was recorded of their ends when they were written; add an entry for each that is
    shorter or another now."""
    cut = []
    for chain, (seq, own_hash) in recorded.items():
        if problem := _missing_at_end(db, chain, seq, own_hash):
            _append(db, ADMINISTRATORS, "gpumond", MISSING, {"chain": chain, "through": seq, "hash": own_hash})
            cut.append(problem)
    return cut


def _append(db: sqlite3.Connection, chain: str, actor: str, action: str, detail: Any) -> None:
    table, own, values = _place(chain)
    row = db.execute(f"SELECT seq, hash FROM {table} WHERE {own} ORDER BY seq DESC LIMIT 1", values).fetchone()
    entry = next_entry((row[0], str(row[1])) if row else None, time.time(), actor, action, bounded(detail))
    fields = (entry.seq, entry.at, entry.actor, entry.action, canonical(entry.detail), entry.prev_hash, entry.hash)
    if chain:
        db.execute(f"INSERT INTO user_audit (chain, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (chain, *fields))
    else:
        db.execute("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?)", fields)


def _chain_of(db: sqlite3.Connection, actor: str) -> str:
    if not is_user(actor):
        return ADMINISTRATORS
    chain = counted_name(actor)
    known = db.execute("SELECT 1 FROM user_audit WHERE chain = ? LIMIT 1", (chain,)).fetchone()
    return chain if known or len(_chains(db)) < MAX_CHAINS else OTHER_USERS


def _chains(db: sqlite3.Connection) -> list[str]:
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'user_audit'").fetchone():
        return []  # an older version wrote the file
    return [str(chain) for (chain,) in db.execute("SELECT DISTINCT chain FROM user_audit ORDER BY chain")]


def _place(chain: str) -> tuple[str, str, tuple[str, ...]]:
    """Return table, condition and values of a chain."""
    return ("user_audit", "chain = ?", (chain,)) if chain else ("audit", "1", ())


def _trim(db: sqlite3.Connection, chain: str, through: int) -> None:
    """Delete the entries up to ``through`` and record it. The newest entry is kept, since others follow it."""
    table, own, values = _place(chain)
    row = db.execute(f"SELECT hash FROM {table} WHERE {own} AND seq = ?", (*values, through)).fetchone()
    if row is None or through >= _ends(db, chain)[1]:
        return
    db.execute(f"DELETE FROM {table} WHERE {own} AND seq <= ?", (*values, through))
    _append(db, chain, "gpumond", TRIM, {"through": through, "hash": str(row[0])})


def _ends(db: sqlite3.Connection, chain: str) -> tuple[int, int]:
    # SQLite looks up each end in the index; for both in one SELECT it reads every row.
    table, own, values = _place(chain)
    query = f"SELECT (SELECT min(seq) FROM {table} WHERE {own}), (SELECT max(seq) FROM {table} WHERE {own})"
    first, last = db.execute(query, values * 2).fetchone()
    return first or 1, last or 0


def _readable(rows: sqlite3.Cursor) -> Iterator[tuple[AuditEntry, int]]:
    """Yield the entries that can be written as JSON, each with the length of its detail."""
    for row in rows:
        try:
            entry = _entry(row)
            text = json.dumps([entry.actor, entry.action, entry.detail], ensure_ascii=False)
            actor, action, detail = json.loads(text.encode("utf-8", "replace"))
        except (ValueError, TypeError, RecursionError):
            continue
        yield AuditEntry(entry.seq, entry.at, actor, action, detail, entry.prev_hash, entry.hash), len(text)


def _entry(row: tuple[Any, ...]) -> AuditEntry:
    """Decode a row. Raises ValueError, TypeError or RecursionError if it is damaged."""
    seq, at, actor, action, detail, prev_hash, own_hash = row
    for text in (actor, action, prev_hash, own_hash):
        if not isinstance(text, str):
            raise TypeError("not text")
    return AuditEntry(int(seq), float(at), actor, action, json.loads(detail), prev_hash, own_hash)


def _verify_chain(db: sqlite3.Connection, chain: str, end: tuple[int, str] | None) -> Iterator[str]:
    table, own, values = _place(chain)
    damaged: list[str] = []

    def entries() -> Iterator[AuditEntry]:
        for row in db.execute(f"SELECT {_COLUMNS} FROM {table} WHERE {own} ORDER BY seq", values):
            try:
                yield _entry(row)
            except (ValueError, TypeError, RecursionError):
                damaged.append(f"entry {row[0]} can't be read")

    yield from verify(entries())
    yield from damaged
    if end and (problem := _missing_at_end(db, chain, *end)):
        yield problem
    elif not chain:
        last, counted = (
            _ends(db, chain)[1],
            db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'audit'").fetchone(),
        )
        if counted and counted[0] > last:
            yield f"entries {last + 1} to {counted[0]} are missing at the end"


def _missing_at_end(db: sqlite3.Connection, chain: str, seq: int, own_hash: str) -> str | None:
    """Return a sentence if the chain neither contains nor trimmed the entry that was once its newest."""
    table, own, values = _place(chain)
    row = db.execute(f"SELECT hash FROM {table} WHERE {own} AND seq = ?", (*values, seq)).fetchone()
    first, last = _ends(db, chain)
    if row and row[0] != own_hash:
        return f"entry {seq} isn't the one that was recorded in {ENDS_NAME}"
    if row is None and (last == 0 or seq >= first):
        return f"entries {last + 1} to {seq} are missing at the end"
    return None


def read_ends(store: Path) -> Ends:
    """Read the file; empty if it does not exist or was not written completely."""
    try:
        descriptor = os.open(f"{store}{ENDS_SUFFIX}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            content, _, checksum = file.read(MAX_ENDS_BYTES).strip().partition(b"\n")
        if sha256(content).hexdigest().encode() != checksum:
            return {}
        return {str(chain): (int(seq), str(own_hash)) for chain, (seq, own_hash) in json.loads(content).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def write_ends(store: Path, ends: Ends) -> None:
    """Write the file without sync: after a power loss it may be older than the store, or incomplete, and never
    newer.
    """
    content = json.dumps(ends, separators=(",", ":")).encode()
    text = content + b"\n" + sha256(content).hexdigest().encode() + b"\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError):
        descriptor = os.open(f"{store}{ENDS_SUFFIX}", flags, 0o600)
        try:
            os.pwrite(descriptor, text, 0)
            os.ftruncate(descriptor, len(text))
        finally:
            os.close(descriptor)


def lossless(content: bytes) -> str:
    """Text of the file; bytes that are not UTF-8 become lone surrogates, which no reader of rows accepts."""
    return content.decode("utf-8", "surrogateescape")
