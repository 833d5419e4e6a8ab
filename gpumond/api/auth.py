"""Who may change something: whoever shows the token that the daemon leaves for its own user."""

from __future__ import annotations

import hashlib
import hmac

from fastapi import HTTPException, Request
from fastapi.security import HTTPBearer

bearer = HTTPBearer(auto_error=False, description="The token in the file `token` beside the agents' socket.")


class Tokens:
    """Bearer tokens, kept as hashes."""

    def __init__(self, *tokens: str) -> None:
        self._hashes = [_hash(token) for token in tokens]

    def known(self, token: str) -> bool:
        # Every entry is compared, so that the time taken tells nothing.
        return sum(hmac.compare_digest(_hash(token), known) for known in self._hashes) > 0


def require_token(request: Request) -> str:
    """FastAPI dependency: the caller's name for the receipt, or 401."""
    tokens: Tokens = request.app.state.tokens
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not tokens.known(token.strip()):
        raise HTTPException(
            401,
            "this changes something and wants `Authorization: Bearer TOKEN`; the daemon leaves a token for its own "
            "user in the file `token` beside the agents' socket",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return "token"


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
