"""SQLite file of the store: open, check, lock, rename if it is corrupt. For one thread."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import closing, contextmanager, suppress
from math import isfinite
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from gpumond.facts.alerts import ClockTimes
from gpumond.host.files import lock_file
from gpumond.store import audit

log = logging.getLogger(__name__)
T = TypeVar("T")

MIGRATIONS = (
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
UPDATE receipts SET at = coalesce(iif(json_valid(body), json_extract(body, '$.started_at'), 0), 0);
CREATE TABLE past_alerts(seq INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, body TEXT NOT NULL);
CREATE TABLE history(body TEXT NOT NULL);
""",
    """
CREATE TABLE baselines(name TEXT, side TEXT, body TEXT NOT NULL, PRIMARY KEY (name, side));
""",
    """
ALTER TABLE receipts ADD COLUMN owner TEXT NOT NULL DEFAULT '';
UPDATE receipts SET owner = coalesce(iif(json_valid(body), json_extract(body, '$.requested_by'), ''), '');
CREATE INDEX receipts_by_owner ON receipts(owner);
ALTER TABLE past_alerts ADD COLUMN owner TEXT NOT NULL DEFAULT '';
UPDATE past_alerts SET owner = coalesce(iif(json_valid(body), json_extract(body, '$.rule'), ''), '');
CREATE INDEX past_alerts_by_owner ON past_alerts(owner);
CREATE TABLE user_audit(number INTEGER PRIMARY KEY AUTOINCREMENT, chain TEXT NOT NULL, seq INTEGER NOT NULL,
                        at REAL NOT NULL, actor TEXT NOT NULL, action TEXT NOT NULL, detail TEXT NOT NULL,
                        prev_hash TEXT NOT NULL, hash TEXT NOT NULL, UNIQUE (chain, seq));
""",
    """
CREATE TABLE rule_overrides(name TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE silences(id TEXT PRIMARY KEY, body TEXT NOT NULL);
""",
    """
CREATE TABLE quotas(name TEXT PRIMARY KEY, etag TEXT NOT NULL, body TEXT NOT NULL);
""",
    """
CREATE TABLE admissions(id TEXT PRIMARY KEY, body TEXT NOT NULL);
""",
    """
CREATE TABLE pasts(body TEXT NOT NULL);
""",
    """
CREATE TABLE oom_cases(id TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE run_peaks(id TEXT PRIMARY KEY, body TEXT NOT NULL);
""",
    """
CREATE TABLE suspensions(id TEXT PRIMARY KEY, body TEXT NOT NULL);
""",
    """
CREATE TABLE cgroup_limits(id TEXT PRIMARY KEY, body TEXT NOT NULL);
""",
    """
ALTER TABLE audit RENAME TO chained_audit;
CREATE TABLE audit(seq INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, owner TEXT NOT NULL, actor TEXT NOT NULL,
                   action TEXT NOT NULL, detail TEXT NOT NULL);
INSERT INTO audit (at, owner, actor, action, detail)
    SELECT at, 'administrators', actor, action, detail FROM chained_audit
    UNION ALL SELECT at, chain, actor, action, detail FROM user_audit ORDER BY 1;
DROP TABLE chained_audit;
DROP TABLE user_audit;
CREATE INDEX audit_by_owner ON audit(owner);
""",
)
"""Steps from an empty file to the newest schema; ``user_version`` counts those that were applied."""
DAMAGE_MESSAGES = ("malformed", "not a database", "no such table", "no such column", "unsupported file format")
"""Parts of SQLite's messages about a damaged file."""
MAX_SCHEMA_VERSION = 1000
"""Maximum ``user_version`` of a newer gpumond; a higher one is damage."""
FILE_SUFFIXES = ("-wal", "-shm", "")


