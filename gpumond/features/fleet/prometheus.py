"""Queries to the HTTP API of Prometheus, Thanos or Mimir. They change nothing."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlencode

from gpumond.agent.transport import trusted_uids
from gpumond.facts.errors import ConfigError, DaemonError, DiscoveryError
from gpumond.features.fleet.connection import call
from gpumond.host.http import Request, is_proven, may_receive_token

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
        return await asyncio.to_thread(is_proven, self.url, self.timeout_seconds, trusted_uids())

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
            answer: Any = await call(url, Request(method, "", headers, form), self.trust, self.timeout_seconds)
        except DaemonError as error:
            kind = ConfigError if error.status in (400, 422) else DiscoveryError  # the expression is not valid
            raise kind(f"{self.url}: {error}") from None
        return answer.get("data") if isinstance(answer, Mapping) else None


def _sample(series: Mapping[str, Any]) -> Sample:
    at, value = series["value"]
    return Sample({str(name): str(text) for name, text in series["metric"].items()}, float(at), float(value))


SCRAPES = "gpumond_snapshot_timestamp_seconds"
"""Metric with the time of the snapshot that was scraped last, by the clock of the machine."""
LOOKBACK_SECONDS = 300.0
"""Prometheus' default lookback: the longest age of a sample in an instant vector, and of a recorded sample."""

_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|`[^`]*`|#[^\n]*', re.DOTALL)
"""Strings and comments."""
_RANGE = re.compile(r"\[([^\]]*)\]|\boffset\s+(-?\s*[\w.]+|\()", re.IGNORECASE)
_DURATION = re.compile(r"(?:\d+(?:ms|[smhdwy]))+")
_PART = re.compile(r"(\d+)(ms|[smhdwy])")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "y": 31536000.0}
_RECORDED = re.compile(r'\bALERTS\b|\b__name__\b|\w:\w|[{,]\s*""\s*[,}]')
"""Names of recorded series and alerts, and selectors whose metric is a string."""


@dataclass(frozen=True, slots=True)
class Named:
    """A process as a query names it: it ran at the unix time ``ran_at``, by the clock of its machine.

    ``uuids`` and ``workloads`` are those of its series; empty without such a label.
    """

    pid: int
    ran_at: float
    uuids: frozenset[str] = frozenset()
    workloads: frozenset[str] = frozenset()


def data_seconds(expression: str) -> float:
    """Return an upper bound of the time before the last scrape from which a query reads data: the sum of its ranges,
    resolutions and offsets, and the lookback if it reads recorded series or alerts.

    Raises ConfigError for the modifier ``@`` and for durations of another form.
    """
    code = _TEXT.sub('""', expression)
    if "@" in code:
        raise ConfigError("the query has the modifier @: its data may be of processes that have ended")
    total = 0.0
    for found in _RANGE.finditer(code):
        for text in (found[1] if found[1] is not None else found[2]).split(":"):
            total += _seconds(text.strip())
    names = re.sub(r"\[[^\]]*\]", "", code)
    return total + (LOOKBACK_SECONDS if _RECORDED.search(names) else 0.0)


def named(
    samples: Iterable[Sample], scrapes: Sequence[Sample], age_seconds: float
) -> Mapping[str, Mapping[int, Named]]:
    """Return the processes that the series of a result name, by instance and pid.

    ``scrapes``: the result of the query SCRAPES at the same time. Raises ConfigError for a series without the labels
    instance and pid.
    """
    scraped_at: dict[str, float] = {}
    for sample in scrapes:
        name = sample.labels.get("instance", "")
        scraped_at[name] = min(sample.value, scraped_at.get(name, sample.value))
    found: dict[str, dict[int, Named]] = {}
    for sample in samples:
        instance, pid = sample.labels.get("instance"), sample.labels.get("pid")
        if not instance or not pid:
            raise ConfigError(
                "a series of the result has no labels instance and pid; keep them, for example with by (instance, pid)"
            )
        if not pid.isdecimal():
            continue  # "other": the sum of several processes
        latest = scraped_at.get(instance, sample.at - LOOKBACK_SECONDS)
        own = found.setdefault(instance, {})
        before = own.get(int(pid), Named(int(pid), latest - age_seconds))
        own[int(pid)] = Named(
            before.pid,
            before.ran_at,
            before.uuids | _label(sample, "uuid"),
            before.workloads | _label(sample, "workload"),
        )
    return found


def _label(sample: Sample, name: str) -> frozenset[str]:
    text = sample.labels.get(name)
    return frozenset((text,)) if text else frozenset()


def _seconds(text: str) -> float:
    if not text:
        return 0.0  # the default resolution of a subquery, which reads no earlier data
    if text.isdecimal():
        return float(text)
    if not _DURATION.fullmatch(text):
        raise ConfigError(f"{text!r:.40} in the query is not a duration such as 5m or 1h30m")
    return sum(int(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
