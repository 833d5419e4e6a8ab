"""The store's file: opened, checked, locked, set aside when it is corrupt. For one thread."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from gpumond.records import Heartbeat

log = logging.getLogger(__name__)
T = TypeVar("T")

LOCK_SECONDS = 2.0
"""How long to wait for another program that has the file locked."""
STEPS = (
    """
CREATE TABLE rules(name TEXT PRIMARY KEY, etag TEXT NOT NULL, body TEXT NOT NULL);
CREATE TABLE audit(seq INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, actor TEXT NOT NULL, action TEXT NOT NULL,
                   detail TEXT NOT NULL, prev_hash TEXT NOT NULL, hash TEXT NOT NULL);
CREATE TABLE receipts(seq INTEGER PRIMARY KEY AUTOINCREMENT, body TEXT NOT NULL);
CREATE TABLE alerts(body TEXT NOT NULL);
CREATE TABLE notices(receiver TEXT, seq INTEGER, kind TEXT NOT NULL, alert TEXT NOT NULL, PRIMARY KEY (receiver, seq));
CREATE TABLE told(receiver TEXT, labels TEXT, alert TEXT NOT NULL, PRIMARY KEY (receiver, labels));
CREATE TABLE heartbeat(one INTEGER PRIMARY KEY CHECK (one = 1), at REAL NOT NULL, monotonic REAL NOT NULL);
""",
    """
ALTER TABLE receipts ADD COLUMN at REAL NOT NULL DEFAULT 0;
UPDATE receipts SET at = json_extract(body, '$.started_at');
CREATE TABLE past_alerts(seq INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, body TEXT NOT NULL);
CREATE TABLE history(body TEXT NOT NULL);
""",
    """
CREATE TABLE baselines(name TEXT, side TEXT, body TEXT NOT NULL, PRIMARY KEY (name, side));
""",
)
"""From an empty file to the newest schema; ``user_version`` counts those that a file has gone through."""


class Database:
    """One SQLite file and its schema. ``replaced`` hears of a corrupt file that was set aside, on the new one."""

    def __init__(self, path: Path, replaced: Callable[[sqlite3.Connection, str, str], None]) -> None:
        self.path = path
        self.before: Heartbeat | None = None
        self._replaced = replaced
        self._db: sqlite3.Connection | None = None
        self._inode: int | None = None
        self._lock: int | None = None

    def transaction(self, work: Callable[[sqlite3.Connection], T]) -> tuple[T, bool]:
        """What ``work`` returns and whether it changed anything, once it is committed. Raises sqlite3.Error or OSError
        if it cannot be."""
        db = self._connected()
        before = db.total_changes
        db.execute("BEGIN IMMEDIATE")
        try:
            done = work(db)
            db.execute("COMMIT")
        except BaseException as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            if _corrupt(error):
                self._disconnect()
            raise
        return done, db.total_changes > before

    def set_aside(self) -> tuple[str, ...]:
        """The names of corrupt files that nobody has taken away yet."""
        found = self.path.parent.glob(f"{self.path.name}.corrupt-*")
        return tuple(sorted(path.name for path in found if not path.name.endswith(("-wal", "-shm"))))

    def close(self) -> None:
        self._disconnect()
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _connected(self) -> sqlite3.Connection:
        if self._db and _inode(self.path) != self._inode:
            log.error("the store %s was removed or replaced under the daemon; opening what is there now", self.path)
            self._disconnect()
        if self._db is None:
            try:
                self._db = self._connect()
            except sqlite3.DatabaseError as error:
                if not _corrupt(error):
                    raise
                aside = self._put_aside(error)
                self._db = self._connect()
                self._replaced(self._db, aside, str(error))
            self._inode = _inode(self.path)
        return self._db

    def _connect(self) -> sqlite3.Connection:
        prepare(self.path.parent)
        self._claim()
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(self.path, timeout=LOCK_SECONDS, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            ((well,), *_) = db.execute("PRAGMA quick_check(1)").fetchall()
            if well != "ok":
                raise sqlite3.DatabaseError(f"database disk image is malformed: {well}")
            self.before = _prepare_tables(db)
        except BaseException:
            db.close()
            raise
        return db

    def _claim(self) -> None:
        """Hold the lock as long as this process lives, so that two daemons never share a store."""
        if self._lock is not None:
            return
        lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise BlockingIOError("another daemon uses it; stop that one or choose another with --state-dir") from None
        self._lock = lock

    def _disconnect(self) -> None:
        if self._db:
            self._db.close()
        self._db = None

    def _put_aside(self, error: Exception) -> str:
        aside = f"{self.path.name}.corrupt-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
        for ending in ("-wal", "-shm", ""):
            own = self.path.with_name(self.path.name + ending)
            if own.exists():
                own.rename(own.with_name(aside + ending))
        log.error("the store %s is corrupt (%s): it is set aside as %s, and a new one begins", self.path, error, aside)
        return aside


def prepare(directory: Path) -> None:
    """Make the state directory, for this user alone, where a power loss leaves it. Raises OSError with the mend."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in missing:
        _sync_names(each.parent)
    status = directory.lstat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise PermissionError(f"{directory} can be written by others; use one of your own, with --state-dir")


def _sync_names(directory: Path) -> None:
    """SQLite does this for the files that it makes, and for no directory above them."""
    with suppress(OSError):  # not every file system can, and who may not read the directory may not either
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _prepare_tables(db: sqlite3.Connection) -> Heartbeat | None:
    """Make the tables that the file lacks; the last heartbeat in it."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > len(STEPS):
        raise sqlite3.OperationalError(
            f"it was written by a newer gpumond (schema {version}, this one knows {len(STEPS)})"
        )
    if version < len(STEPS):
        steps = "".join(STEPS[version:])
        db.executescript(f"BEGIN IMMEDIATE; {steps} PRAGMA user_version = {len(STEPS)}; COMMIT;")
    row = db.execute("SELECT at, monotonic FROM heartbeat").fetchone()
    return Heartbeat(*row) if row else None


def _corrupt(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, sqlite3.DatabaseError) and ("malformed" in text or "not a database" in text)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
