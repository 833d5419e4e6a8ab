"""The result of a load. ``gpumond loadgen --report FILE`` keeps it: one JSON object a line, each compared with the last
one like it.
"""

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
from gpumond.features.loadgen.runner import Executed

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


def account(made: Plan, done: list[Executed], backend: str, speed: float, started_at: float) -> dict[str, Any]:
    """Return the work done and the truth, in real time and real bytes."""
    last, ended_at = done[-1], time.time()
    sums = ("taken_bytes", "takes", "gives", "flushes", "released_bytes", "checked_bytes", "wrong_words")
    peaks = ("peak_live_bytes", "peak_held_bytes")
    return {
        **_load(made, backend, started_at, ended_at),
        "device_uuid": last.device_uuid,
        "pid": os.getpid(),
        "speed": speed,
        "scale": last.scale,
        "outcome": last.outcome,
        "detail": last.detail,
        "lives": len(done),
        "truth": _truth(made, done, speed, started_at, ended_at),
        **{name: sum(getattr(run, name) for run in done) for name in sums},
        **{name: max(getattr(run, name) for run in done) for name in peaks},
    }


def _truth(made: Plan, done: list[Executed], speed: float, started_at: float, ended_at: float) -> dict[str, Any]:
    """Return the truth in Unix time. If the load ended before the injection, no verdict is expected."""
    truth = made.truth

    def when(at: float | None) -> float | None:
        return None if at is None else started_at + at / speed

    injected_at = when(truth.injected_at)
    injected = injected_at is not None and injected_at < ended_at
    slope = truth.slope_bytes_per_second
    died = any(run.outcome == "crash" for run in done)  # too few restarts for a loop
    return {
        "kind": truth.kind if injected else "crash" if died else "",
        "form": truth.form if injected else "",
        "injected_at": injected_at if injected else None,
        "ends_at": min(ended_at, when(truth.ends_at) or ended_at) if injected else None,
        "slope_bytes_per_second": slope * done[-1].scale * speed if injected and slope is not None else None,
        "oom_at": when(truth.oom_at) if injected else None,
    }


def failure(made: Plan, backend: str, started_at: float, detail: str) -> dict[str, Any]:
    """Return the result of a load that could not run, for example because other programs use the device."""
    return {**_load(made, backend, started_at, time.time()), "outcome": "error", "detail": detail}


def _load(made: Plan, backend: str, started_at: float, ended_at: float) -> dict[str, Any]:
    return {
        "scenario": made.scenario,
        "seed": made.seed,
        "options": dict(made.options),
        "backend": backend,
        "started_at": started_at,
        "ended_at": ended_at,
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
