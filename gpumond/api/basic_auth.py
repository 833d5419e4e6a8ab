"""Basic authentication by the users of the web configuration: bcrypt, off the event loop, one at a time."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib

from fastapi import HTTPException

from gpumond.api.auth import Tokens, admit

NOBODY = b"$2b$10$xLSGjgzBOIiTV1zpTNensurpReGXXQg6by1XpoS.X4ArnUoHNy6PG"
"""A hash for users that there are not, so that the time taken does not tell who there is."""
REMEMBERED = 100
WAITING = 16


class Passwords:
    """Right passwords are remembered, as hashes of user, bcrypt hash and password together."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._right: dict[bytes, None] = {}
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def right(self, users: dict[str, bytes], credentials: str, who: str) -> bool:
        """Raises the 429 for an address with too many failures, and the 503 while too many passwords are checked."""
        user, password = _decode(credentials)
        hashed = users.get(user, NOBODY)
        key = _digest(user.encode(), hashed, password)
        if key in self._right:
            return True
        admit(self._tokens.failures, who, self._tokens.clock(), "too many wrong tokens or passwords")
        if self._waiting >= WAITING:
            raise HTTPException(503, "too many passwords are being checked", {"Retry-After": "1"})
        self._waiting += 1
        try:
            async with self._turn:
                matches = await asyncio.to_thread(_matches, password, hashed)
        finally:
            self._waiting -= 1
        if not matches or user not in users:
            return False
        if len(self._right) >= REMEMBERED:
            self._right.pop(next(iter(self._right)))
        self._right[key] = None
        return True


def _decode(credentials: str) -> tuple[str, bytes]:
    try:
        user, _, password = base64.b64decode(credentials.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return "", b""
    return user.decode("utf-8", "replace"), password


def _digest(*parts: bytes) -> bytes:
    """Each part is hashed by itself, so that no two sets of parts give the same."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def _matches(password: bytes, hashed: bytes) -> bool:
    import bcrypt

    try:
        return bcrypt.checkpw(password[:72], hashed)  # as bcrypt in Go and in htpasswd: what is longer does not count
    except ValueError:
        return False
