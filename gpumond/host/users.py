"""The users that limits count. A person with a range in ``/etc/subuid`` holds as many uids as the range has.

Limits only: the rights of a uid, and its name in receipts and in the audit, never depend on this module.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

from gpumond.host.files import read_text

FIRST_PERSON = 1000
"""Lower uids are system accounts. Their ranges belong to the containers of a service, not to a person."""
BLOCK = 65536
"""Uids of one container. A block of a system account's range counts as one user."""
CHECK_SECONDS = 1.0

Range = tuple[int, int, int | None]
"""Start and end of a range, and the person that owns it; None for a system account or an unknown name."""


class SubordinateUids:
    """The ranges of ``subuid``, which is read again when it changes. ``passwd`` has the uids of the owners' names."""

    def __init__(self, subuid: Path = Path("/etc/subuid"), passwd: Path = Path("/etc/passwd")) -> None:
        self._subuid, self._passwd = subuid, passwd
        self._version: tuple[int, int, int] | None = None
        self._check_at = float("-inf")
        self._ranges: tuple[list[int], list[Range]] = [], []
        """The starts of the ranges, and the ranges; replaced as a whole, since several threads use them."""

    def person_of(self, uid: int) -> int:
        """Return the uid of the person who owns this uid, or the first uid of its block; ``uid`` without a range."""
        if (now := time.monotonic()) >= self._check_at:
            self._check_at = now + CHECK_SECONDS
            self._refresh()
        starts, ranges = self._ranges
        index = bisect_right(starts, uid) - 1
        if index < 0:
            return uid
        start, end, person = ranges[index]
        if uid >= end:
            return uid
        return start + (uid - start) // BLOCK * BLOCK if person is None else person

    def _refresh(self) -> None:
        try:
            status = os.stat(self._subuid)
            version = status.st_mtime_ns, status.st_size, status.st_ino
            if version == self._version:
                return
            ranges = sorted(self._read(), key=lambda each: each[:2])
        except (OSError, UnicodeDecodeError):
            version, ranges = None, []
        self._version, self._ranges = version, ([start for start, _, _ in ranges], ranges)

    def _read(self) -> Iterator[Range]:
        lines = [line.split(":") for line in read_text(self._subuid).splitlines()]
        accounts = (line.split(":") for line in read_text(self._passwd).splitlines())
        uids = {fields[0]: fields[2] for fields in accounts if len(fields) > 2}
        for owner, start, count in (line for line in lines if len(line) == 3):
            uid = owner if owner.isdecimal() else uids.get(owner, "")
            if start.isdecimal() and count.isdecimal():
                person = int(uid) if uid.isdecimal() and int(uid) >= FIRST_PERSON else None
                yield int(start), int(start) + int(count), person


_uids = SubordinateUids()


def person_of(uid: int) -> int:
    """Return the uid of the person who owns this uid by ``/etc/subuid``, or ``uid``."""
    return _uids.person_of(uid)


def counted_name(name: str) -> str:
    """Return the name under which a caller is counted: that of the person for ``uid:N``, else the name itself."""
    uid = name.removeprefix("uid:")
    return f"uid:{person_of(int(uid))}" if uid != name and uid.isdecimal() else name
