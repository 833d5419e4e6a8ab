"""Possible contents of a disk after a loss of power, from the file operations of a program.

The program runs with ``power.so`` (power.c), which logs each call that changes files, in order. The model:

- The content of a file at its last fsync or fdatasync is present.
- Each write and truncation since then is kept or lost, independently of those before and after it.
- Of a write each sector of 512 bytes is kept or lost (SQLite relies on sectors: PSOW, sqlite.org/psow.html).
- A name created, changed or removed since its directory's last fsync is as before or as after, independently of others.

Journaling file systems keep the order of such changes, and make a new file's name durable with its first fsync: they
lose less than this. Not modeled: a disk that loses synced data or returns data that was never written, and SQLite's
-shm, which is rebuilt from the log.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

SECTOR_BYTES = 512
RECORD = struct.Struct("<cIIQ")
KEPT = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Probabilities that unsynced data is kept; each power loss has one of these."""


def build(directory: Path) -> Path:
    """Compile the library into ``directory`` and return its path. Requires ``cc``."""
    library, source = directory / "power.so", Path(__file__).with_name("power.c")
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", str(library), str(source)], check=True)
    return library


@dataclass(frozen=True, slots=True)
class Event:
    """One call: c created a file, d a directory, w wrote, t truncated, s synced, r renamed, u removed, m is a mark."""

    kind: str
    path: str
    offset: int
    data: bytes


class Log:
    """File to which ``power.so`` writes."""

    def __init__(self, path: Path, library: Path, below: Path) -> None:
        self._path = path
        self.environ = {"LD_PRELOAD": str(library), "POWER_LOG": str(path), "POWER_BELOW": str(below)}

    def mark(self, text: str) -> None:
        """Record a mark after all previous operations and before all later ones."""
        data = text.encode()
        with self._path.open("ab", buffering=0) as file:
            file.write(RECORD.pack(b"m", 0, len(data), 0) + data)

    def events(self) -> list[Event]:
        return list(_parsed(self._path.read_bytes()))


def _parsed(log: bytes) -> Iterator[Event]:
    at = 0
    while at < len(log):
        kind, path_bytes, data_bytes, offset = RECORD.unpack_from(log, at)
        path_at, at = at + RECORD.size, at + RECORD.size + path_bytes + data_bytes
        data_at = path_at + path_bytes
        yield Event(kind.decode(), log[path_at:data_at].decode(), offset, log[data_at:at])


def without_syncs(events: Iterable[Event]) -> list[Event]:
    """Return the events of a disk that reports syncs and does not perform them."""
    return [event for event in events if event.kind != "s"]


def without_commit_syncs(events: Sequence[Event]) -> list[Event]:
    """Return the events as with synchronous=NORMAL: SQLite's log is synced at its start and before the database is
    written from it, and not at a commit.
    """
    done = [n for n, event in enumerate(events) if event.kind != "m"]
    dropped = set()
    for before, number, after in zip(done, done[1:], done[2:], strict=False):
        begins = events[before].kind == "w" and events[before].offset == 0
        checkpoint = events[after].kind == "w" and not events[after].path.endswith("-wal")
        if events[number].kind == "s" and events[number].path.endswith("-wal") and not begins and not checkpoint:
            dropped.add(number)
    return [event for number, event in enumerate(events) if number not in dropped]


@dataclass(eq=False)
class _File:
    synced: bytearray = field(default_factory=bytearray)
    since: list[Event] = field(default_factory=list)

    def sync(self) -> None:
        for event in self.since:
            _change(self.synced, event)
        self.since.clear()

    def after_power_loss(self, rng: Random, kept: float) -> bytes:
        content = bytearray(self.synced)
        for event in self.since:
            for part in _sectors(event) if event.kind == "w" else [event]:
                if rng.random() < kept:
                    _change(content, part)
        return bytes(content)


class _Directory:
    """The name in the parent directory is what can be lost."""


_Entry = _File | _Directory


class Disk:
    """Disk that receives all operations and can return its possible contents after a loss of power now."""

    def __init__(self) -> None:
        self._names: dict[str, _Entry] = {}
        self._synced: dict[str, _Entry] = {}
        self._since: list[tuple[str, str, _Entry | None]] = []
        """Name, the previous name if it was renamed, and the new file or directory, if any."""

    def add(self, event: Event) -> None:
        entry = self._names.get(event.path)
        if event.kind in "cd":
            self._name(event.path, "", _File() if event.kind == "c" else _Directory())
        elif event.kind == "r":
            self._name(event.data.decode(), event.path, entry)
        elif event.kind == "u":
            self._name(event.path, "", None)
        elif event.kind in "wt" and isinstance(entry, _File):
            entry.since.append(event)
        elif event.kind == "s" and isinstance(entry, _File):
            entry.sync()
        elif event.kind == "s":
            self._sync_names(event.path)

    def held(self) -> dict[str, bytes]:
        """Return the content that the running system sees, by path."""
        return self._files(self._names, Random(), 1.0)

    def after_power_loss(self, rng: Random) -> dict[str, bytes]:
        """Return one possible content, by path."""
        kept, names = rng.choice(KEPT), dict(self._synced)
        for change in self._since:
            if rng.random() < kept:
                _rename(names, change)
        return self._files(names, rng, kept)

    def _files(self, names: dict[str, _Entry], rng: Random, kept: float) -> dict[str, bytes]:
        made = {path for path, entry in self._names.items() if isinstance(entry, _Directory)}
        lost = tuple(f"{path}/" for path in made - names.keys())
        return {
            path: entry.after_power_loss(rng, kept)
            for path, entry in names.items()
            if isinstance(entry, _File) and not path.startswith(lost)
        }

    def _name(self, path: str, before: str, entry: _Entry | None) -> None:
        change = (path, before, entry)
        _rename(self._names, change)
        self._since.append(change)

    def _sync_names(self, directory: str) -> None:
        for change in self._since:
            if change[0].rpartition("/")[0] == directory:
                _rename(self._synced, change)
        self._since = [change for change in self._since if change[0].rpartition("/")[0] != directory]


def _rename(names: dict[str, _Entry], change: tuple[str, str, _Entry | None]) -> None:
    path, before, entry = change
    names.pop(before, None)
    names.pop(path, None)
    if entry is not None:
        names[path] = entry


def _change(content: bytearray, event: Event) -> None:
    end = event.offset + len(event.data)
    if event.kind == "t":
        del content[event.offset :]
    content.extend(bytes(max(0, end - len(content))))
    content[event.offset : end] = event.data


def _sectors(event: Event) -> Iterator[Event]:
    at = event.offset
    end = at + len(event.data)
    while at < end:
        stop = min(end, at - at % SECTOR_BYTES + SECTOR_BYTES)
        yield Event("w", event.path, at, event.data[at - event.offset : stop - event.offset])
        at = stop
