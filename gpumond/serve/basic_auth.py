"""Basic authentication of the web configuration's users, with bcrypt in a worker thread, one password at a time."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib

from starlette.exceptions import HTTPException

from gpumond.serve.auth import Tokens, admit

UNKNOWN_USER_HASH = b"$2b$10$xLSGjgzBOIiTV1zpTNensurpReGXXQg6by1XpoS.X4ArnUoHNy6PG"
"""Hash that is checked for unknown users, so that the duration does not reveal which users exist."""
REMEMBERED = 100
WAITING = 16


class Passwords:
    """Password check with a cache of accepted passwords, as hashes of user, bcrypt hash and password."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._accepted: dict[bytes, None] = {}
        self._lock = asyncio.Lock()
        self._waiting = 0

    async def verify(self, users: dict[str, bytes], credentials: str, client: str) -> bool:
        """Return True if the password is correct. Raises 429 after too many failures, 503 if too many checks are
        pending."""
        user, password = _decode(credentials)
        hashed = users.get(user, UNKNOWN_USER_HASH)
        key = _digest(user.encode(), hashed, password)
        if key in self._accepted:
            return True
        admit(self._tokens.failures, client, self._tokens.clock(), "too many wrong tokens or passwords")
        if self._waiting >= WAITING:
            raise HTTPException(503, "too many password checks are pending", {"Retry-After": "1"})
        self._waiting += 1
        try:
            async with self._lock:
                matches = await asyncio.to_thread(_matches, password, hashed)
        finally:
            self._waiting -= 1
        if not matches or user not in users:
            return False
        if len(self._accepted) >= REMEMBERED:
            self._accepted.pop(next(iter(self._accepted)))
        self._accepted[key] = None
        return True


def _decode(credentials: str) -> tuple[str, bytes]:
    try:
        user, _, password = base64.b64decode(credentials.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return "", b""
    return user.decode("utf-8", "replace"), password


def _digest(*parts: bytes) -> bytes:
    """Return a hash of the parts. Each part is hashed separately, so that different parts never collide."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def _matches(password: bytes, hashed: bytes) -> bool:
    import bcrypt

    try:
        return bcrypt.checkpw(password[:72], hashed)  # like bcrypt in Go and in htpasswd, ignores bytes beyond 72
    except ValueError:
        return False
