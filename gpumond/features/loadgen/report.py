"""Results of ``gpumond loadgen --report FILE``: one JSON object a line, each compared with the last one like it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpumond import __version__
from gpumond.facts.errors import ConfigError
from gpumond.facts.units import human
from gpumond.features.loadgen.plan import Plan

ALIKE = ("scenario", "backend", "device_uuid", "seed", "options", "speed")
"""Keys that two comparable results have in common."""
INCOMPLETE = ("stopped", "error")
"""Outcomes of loads that were interrupted or did not start; no result is compared with them."""
LOWEST_PEAK = 0.99
"""Share of the last peak below which a peak is a regression: the device offers less memory."""

Result = Mapping[str, Any]


class Report:
    """The file of results. It is read once, before the load. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"--report {path}: {error.strerror or error}") from None
        with open(self._descriptor, encoding="utf-8", errors="replace", closefd=False) as file:
            text = file.read()
        self._results = list(_results(text.splitlines()))
        self._separator = "" if not text or text.endswith("\n") else "\n"  # after an incomplete line

    def add(self, result: Result) -> dict[str, Any]:
        """Append a result and return its comparison: ``compared_with``, ``regressions``. Raises ConfigError."""
        before = next((one for one in reversed(self._results) if _are_alike(one, result)), None)
        compared = {
            "compared_with": None if before is None else before.get("started_at"),
            "regressions": regressions(result, before),
        }
        line = json.dumps({"version": __version__, **result, **compared})
        try:
            os.write(self._descriptor, f"{self._separator}{line}\n".encode())
            os.fsync(self._descriptor)
        except OSError as error:
            raise ConfigError(f"--report {self._path}: {error.strerror or error}") from None
        self._separator = ""
        return compared

    def close(self) -> None:
        os.close(self._descriptor)


def failure(made: Plan, backend: str, started_at: float, detail: str) -> dict[str, Any]:
    """Return the result of a load that could not run, for example because other programs use the device."""
    return {
        "scenario": made.scenario,
        "seed": made.seed,
        "options": dict(made.options),
        "backend": backend,
        "started_at": started_at,
        "ended_at": time.time(),
        "outcome": "error",
        "detail": detail,
    }


def regressions(now: Result, before: Result | None) -> list[str]:
    """Return the reasons for which a result is worse than it should be, or than the one before."""
    found = []
    if now.get("outcome") == "error":
        return [f"the load could not run: {now.get('detail')}"]
    if now["wrong_words"]:
        found.append(f"{now['wrong_words']} incorrect words")
    if now["outcome"] == "full":
        found.append(f"the load ended early: {now['detail']}")
    if before is None or now["outcome"] in INCOMPLETE:
        return found
    last, peak = before.get("peak_live_bytes"), now["peak_live_bytes"]
    if isinstance(last, int) and peak < LOWEST_PEAK * last:
        found.append(f"the peak of live memory fell from {human(last)} to {human(peak)}")
    if before.get("checked_bytes") and not now["checked_bytes"]:
        found.append("no contents were verified")
    return found


def summary(compared: Result) -> str:
    """Return the comparison as one line."""
    at = compared["compared_with"]
    if not isinstance(at, int | float):
        start = "first result of this load on this device"
    else:
        day = datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        start = f"compared with the result of {day} UTC"
    return f"{start}: {'; '.join(compared['regressions']) or 'no regression'}"


def _are_alike(one: Result, other: Result) -> bool:
    return one.get("outcome") not in INCOMPLETE and all(one.get(key) == other.get(key) for key in ALIKE)


def _results(lines: Iterable[str]) -> Iterator[Result]:
    """Yield the results of a file. A line that is incomplete or no result is skipped."""
    for line in lines:
        try:
            result = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(result, dict) and "outcome" in result:
            yield result
