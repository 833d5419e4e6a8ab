"""One-time codes that sign a browser in, and the session tokens that they are exchanged for. In memory, as hashes.

A session has the rights of the caller that requested its code, and ends with the caller's own token.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Generic, TypeVar

from gpumond.config.tokens import PREFIX, digest
from gpumond.host.peer import counted_name

CODE_SECONDS = 60.0
SESSION_SECONDS = 12 * 3600.0
PER_CALLER, IN_TOTAL = 8, 256
"""Limits of codes and of sessions. Above one, the oldest ends."""

CallerT = TypeVar("CallerT")


@dataclass(frozen=True, slots=True)
class SignIn(Generic[CallerT]):
    """``origin``: the hash of the caller's token; None if the kernel identified the caller."""

    caller: CallerT
    name: str
    origin: bytes | None
    ends_at: float


class SignIns(Generic[CallerT]):
    def __init__(self) -> None:
        self._codes: dict[bytes, SignIn[CallerT]] = {}
        self._sessions: dict[bytes, SignIn[CallerT]] = {}

    def code(self, caller: CallerT, name: str, token: str | None, now: float) -> str:
        """Return a new code for the caller, which ends after ``CODE_SECONDS``."""
        origin = None if token is None else digest(token)
        return _add(self._codes, SignIn(caller, name, origin, now + CODE_SECONDS), now)

    def exchange(self, code: str, now: float) -> str | None:
        """Return the token of a new session. None if the code does not exist, has ended, or was used before."""
        found = self._codes.pop(digest(code), None)
        if found is None or found.ends_at < now:
            return None
        return _add(self._sessions, SignIn(found.caller, found.name, found.origin, now + SESSION_SECONDS), now)

    def session(self, token_digest: bytes, now: float) -> SignIn[CallerT] | None:
        found = self._sessions.get(token_digest)
        return found if found is not None and found.ends_at >= now else None

    def end(self, token: str) -> bool:
        """End a session. Returns False if it does not exist."""
        return self._sessions.pop(digest(token), None) is not None


def _add(entries: dict[bytes, SignIn[CallerT]], added: SignIn[CallerT], now: float) -> str:
    for key in [key for key, entry in entries.items() if entry.ends_at < now]:
        del entries[key]
    own = [key for key, entry in entries.items() if counted_name(entry.name) == counted_name(added.name)]
    if len(own) >= PER_CALLER:
        del entries[own[0]]
    elif len(entries) >= IN_TOTAL:
        del entries[next(iter(entries))]
    secret = PREFIX + secrets.token_urlsafe(32)
    entries[digest(secret)] = added
    return secret
