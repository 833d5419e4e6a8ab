"""Authentication of requests: tokens, client certificates, passwords, browsers that signed in, and local users.

Tokens of Kubernetes service accounts are verified by the API server (TokenReview of authentication.k8s.io/v1). The
daemon's own token and the authority for this are read for each review, since the kubelet renews them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

from gpumond.agent.transport import OVERFLOW_UID
from gpumond.config.settings import Settings
from gpumond.config.tokens import TOKEN_PREFIX, Token, token_digest
from gpumond.facts.errors import ConfigError, GpumondError, HttpError, TokenReviewError
from gpumond.host.files import read_secret, read_text
from gpumond.host.http import Connection, HttpRequest, HttpResponse, exchange_async, tls_context
from gpumond.host.peer import rate_limit_name
from gpumond.serve.limits import (
    FAILED_SIGN_INS_PER_MINUTE,
    FLUSHES_PER_MINUTE,
    RECEIVER_TESTS_PER_MINUTE,
    SILENCES_PER_MINUTE,
    TokenBucket,
    user_of,
)

UNKNOWN_USER_HASH = b"$2b$10$xLSGjgzBOIiTV1zpTNensurpReGXXQg6by1XpoS.X4ArnUoHNy6PG"
"""Hash that is checked for unknown users, so the duration does not reveal which users exist."""
MAX_ACCEPTED_PASSWORDS = 100
MAX_PENDING_PASSWORDS = 16


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
        user, password = _decode_credentials(credentials)
        password_hash = users.get(user, UNKNOWN_USER_HASH)
        key = _combined_digest(user.encode(), password_hash, password)
        if key in self._accepted:
            return True
        check_rate(self._tokens.failure_rate, client, self._tokens.clock(), "too many wrong tokens or passwords")
        if self._waiting >= MAX_PENDING_PASSWORDS:
            raise HTTPException(503, "too many password checks are pending", {"Retry-After": "1"})
        self._waiting += 1
        try:
            async with self._lock:
                matches = await asyncio.to_thread(_password_matches, password, password_hash)
        finally:
            self._waiting -= 1
        if not matches or user not in users:
            return False
        if len(self._accepted) >= MAX_ACCEPTED_PASSWORDS:
            self._accepted.pop(next(iter(self._accepted)))
        self._accepted[key] = None
        return True


def _decode_credentials(credentials: str) -> tuple[str, bytes]:
    try:
        user, _, password = base64.b64decode(credentials.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return "", b""
    return user.decode("utf-8", "replace"), password


def _combined_digest(*parts: bytes) -> bytes:
    """Return a hash of the parts. Each part is hashed separately, so different parts never collide."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def _password_matches(password: bytes, password_hash: bytes) -> bool:
    import bcrypt

    try:
        return bcrypt.checkpw(
            password[:72], password_hash
        )  # like bcrypt in Go and in htpasswd, ignores bytes beyond 72
    except ValueError:
        return False


SESSIONS_ROUTE = "/api/v1/sessions"
"""Route where a browser without a token signs in with a code."""

