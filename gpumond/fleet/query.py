"""Processes that a PromQL query names. No I/O.

A series identifies a process by pid alone, and a pid can be reused between a scrape and a flush. ``data_seconds``
bounds the age of the data that a query reads: a process that started after that data is another process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpumond.errors import ConfigError
from gpumond.fleet.prometheus import Sample

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
