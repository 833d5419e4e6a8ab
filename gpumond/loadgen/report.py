"""Report of a load with the expected verdict: the object that ``gpumond load --json`` prints."""

from __future__ import annotations

import os
import time
from typing import Any

from gpumond.loadgen.executor import Executed
from gpumond.loadgen.plan import Plan


def account(made: Plan, done: list[Executed], engine: str, speed: float, started_at: float) -> dict[str, Any]:
    """Return the work done and the truth, in real time and real bytes."""
    last, ended_at = done[-1], time.time()
    sums = ("taken_bytes", "takes", "gives", "flushes", "released_bytes", "checked_bytes", "wrong_words")
    peaks = ("peak_live_bytes", "peak_held_bytes")
    return {
        "scenario": made.scenario,
        "seed": made.seed,
        "options": dict(made.options),
        "engine": engine,
        "device_uuid": last.device_uuid,
        "pid": os.getpid(),
        "started_at": started_at,
        "ended_at": ended_at,
        "speed": speed,
        "scale": last.scale,
        "outcome": last.outcome,
        "detail": last.detail,
        "lives": len(done),
        "truth": _truth(made, done, speed, started_at, ended_at),
        **{name: sum(getattr(one, name) for one in done) for name in sums},
        **{name: max(getattr(one, name) for one in done) for name in peaks},
    }


def _truth(made: Plan, done: list[Executed], speed: float, started_at: float, ended_at: float) -> dict[str, Any]:
    """Return the truth in Unix time. If the load ended before the injection, no verdict is expected."""
    truth = made.truth

    def when(at: float | None) -> float | None:
        return None if at is None else started_at + at / speed

    injected_at = when(truth.injected_at)
    injected = injected_at is not None and injected_at < ended_at
    slope = truth.slope_bytes_per_second
    died = any(one.outcome == "crash" for one in done)  # too few restarts for a loop
    return {
        "kind": truth.kind if injected else "crash" if died else "",
        "form": truth.form if injected else "",
        "injected_at": injected_at if injected else None,
        "ends_at": min(ended_at, when(truth.ends_at) or ended_at) if injected else None,
        "slope_bytes_per_second": slope * done[-1].scale * speed if injected and slope is not None else None,
        "oom_at": when(truth.oom_at) if injected else None,
    }
