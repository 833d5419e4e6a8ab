"""Verdicts scored on the planned loads of the load generator; docs/reference/benchmarks.md describes the protocol.

python -m bench.diagnosis [--seeds N] [--first SEED] [--scenario NAME ...] [--save]

Each scenario runs in virtual time with N seeds (20), and the same load without the injected fault.
``--save`` stores the figures and writes the table of scenarios into docs/reference/benchmarks.md. The method was tuned
on the seeds from 0 on; ``--first 20`` uses other seeds and stores their figures separately.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import inf
from pathlib import Path

from bench.result import publish
from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.facts.frame import Verdict
from gpumond.features.loadgen.plan import SCENARIOS, plan
from gpumond.features.loadgen.scenario_builder import ExpectedVerdict
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
    """Times are seconds from the start. ``half`` is the time to full that was predicted at half headroom, and ``full``
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
    """Return the run, or None if no such load exists."""
    planned = plan(scenario, seed)
    original = planned
    if without_fault:
        other = planned.without_fault()
        if other is None:
            return None
        planned = other
    truth = original.expected_verdict
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
            half = -1.0 if leak is None else leak.time_to_full_seconds
            full = None if leak is None else _full(leak, snapshot.taken_at - at)
    noise = float(dict(original.options).get("noise") or 0)
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
    return Onset(at, verdict.kind, verdict.pid, slope, verdict.time_to_full_seconds)


MIB_PER_MINUTE = (1 << 20) / 60
DAY, HOUR, MINUTE = 86400.0, 3600.0, 60.0
AFTER_SECONDS = 900.0
MIN_QUIET, MIN_NOISY = 32 * MIB_PER_MINUTE, 64 * MIB_PER_MINUTE
SERVING = ("leak-serving", "serving-bimodal", "serving-nightly", "model-loads", "slow-fragmentation")
SAMPLE_SECONDS = dict.fromkeys(("fleet", *SERVING), 57.0)
"""Seconds between two samples, if not 1: as for the fleet in section D of the protocol."""
NEVER_LEAKS = ("warm-up", "autotune", "preallocated", "cache-saturates", "periodic-eval", "curriculum")
VERDICT_GROUPS = ("leak", "fragmentation", "orphan", "crash", "crash-loop", "none")
DOCUMENT = Path(__file__).parent.parent / "docs" / "reference" / "benchmarks.md"
BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--scenario", nargs="*", default=list(SCENARIOS))
    parser.add_argument("--save", action="store_true")
    wanted = parser.parse_args()
    episodes = run_episodes(wanted.scenario, range(wanted.first, wanted.first + wanted.seeds))
    table = matrix(episodes)
    print(table)
    publish("diagnosis_unseen" if wanted.first else "diagnosis", figures(episodes, wanted.seeds))
    if wanted.save and not wanted.first:
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        DOCUMENT.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")


def run_episodes(scenarios: Iterable[str], seeds: Iterable[int]) -> list[Episode]:
    jobs = [(name, seed, without_fault) for seed in seeds for name in scenarios for without_fault in (False, True)]
    with ProcessPoolExecutor() as pool:
        return [done for done in pool.map(_run_episode, jobs) if done is not None]


def _run_episode(job: tuple[str, int, bool]) -> Episode | None:
    name, seed, without_fault = job
    return episode(name, seed, without_fault, SAMPLE_SECONDS.get(name, 1.0))


def is_found(one: Episode, kind: str) -> float | None:
    """Return the time at which the incident was first named, if in time and without an earlier false name."""
    begin = one.truth.injected_at or 0.0
    end = (one.truth.ends_at or one.duration) + AFTER_SECONDS
    times = [onset.at for onset in one.of(kind)]
    if any(at < begin - 1 for at in times):
        return None
    return next((at for at in times if at <= end), None)


def false_leak_count(one: Episode) -> list[float]:
    """Return the onsets of false leaks, at least an hour apart on each process."""
    begin = one.truth.injected_at if one.truth.kind == "leak" and not one.without_fault else math.inf
    last: dict[int | None, float] = {}
    counted = []
    for onset in one.of("leak"):
        if onset.at < (begin or 0.0) and onset.at - last.get(onset.pid, -math.inf) >= HOUR:
            last[onset.pid] = onset.at
            counted.append(onset.at)
    return counted


