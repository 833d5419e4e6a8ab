"""One planned load and its verdicts with their times. bench.diagnosis scores these runs."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.facts.frame import Verdict
from gpumond.features.loadgen.plan import plan
from gpumond.features.loadgen.script import ExpectedVerdict
from tests.helpers.simulated_snapshots import snapshots

QUIET_BYTES = 0.1 * (1 << 30)
"""Noise below this is quiet."""


@dataclass(frozen=True, slots=True)
class Onset:
    at: float
    kind: str
    pid: int | None
    slope: float | None
    left: float | None


@dataclass(frozen=True, slots=True)
class Episode:
    """Times are seconds from the start. ``half`` is the time to OOM that was predicted at half headroom, and ``full``
    the interval in which the fit expected the full device then.
    """

    scenario: str
    seed: int
    without_fault: bool
    view: str
    noise: float
    truth: ExpectedVerdict
    duration: float
    devices: int
    onsets: tuple[Onset, ...]
    half: float | None
    full: tuple[float, float] | None
    snapshots: int
    shapes: int

    def of(self, kind: str) -> list[Onset]:
        return [onset for onset in self.onsets if onset.kind == kind]


SHAPES = frozenset(("warm-up", "steady", "churn", "periodic", "step-change"))


def episode(scenario: str, seed: int, without_fault: bool = False, every: float = 1.0) -> Episode | None:
    """Return the run, or None if there is no without_fault."""
    planned = plan(scenario, seed)
    original = planned
    if without_fault:
        other = planned.without_fault()
        if other is None:
            return None
        planned = other
    truth = original.truth
    half_at = None
    if truth.injected_at is not None and truth.oom_at is not None:
        half_at = (truth.injected_at + truth.oom_at) / 2
    diagnosis, before, onsets = Diagnosis(), frozenset[tuple[str, int | None, str]](), list[Onset]()
    start: float | None = None
    half, full, count, devices, shapes = None, None, 0, 1, 0
    for snapshot in snapshots(planned, every):
        start = snapshot.elapsed_seconds if start is None else start
        at = snapshot.elapsed_seconds - start
        diagnosis = diagnose(diagnosis, snapshot)
        count, devices = count + 1, len(snapshot.devices)
        active = {(verdict.device_uuid, verdict.pid, verdict.kind): verdict for verdict in diagnosis.verdicts}
        for key in active.keys() - before:
            if key[2] in SHAPES:
                shapes += 1
            else:
                onsets.append(_onset(at, active[key]))
        before = frozenset(active)
        if half_at is not None and half is None and at >= half_at:
            leak = next((verdict for verdict in active.values() if verdict.kind == "leak"), None)
            half = -1.0 if leak is None else leak.time_to_oom_seconds
            full = None if leak is None else _full(leak, snapshot.taken_at - at)
    noise = float(original.option("noise") or 0)
    onsets.sort(key=lambda onset: (onset.at, onset.kind, onset.pid or 0))
    return Episode(
        scenario,
        seed,
        without_fault,
        planned.observation.view,
        noise,
        truth,
        at,
        devices,
        tuple(onsets),
        half,
        full,
        count,
        shapes,
    )


def _full(leak: Verdict, start: float) -> tuple[float, float] | None:
    """Return the interval of the full device, in seconds from the unix time ``start``. An end that the fit does not
    limit is infinite.
    """
    fit = leak.fit
    if fit is None or fit.full_at_earliest is None:
        return None
    return fit.full_at_earliest - start, inf if fit.full_at_latest is None else fit.full_at_latest - start


def _onset(at: float, verdict: Verdict) -> Onset:
    slope = dict(verdict.evidence).get("slope_bytes_per_second")
    return Onset(at, verdict.kind, verdict.pid, slope, verdict.time_to_oom_seconds)
