"""Tokens of Kubernetes service accounts, which the API server verifies by TokenReview (authentication.k8s.io/v1).

The daemon uses the service account of its pod. Its token and the authority of the API server are read for each review,
since the kubelet renews them. The connection is always TLS with a verified certificate.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpumond.config.settings import Settings
from gpumond.config.tokens import digest
from gpumond.facts.errors import ConfigError, HttpError, TokenReviewError
from gpumond.host.files import read_secret, read_text
from gpumond.host.http import Connection, HttpAnswer, Request, exchange_async, trust

ROUTE = "/apis/authentication.k8s.io/v1/tokenreviews"
USER = "system:serviceaccount:"
REVIEW_SECONDS = 5.0
KNOWN_SECONDS = 60.0
"""Time for which a verified token is accepted without another review."""
KNOWN = 1024
PENDING = 16
MAX_ANSWER_BYTES = 1 << 20


class KubernetesTokenReviews:
    """Reviews by the API server at ``host`` and ``port``. ``directory`` contains ``token`` and ``ca.crt``."""

    def __init__(
        self, host: str, port: int, audience: str, directory: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._host, self._port, self._audience, self._directory, self._clock = host, port, audience, directory, clock
        self._accounts: dict[bytes, tuple[str, float]] = {}
        self._pending = 0

    def known(self, token: str) -> str | None:
        """Return the account of a token that was verified less than ``KNOWN_SECONDS`` ago."""
        account, until = self._accounts.get(digest(token), ("", 0.0))
        return account if account and self._clock() < until else None

    async def account(self, token: str) -> str | None:
        """Return ``NAMESPACE/NAME`` of the token's account, None if the token is not valid. Raises TokenReviewError."""
        if self._pending >= PENDING:
            raise TokenReviewError("too many reviews are pending")
        self._pending += 1
        try:
            account = account_of(await self._review(token), self._audience)
        finally:
            self._pending -= 1
        if account is not None:
            if len(self._accounts) >= KNOWN:
                del self._accounts[next(iter(self._accounts))]
            self._accounts[digest(token)] = account, self._clock() + KNOWN_SECONDS
        return account

    async def _review(self, token: str) -> Any:
        spec = {"token": token, "audiences": [self._audience]}
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        try:
            token_of_pod, authorities = read_secret(self._directory / "token"), trust(self._directory / "ca.crt")
            fields = {"Authorization": f"Bearer {token_of_pod}", "Content-Type": "application/json"}
            request = Request("POST", ROUTE, fields, json.dumps(review).encode())
            connection = Connection(self._host, self._port, tls=authorities)
            answer = await exchange_async(connection, request, REVIEW_SECONDS, MAX_ANSWER_BYTES)
        except (ConfigError, HttpError) as error:
            raise TokenReviewError(f"no answer from the API server: {error}") from None
        return content_of(answer)


def content_of(answer: HttpAnswer) -> Any:
    """Return the JSON of a successful answer. Raises TokenReviewError."""
    if answer.status in (401, 403):
        raise TokenReviewError(
            f"the API server answered {answer.status}; allow the daemon's service account to create tokenreviews"
        )
    if answer.status not in (200, 201):
        raise TokenReviewError(f"the API server answered {answer.status}")
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        raise TokenReviewError("the API server's answer isn't JSON") from None


def account_of(review: Any, audience: str) -> str | None:
    """Return ``NAMESPACE/NAME`` of a completed TokenReview, None if the token is not one of a service account for this
    audience. Raises TokenReviewError if the answer is not a review.
    """
    status = review.get("status") if isinstance(review, Mapping) else None
    if not isinstance(status, Mapping) or not isinstance(status.get("user", {}), Mapping):
        raise TokenReviewError("the API server's answer isn't a TokenReview")
    username, audiences = status.get("user", {}).get("username"), status.get("audiences")
    if status.get("authenticated") is not True or not isinstance(audiences, list) or audience not in audiences:
        return None
    if not isinstance(username, str) or not username.startswith(USER):
        return None
    namespace, colon, name = username.removeprefix(USER).partition(":")
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