def should_be_found(one: Episode) -> bool:
    """Return whether a leak is fast enough for its noise, by the protocol's classes."""
    slope = one.truth.slope_bytes_per_second
    if one.without_fault or one.truth.kind != "leak" or slope is None:
        return False
    return slope >= (MIN_QUIET if is_quiet(one) else MIN_NOISY) * 0.999


def is_quiet(one: Episode) -> bool:
    """Return False for serving programs, too: their load changes by gigabytes from sample to sample."""
    return one.noise < QUIET_BYTES and one.scenario not in SERVING


def figures(episodes: Sequence[Episode], seeds: int) -> dict[str, object]:
    leaks = [one for one in episodes if should_be_found(one)]
    false_alarms = {(one.scenario, one.seed) for one in episodes if one.without_fault and one.of("leak")}
    hits = [one for one in leaks if is_found(one, "leak") is not None and (one.scenario, one.seed) not in false_alarms]
    false = [one for one in episodes if false_leak_count(one)]
    recall, precision = _ratio(len(hits), len(leaks)), _ratio(len(hits), len(hits) + len(false))
    others = defaultdict[str, list[Episode]](list)
    for one in episodes:
        if not one.without_fault and one.truth.kind and one.truth.kind != "leak":
            others[one.truth.kind].append(one)
    negatives = [one for one in episodes if one.without_fault or one.truth.kind != "leak"]
    return {
        "seeds": seeds,
        "episodes": len(episodes),
        "device_days": round(sum(one.duration * one.devices for one in episodes) / DAY, 1),
        "leaks": {
            "precision": precision,
            "recall": recall,
            "to_be_found": len(leaks),
            "found": len(hits),
            "episodes_with_a_false_alarm": len(false),
            "missed": [f"{one.scenario} {one.seed} ({one.view})" for one in leaks if one not in hits],
            "false": [
                f"{one.scenario} {one.seed}{' without the fault' if one.without_fault else ''} ({one.view})"
                for one in false
            ],
            "slower_ones_found": _share(
                [
                    is_found(one, "leak") is not None
                    for one in episodes
                    if one.truth.kind == "leak" and not one.without_fault and not should_be_found(one)
                ]
            ),
            "by_view": {
                view: _share([one in hits for one in leaks if one.view == view])
                for view in ("agent", "process", "device")
            },
        },
        "delay_minutes": {
            "quiet_linear_from_30_MiB_a_minute": _delays(
                one for one in leaks if one.truth.form == "linear" and is_quiet(one)
            ),
            "noisy_linear_from_128_MiB_a_minute": _delays(
                one
                for one in leaks
                if one.truth.form == "linear"
                and one.noise >= QUIET_BYTES
                and (one.truth.slope_bytes_per_second or 0) >= 127 * MIB_PER_MINUTE
            ),
            "all_leaks": _delays(leaks),
            **{kind: _delays(ones) for kind, ones in sorted(others.items())},
        },
        **_time_to_full([one for one in leaks if one.truth.form == "linear" and one.scenario not in SERVING]),
        "leak_serving_by_rate": _figures_by_rate(
            [one for one in episodes if one.scenario == "leak-serving" and one.truth.kind and not one.without_fault]
        ),
        "found_of_other_kinds": {
            kind: _share([is_found(one, kind) is not None for one in ones]) for kind, ones in sorted(others.items())
        },
        "leak_verdicts_on_n1_to_n6": sum(len(one.of("leak")) for one in episodes if one.scenario in NEVER_LEAKS),
        "false_alarms": {
            name: _rate([one for one in negatives if one.scenario == name])
            for name in dict.fromkeys(one.scenario for one in negatives)
        },
        "false_alarms_in_all": _rate(negatives),
    }