JWT_PATTERN = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
"""Form of the tokens of service accounts; no other token has it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Authenticated client. ``name`` is for receipts and the audit log, such as ``uid:1000`` over the Unix socket,
    ``token:ci@10.0.0.7``, and ``uid:1000/session:3f2a91c0@10.0.0.7``; ``uid`` limits flushes to that user.

    ``allows_sessions``: a browser may have the same rights, since a session ends with the caller's own token.
    """

    name: str
    scopes: frozenset[str]
    uid: int | None = None
    allows_sessions: bool = True

    def may(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes


SIGN_IN_CODE_SECONDS, MAX_SIGN_IN_CODE_SECONDS = 60.0, 600.0
SESSION_SECONDS = 12 * 3600.0
SESSION_DIGITS = 8
"""Digits of the hash of a session's token that tell it from other sessions of its caller."""
MAX_SIGN_INS_PER_CALLER, MAX_SIGN_INS = 8, 256
"""Limits of codes and of sessions. Above one, the oldest ends."""


@dataclass(frozen=True, slots=True)
class SignIn:
    """A code or a session. ``caller_digest``: the hash of the caller's token; None if the kernel identified it."""

    caller: Caller
    caller_digest: bytes | None
    ends_at: float


class SignIns:
    """Codes that sign a browser in once, and the sessions of browsers that have signed in."""

    def __init__(self) -> None:
        self._codes: dict[bytes, SignIn] = {}
        self._sessions: dict[bytes, SignIn] = {}

    def create_code(self, caller: Caller, token: str | None, now: float, seconds: float = SIGN_IN_CODE_SECONDS) -> str:
        """Return a new code for the caller, which ends after ``seconds``."""
        caller_digest = None if token is None else token_digest(token)
        return _add_sign_in(self._codes, SignIn(caller, caller_digest, now + seconds), now)

    def exchange(self, code: str, now: float) -> str | None:
        """Return the token of a new session. None if the code does not exist, has ended, or was used before."""
        sign_in = self._codes.pop(token_digest(code), None)
        if sign_in is None or sign_in.ends_at < now:
            return None
        return _add_sign_in(self._sessions, replace(sign_in, ends_at=now + SESSION_SECONDS), now)

    def session(self, token_digest: bytes, now: float) -> SignIn | None:
        session = self._sessions.get(token_digest)
        return session if session is not None and session.ends_at >= now else None

    def end_session(self, token: str) -> bool:
        """End a session. Returns False if it does not exist."""
        return self._sessions.pop(token_digest(token), None) is not None


def _add_sign_in(entries: dict[bytes, SignIn], added: SignIn, now: float) -> str:
    """Add a code or a session, and return its secret. Removes those that have ended."""
    for key in [key for key, entry in entries.items() if entry.ends_at < now]:
        del entries[key]
    of_caller = [
        key
        for key, entry in entries.items()
        if rate_limit_name(entry.caller.name) == rate_limit_name(added.caller.name)
    ]
    if len(of_caller) >= MAX_SIGN_INS_PER_CALLER:
        del entries[of_caller[0]]
    elif len(entries) >= MAX_SIGN_INS:
        del entries[next(iter(entries))]
    secret = TOKEN_PREFIX + secrets.token_urlsafe(32)
    entries[token_digest(secret)] = added
    return secret


class Tokens:
    """Bearer tokens, kept as hashes. ``admin_tokens`` have all scopes; ``file_tokens`` returns the current entries
    of the file. ``reviews`` verifies the tokens of service accounts; without it, they are wrong tokens.
    """

    def __init__(
        self,
        *admin_tokens: str,
        file_tokens: Callable[[], Sequence[Token]] = tuple,
        clock: Callable[[], float] = time.monotonic,
        reviews: KubernetesTokenReviews | None = None,
    ) -> None:
        self._admin_tokens = [Token("token", frozenset({"admin"}), token_digest(token)) for token in admin_tokens]
        self._file_tokens, self.clock, self.reviews = file_tokens, clock, reviews
        self.sign_ins = SignIns()
        self.failure_rate = TokenBucket(FAILED_SIGN_INS_PER_MINUTE, 60.0)
        self.flush_rate = TokenBucket(FLUSHES_PER_MINUTE, 60.0)
        self.silence_rate = TokenBucket(SILENCES_PER_MINUTE, 60.0)
        self.receiver_test_rate = TokenBucket(RECEIVER_TESTS_PER_MINUTE, 60.0)

    def caller(self, token: str) -> Caller | None:
        """Return the caller with a token; None for a wrong one. An empty token is wrong, whatever the file contains."""
        return self._caller(token_digest(token)) if token else None

    def _caller(self, presented: bytes) -> Caller | None:
        # Compares with every entry, so the duration reveals nothing.
        tokens = (*self._admin_tokens, *self._file_tokens())
        entries = [entry for entry in tokens if hmac.compare_digest(presented, entry.digest)]
        if not entries:
            session = self.sign_ins.session(presented, self.clock())
            if session is None:
                return None
            caller = session.caller if session.caller_digest is None else self._caller(session.caller_digest)
            return caller and replace(caller, name=f"{caller.name}/session:{presented.hex()[:SESSION_DIGITS]}")
        entry = entries[0]
        name = "token" if entry in self._admin_tokens else f"token:{entry.name}"
        return Caller(name, entry.scopes | {"read"})

    def caller_with_subjects(self, subjects: Collection[str]) -> Caller | None:
        """Return the caller with these subjects, such as ``certificate:NAME``; None if the file contains none of them.

        The caller has the scopes of all entries with one of the subjects.
        """
        entries = [entry for entry in self._file_tokens() if entry.subject in subjects] if subjects else []
        if not entries:
            return None
        kind = entries[0].subject.partition(":")[0]
        scopes = frozenset({"read"}).union(*(entry.scopes for entry in entries))
        return Caller(f"{kind}:{entries[0].name}", scopes, allows_sessions=False)


async def authenticate(tokens: Tokens, scope: Mapping[str, Any]) -> Caller | None:
    """Return the caller of an ASGI request, by its token, else by the kernel's peer credentials on a Unix socket or the
    certificate of the client, or the identity that a declared proxy states.

    A wrong token is a 401, and a 429 after ten within a minute by one user. Valid tokens are not rate-limited.
    """
    token = bearer_token(scope)
    state = scope.get("state") or {}
    uid: int | None = state.get("uid")
    if token is None:
        if uid is not None:
            return caller_of_uid(uid)
        caller = tokens.caller_with_subjects(state.get("subjects", ()))
        identity = state.get("identity")
        return caller if caller is None or identity is None else replace(caller, name=f"proxy:{identity.name}")
    if caller := tokens.caller(token):
        source = counted_user(scope)  # several people may have the token
        return caller if caller.name.startswith(f"{source}/") else replace(caller, name=f"{caller.name}@{source}")
    if tokens.reviews is not None and JWT_PATTERN.fullmatch(token):
        caller = await _caller_of_account(tokens, tokens.reviews, token, counted_user(scope))
    if caller is None:
        count_failure(tokens, counted_user(scope))
        raise HTTPException(401, "the token is invalid or has been revoked", {"WWW-Authenticate": "Bearer"})
    return caller


async def _caller_of_account(tokens: Tokens, reviews: KubernetesTokenReviews, token: str, user: str) -> Caller | None:
    """Return the caller with the token of a service account, None if it is not valid.

    An account that the file does not contain is a 403, and a failure of the verification a 503.
    """
    account = reviews.cached_account(token)
    if account is None:
        check_rate(tokens.failure_rate, user, tokens.clock(), "too many wrong tokens or passwords")
        try:
            account = await reviews.review(token)
        except GpumondError as error:
            raise HTTPException(503, f"the token can't be verified: {error}", {"Retry-After": "5"}) from None
    if account is None:
        return None
    caller = tokens.caller_with_subjects({f"service-account:{account}"})
    if caller is None:
        raise HTTPException(403, f"the service account {account} has no scope; add a line for it to tokens_file")
    return caller


def caller_of_uid(uid: int) -> Caller | None:
    if uid in (0, os.geteuid()):
        return Caller(f"uid:{uid}", frozenset({"admin"}))
    if uid == OVERFLOW_UID:
        return None
    return Caller(f"uid:{uid}", frozenset({"read", "flush"}), uid)


def bearer_token(scope: Mapping[str, Any]) -> str | None:
    kind, _, token = header(scope["headers"], b"authorization").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str:
    """Return the first header of this name, or an empty string."""
    return next((value.decode("latin-1") for key, value in headers if key == name), "")


def counted_user(scope: Mapping[str, Any]) -> str:
    """Return the user that a request is counted for (``gpumond.serve.limits``). Not for authorization."""
    state, client = scope.get("state") or {}, scope.get("client")
    user: str = state.get("user") or user_of(state.get("uid"), str(client[0]) if client else "")
    return user


def count_failure(tokens: Tokens, key: str) -> None:
    """Count a failed authentication. Raises 429 after too many failures."""
    count_at_rate(tokens, tokens.failure_rate, key, "too many wrong tokens or passwords")


def count_at_rate(tokens: Tokens, rate: TokenBucket, key: str, refusal: str) -> None:
    """Count a request at this rate. Raises 429 after too many."""
    now = tokens.clock()
    check_rate(rate, key, now, refusal)
    rate.spend(key, now)


def check_rate(rate: TokenBucket, key: str, now: float, refusal: str) -> None:
    """Raise 429 if the next request of ``key`` is above the rate."""
    if (wait_seconds := rate.wait_seconds(key, now)) > 0:
        seconds = math.ceil(wait_seconds)
        raise HTTPException(429, f"{refusal}; retry in {seconds} s", {"Retry-After": str(seconds)})


REVIEW_ROUTE = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCOUNT_PREFIX = "system:serviceaccount:"
REVIEW_TIMEOUT_SECONDS = 5.0
ACCOUNT_CACHE_SECONDS = 60.0
"""Time for which a verified token is accepted without another review."""
MAX_CACHED_ACCOUNTS = 1024
MAX_PENDING_REVIEWS = 16
MAX_RESPONSE_BYTES = 1 << 20


class KubernetesTokenReviews:
    """Reviews by the API server at ``host`` and ``port``. ``directory`` contains ``token`` and ``ca.crt``."""

    def __init__(
        self, host: str, port: int, audience: str, directory: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._host, self._port, self._audience, self._directory, self._clock = host, port, audience, directory, clock
        self._accounts: dict[bytes, tuple[str, float]] = {}
        self._pending = 0

    def cached_account(self, token: str) -> str | None:
        """Return the account of a token that was verified less than ``ACCOUNT_CACHE_SECONDS`` ago."""
        account, until = self._accounts.get(token_digest(token), ("", 0.0))
        return account if account and self._clock() < until else None

    async def review(self, token: str) -> str | None:
        """Return ``NAMESPACE/NAME`` of the token's account, None if the token is not valid. Raises TokenReviewError."""
        if self._pending >= MAX_PENDING_REVIEWS:
            raise TokenReviewError("too many reviews are pending")
        self._pending += 1
        try:
            account = account_of(await self._request_review(token), self._audience)
        finally:
            self._pending -= 1
        if account is not None:
            if len(self._accounts) >= MAX_CACHED_ACCOUNTS:
                del self._accounts[next(iter(self._accounts))]
            self._accounts[token_digest(token)] = account, self._clock() + ACCOUNT_CACHE_SECONDS
        return account

    async def _request_review(self, token: str) -> Any:
        spec = {"token": token, "audiences": [self._audience]}
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        try:
            pod_token, tls = read_secret(self._directory / "token"), tls_context(self._directory / "ca.crt")
            fields = {"Authorization": f"Bearer {pod_token}", "Content-Type": "application/json"}
            request = HttpRequest("POST", REVIEW_ROUTE, fields, json.dumps(review).encode())
            connection = Connection(self._host, self._port, tls=tls)
            response = await exchange_async(connection, request, REVIEW_TIMEOUT_SECONDS, MAX_RESPONSE_BYTES)
        except (ConfigError, HttpError) as error:
            raise TokenReviewError(f"no response from the API server: {error}") from None
        return review_of(response)


def review_of(response: HttpResponse) -> Any:
    """Return the JSON of a successful response. Raises TokenReviewError."""
    if response.status in (401, 403):
        raise TokenReviewError(
            f"the API server responded with {response.status}; allow the daemon's service account to create "
            "tokenreviews"
        )
    if response.status not in (200, 201):
        raise TokenReviewError(f"the API server responded with {response.status}")
    try:
        return json.loads(response.body)
    except (ValueError, RecursionError):
        raise TokenReviewError("the API server's response isn't JSON") from None


def account_of(review: Any, audience: str) -> str | None:
    """Return ``NAMESPACE/NAME`` of a completed TokenReview, None if the token is not one of a service account for this
    audience. Raises TokenReviewError if it is not a review.
    """
    status = review.get("status") if isinstance(review, Mapping) else None
    if not isinstance(status, Mapping) or not isinstance(status.get("user", {}), Mapping):
        raise TokenReviewError("the API server's response isn't a TokenReview")
    username, audiences = status.get("user", {}).get("username"), status.get("audiences")
    if status.get("authenticated") is not True or not isinstance(audiences, list) or audience not in audiences:
        return None
    if not isinstance(username, str) or not username.startswith(ACCOUNT_PREFIX):
        return None
    namespace, colon, name = username.removeprefix(ACCOUNT_PREFIX).partition(":")
    return f"{namespace}/{name}" if colon and namespace and name else None


def make_token_reviews(settings: Settings, environ: Mapping[str, str] = os.environ) -> KubernetesTokenReviews | None:
    """Return the reviews by the API server of the pod, None without an audience. Raises ConfigError."""
    audience, directory = settings.token_review_audience, settings.token_review_directory
    if audience is None:
        return None
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdigit():
        raise ConfigError(
            "token_review_audience requires Kubernetes' API server, but $KUBERNETES_SERVICE_HOST and "
            "$KUBERNETES_SERVICE_PORT don't name it; run the daemon in a pod, or set them"
        )
    for name in ("token", "ca.crt"):
        try:
            read_text(directory / name)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise ConfigError(
                f"token_review_directory: {directory / name}: {reason}; mount the token of the pod's service account"
            ) from None
    return KubernetesTokenReviews(host, int(port), audience, directory)
