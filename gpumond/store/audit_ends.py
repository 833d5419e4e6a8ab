"""The newest entry of each chain of the audit, in a file next to the store.

It detects entries that were removed from the end of the audit. It does not protect against an attacker who can change
this file as well: for that, keep the newest hash on another machine.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

Ends = dict[str, tuple[int, str]]
"""By chain: number and hash of its newest entry"""
NAME = "gpumond.db-audit"
SUFFIX = "-audit"
MAX_BYTES = 1 << 20


def read(store: Path) -> Ends:
    """Read the file; empty if it does not exist or was not written completely."""
    try:
        descriptor = os.open(f"{store}{SUFFIX}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            content, _, checksum = file.read(MAX_BYTES).strip().partition(b"\n")
        if sha256(content).hexdigest().encode() != checksum:
            return {}
        return {str(chain): (int(seq), str(own_hash)) for chain, (seq, own_hash) in json.loads(content).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def write(store: Path, ends: Ends) -> None:
    """Write the file without sync: after a power loss it may be older than the store, or incomplete, and never
    newer.
    """
    content = json.dumps(ends, separators=(",", ":")).encode()
    text = content + b"\n" + sha256(content).hexdigest().encode() + b"\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError):
        descriptor = os.open(f"{store}{SUFFIX}", flags, 0o600)
        try:
            os.pwrite(descriptor, text, 0)
            os.ftruncate(descriptor, len(text))
        finally:
            os.close(descriptor)