def matrix(episodes: Sequence[Episode]) -> str:
    """Return a table of the runs by their first alarm: one row for each scenario that has a wrong one, and one for the
    others. Pressure and release are always allowed.
    """
    rows: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for one in episodes:
        right = "" if one.without_fault else one.truth.kind
        slower = ", slower" if right == "leak" and not should_be_found(one) else ""
        answer = _verdict_group(one, right)
        outcome = "correct" if answer == (right or "none") else "missed" if answer == "none" else "another problem"
        rows[f"{one.scenario}: {right}{slower}" if right else "no fault"][outcome] += 1
    wrong = sorted(name for name, counts in rows.items() if set(counts) != {"correct"})
    others = sum(counts["correct"] for name, counts in rows.items() if name not in wrong)
    lines = ["| scenario, with its correct verdict | correct | missed | another problem |", "|---|---:|---:|---:|"]
    for name in wrong:
        counts = rows[name]
        lines.append(f"| {name} | {counts['correct']} | {counts['missed']} | {counts['another problem']} |")
    return "\n".join([*lines, f"| all others | {others} | 0 | 0 |"])


def _verdict_group(one: Episode, right: str) -> str:
    if right and is_found(one, right) is not None:
        return right
    return next((onset.kind for onset in one.onsets if onset.kind in VERDICT_GROUPS), "none")


def _within_factor_2(one: Episode) -> bool:
    if one.half is None or one.half <= 0 or one.truth.oom_at is None or one.truth.injected_at is None:
        return False
    return abs(math.log2(one.half / ((one.truth.oom_at - one.truth.injected_at) / 2))) <= 1


def _in_interval(one: Episode) -> bool:
    return one.full is not None and one.truth.oom_at is not None and one.full[0] <= one.truth.oom_at <= one.full[1]


def _time_to_full(leaks: Sequence[Episode]) -> dict[str, object]:
    """Return how often the time to full that was predicted at half headroom was right. No prediction is wrong."""
    known = [one for one in leaks if one.half is not None]
    return {
        "time_to_full_within_factor_2_at_half_headroom": _share([_within_factor_2(one) for one in known]),
        "time_to_full_in_the_interval_at_half_headroom": _share([_in_interval(one) for one in known]),
    }


def _figures_by_rate(leaks: Sequence[Episode]) -> dict[str, object]:
    """Return recall, delay and time to full by the rate in MiB a minute."""
    rates = defaultdict[int, list[Episode]](list)
    for one in leaks:
        rates[round((one.truth.slope_bytes_per_second or 0.0) / MIB_PER_MINUTE)].append(one)
    return {
        str(rate): {
            "found": _share([is_found(one, "leak") is not None for one in ones]),
            "delay_minutes": _delays(ones),
            **_time_to_full(ones),
        }
        for rate, ones in sorted(rates.items())
    }


def _delays(episodes: Iterable[Episode]) -> dict[str, object]:
    known = [
        (at - (one.truth.injected_at or 0.0)) / MINUTE
        for one in episodes
        if (at := is_found(one, one.truth.kind)) is not None
    ]
    if not known:
        return {"n": 0}
    return {"n": len(known), "median": round(statistics.median(known), 1), "max": round(max(known), 1)}


def _rate(negatives: Sequence[Episode]) -> dict[str, object]:
    """Return false alerts per device-day, with the 95% interval of a Poisson count."""
    count = sum(len(false_leak_count(one)) for one in negatives)
    days = sum(one.duration * one.devices for one in negatives) / DAY
    low, high = poisson(count)
    return {
        "alarms": count,
        "device_days": round(days, 1),
        "per_device_day": round(count / days, 3) if days else None,
        "interval": [round(low / days, 3), round(high / days, 3)] if days else None,
    }


def poisson(count: int, doubt: float = 0.05) -> tuple[float, float]:
    """Return the exact interval of a Poisson mean (Garwood 1936), by bisection."""

    def at_most(k: int, mean: float) -> float:
        return sum(math.exp(-mean + i * math.log(mean) - math.lgamma(i + 1)) for i in range(k + 1)) if mean else 1.0

    def solve(k: int, wanted: float) -> float:
        low, high = 0.0, 10.0 * (k + 10)
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if at_most(k, middle) > wanted else (low, middle)
        return low

    return (solve(count - 1, 1 - doubt / 2) if count else 0.0), solve(count, doubt / 2)


def _share(hits: Sequence[bool]) -> str | None:
    return f"{sum(hits)} of {len(hits)}" if hits else None


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


if __name__ == "__main__":
    main()
