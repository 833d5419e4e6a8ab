"""Queries to the HTTP API of Prometheus, Thanos or Mimir. They change nothing."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlencode

from gpumond.errors import ConfigError, DaemonError, DiscoveryError
from gpumond.fleet.connection import decoded_answer, send
from gpumond.fleet.http import is_proven, may_receive_token

Point = tuple[float, float]
"""Unix time and value."""


class Sample(NamedTuple):
    """Labels of a series, the unix time at which the query was evaluated, and the value."""

    labels: Mapping[str, str]
    at: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    """``token`` is sent over TLS or to a loopback address only. It is not a token of the daemons."""

    url: str
    trust: ssl.SSLContext
    token: str | None = field(default=None, repr=False)
    timeout_seconds: float = 30.0

    async def proven(self) -> bool:
        """Return whether the server is verified, by TLS or by the kernel."""
        return await asyncio.to_thread(is_proven, self.url, self.timeout_seconds)

    async def targets(self) -> Sequence[Mapping[str, Any]]:
        """Return the active targets. Raises DiscoveryError."""
        data = await self._call("GET", "/api/v1/targets?state=active", None)
        active = data.get("activeTargets") if isinstance(data, Mapping) else None
        if not isinstance(active, list) or not all(isinstance(target, Mapping) for target in active):
            raise DiscoveryError(f"{self.url} does not list its targets, as behind Thanos or Mimir; use --targets")
        return active

    async def query(self, expression: str, at: float | None = None) -> Sequence[Sample]:
        """Return the instant vector of an expression, now or at a unix time.

        Raises DiscoveryError, and ConfigError for an expression that is not valid.
        """
        parameters = {"query": expression} | ({} if at is None else {"time": f"{at:.3f}"})
        data = await self._call("POST", "/api/v1/query", urlencode(parameters).encode())
        if not isinstance(data, Mapping) or data.get("resultType") != "vector":
            raise ConfigError(f"the result of {expression!r:.200} is not an instant vector")
        try:
            return [_sample(series) for series in data["result"]]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DiscoveryError(f"{self.url}: the result has not the format of Prometheus") from None

    async def query_range(self, expression: str, begin: float, end: float, step: float) -> Sequence[Point]:
        """Return unix times and values of the only series of an expression; none without a series.

        Raises DiscoveryError and ConfigError.
        """
        times = {"start": f"{begin:.3f}", "end": f"{end:.3f}", "step": f"{step:.3f}"}
        data = await self._call("POST", "/api/v1/query_range", urlencode({"query": expression, **times}).encode())
        try:
            series = data["result"]
            if data["resultType"] != "matrix" or len(series) > 1:
                raise ValueError
            return [(float(at), float(value)) for at, value in series[0]["values"]] if series else []
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DiscoveryError(f"{self.url}: the result has not the format of Prometheus") from None

    async def _call(self, method: str, path: str, form: bytes | None) -> Any:
        headers = {"Content-Type": "application/x-www-form-urlencoded"} if form is not None else {}
        if self.token and not may_receive_token(self.url):
            raise DiscoveryError(f"{self.url}: the token is not sent without TLS")
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        try:
            url = self.url.rstrip("/") + path
            answer: Any = await decoded_answer(
                await send(url, method, "", form, headers, self.trust, self.timeout_seconds)
            )
        except DaemonError as error:
            kind = ConfigError if error.status in (400, 422) else DiscoveryError  # the expression is not valid
            raise kind(f"{self.url}: {error}") from None
        return answer.get("data") if isinstance(answer, Mapping) else None


def _sample(series: Mapping[str, Any]) -> Sample:
    at, value = series["value"]
    return Sample({str(name): str(text) for name, text in series["metric"].items()}, float(at), float(value))