class Database:
    """One SQLite file and its schema."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last_activity: ClockTimes | None = None
        self._last_logged_seq = 0
        self._damage: sqlite3.DatabaseError | None = None
        self._db: sqlite3.Connection | None = None
        self._inode: int | None = None
        self._lock_descriptor: int | None = None

    def transaction(self, work: Callable[[sqlite3.Connection], T]) -> tuple[T, bool]:
        """Run and commit ``work``; return its result, and True if it changed anything.

        Raises sqlite3.Error or OSError if it cannot be committed.
        """
        db = self._connection()
        before = db.total_changes
        try:
            with _decode_errors_as_damage():
                db.execute("BEGIN IMMEDIATE")
                result = work(db)
                db.execute("COMMIT")
        except BaseException as error:
            with suppress(sqlite3.Error):
                if db.in_transaction:
                    db.execute("ROLLBACK")
            if isinstance(error, sqlite3.DatabaseError) and _is_damage(error):
                self._disconnect()
                self._damage = error
            raise
        changed = db.total_changes > before
        if changed:
            self._last_logged_seq = audit.log_entries(db, self._last_logged_seq)
        return result, changed

    def corrupt_files(self) -> tuple[str, ...]:
        """Return the names of corrupt files in the directory."""
        paths = self.path.parent.glob(f"{self.path.name}.corrupt-*")
        return tuple(sorted(path.name for path in paths if not path.name.endswith(FILE_SUFFIXES[:-1])))

    def close(self) -> None:
        self._disconnect()
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
        self._lock_descriptor = None

    def _connection(self) -> sqlite3.Connection:
        if self._db and _inode(self.path) != self._inode:
            log.error("the store %s was removed or replaced while it was in use; the current file is opened", self.path)
            self._disconnect()
        if self._db is None:
            corrupt_name, reason = "", self._damage
            try:
                self._db = None if reason else self._connect()
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                reason = error
            if self._db is None:
                prepare_state_directory(self.path.parent)
                self._lock_store()
                corrupt_name = self._rename_corrupt_files(reason)
                self._damage = None
                self._db = self._connect()
            self._inode = _inode(self.path)
            with _decode_errors_as_damage():
                if corrupt_name:
                    audit.append_entry(
                        self._db, "gpumond", "store.set-aside", {"file": corrupt_name, "reason": str(reason)}
                    )
                self._last_logged_seq = audit.log_entries(self._db, audit.last_seq(self._db) - 1)
        return self._db

    def _connect(self) -> sqlite3.Connection:
        prepare_state_directory(self.path.parent)
        self._lock_store()
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(self.path, timeout=audit.LOCK_TIMEOUT_SECONDS, isolation_level=None)
        db.text_factory = audit.decode_lossless
        try:
            with _decode_errors_as_damage():
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = FULL")
                ((check_result,), *_) = db.execute("PRAGMA quick_check(1)").fetchall()
                if check_result != "ok":
                    raise sqlite3.DatabaseError(f"database disk image is malformed: {check_result}")
                self.last_activity = _prepare_tables(db)
        except BaseException:
            db.close()
            raise
        return db

    def _lock_store(self) -> None:
        """Hold the lock as long as this process runs, so two daemons never share a store. The file of a lock
        that is held may have been removed with its directory: then the new file is locked."""
        path = self.path.with_name(f"{self.path.name}.lock")
        if self._lock_descriptor is not None:
            if os.fstat(self._lock_descriptor).st_ino == _inode(path):
                return
            os.close(self._lock_descriptor)
            self._lock_descriptor = None
        try:
            self._lock_descriptor = lock_file(path)
        except BlockingIOError:
            raise BlockingIOError("another daemon uses it; stop that one or choose another with --state-dir") from None

    def _disconnect(self) -> None:
        if self._db:
            self._db.close()
        self._db = None

    def _rename_corrupt_files(self, error: Exception | None) -> str:
        corrupt_name = f"{self.path.name}.corrupt-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
        for suffix in FILE_SUFFIXES:
            path = self.path.with_name(self.path.name + suffix)
            if path.exists():
                path.rename(path.with_name(corrupt_name + suffix))
        log.error(
            "the store %s is corrupt (%s): renamed to %s, and a new one is created", self.path, error, corrupt_name
        )
        return corrupt_name


def prepare_state_directory(directory: Path) -> None:
    """Create the state directory, for this user only, and sync it. Raises OSError with the remedy."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in missing:
        _sync_directory(each.parent)
    status = directory.lstat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise PermissionError(f"{directory} is writable by other users; use a directory of your own, with --state-dir")


def _sync_directory(directory: Path) -> None:
    """Sync a directory's names: SQLite does this for its own files, but not for the directories above them."""
    with suppress(OSError):  # some file systems do not support it, and the directory may not be readable
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _prepare_tables(db: sqlite3.Connection) -> ClockTimes | None:
    """Make the tables that the file lacks, and check all of them; return the last heartbeat in it."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if not 0 <= version <= MAX_SCHEMA_VERSION:
        raise sqlite3.DatabaseError(f"database disk image is malformed: schema version {version}")
    if version > len(MIGRATIONS):
        raise sqlite3.OperationalError(
            f"the file was written by a newer gpumond (schema {version}, this version supports up to {len(MIGRATIONS)})"
        )
    if version < len(MIGRATIONS):
        migrations = "".join(MIGRATIONS[version:])
        db.executescript(f"BEGIN IMMEDIATE; {migrations} PRAGMA user_version = {len(MIGRATIONS)}; COMMIT;")
    with closing(sqlite3.connect(":memory:")) as newest_schema:
        newest_schema.executescript("".join(MIGRATIONS))
        for table, columns in _tables(newest_schema).items():
            if _columns(db, table) != columns:
                raise sqlite3.DatabaseError(f"database disk image is malformed: table {table}")
    row = db.execute("SELECT at, monotonic FROM heartbeat").fetchone()
    if row is None or not all(isinstance(value, float) and isfinite(value) for value in row):
        return None
    return ClockTimes(*row)


def _tables(db: sqlite3.Connection) -> dict[str, list[Any]]:
    names = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return {name: _columns(db, name) for (name,) in names}


def _columns(db: sqlite3.Connection, table: str) -> list[Any]:
    return db.execute(f"PRAGMA table_info({table})").fetchall()


@contextmanager
def _decode_errors_as_damage() -> Iterator[None]:
    """sqlite3 raises UnicodeDecodeError where SQLite's message quotes a damaged schema (Python 3.10: no message)."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise sqlite3.DatabaseError(f"database disk image is malformed: {error}") from None


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    text = str(error)
    return isinstance(error, sqlite3.IntegrityError) or not text or any(sign in text for sign in DAMAGE_MESSAGES)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


_Job = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreadExecutor(Executor):
    """Executor with one daemon thread: unlike ThreadPoolExecutor, it does not delay the end of the interpreter."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop after the submitted work; never waits."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del job, future, work
