"""The demo for an hour, compared in all its views: ``python -m tests.integration.demo_hour [--minutes N] [--out
FILE]``.

Every few seconds one frame is compared in the API, /metrics, the page in Chromium, `top --once` and `status`. At the
end the program prints a summary in JSON: values that changed, alerts that fired and resolved, flushes, and values that
never changed. The exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.browser import PROGRAMS, PageSession, chromium, open_page, ready
from tests.helpers.running import RunningDaemon
from tests.integration.faces import FrameAndAnswers, consistent_frame, disagreements, metrics_of, serving_frame

PAUSE_SECONDS = 5.0
CYCLE_SECONDS = {"leak": 300, "fragmentation": 340}
"""Upper bound of the time in which the demo's programs repeat what their rules detect."""
ROUND_SECONDS = 170
"""The closed loop has something to flush again after this time."""

STILL = ("size", "reserved")
"""Parts of a device that do not change."""
KEPT = 20


@dataclass
class Observations:
    """Observations in order of time."""

    began: float = field(default_factory=time.monotonic)
    comparisons: int = 0
    disagreements: list[str] = field(default_factory=list)
    last_event: int = 0
    events: Counter[str] = field(default_factory=Counter)
    alerts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    verdicts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    outcomes: Counter[str] = field(default_factory=Counter)
    released_bytes: int = 0
    values: dict[str, set[float]] = field(default_factory=lambda: defaultdict(set))
    heaps: list[int] = field(default_factory=list)

    def add_frame(self, daemon: RunningDaemon, now: FrameAndAnswers) -> None:
        for (name, labels), value in metrics_of(now.frame).items():
            named = dict(labels)
            self.values[" ".join([name, *(named[key] for key in ("workload", "share") if key in named)])].add(value)
        _, body, _ = daemon.request("/api/v1/events", Accept="application/json")
        for event in json.loads(body):
            if event["id"] > self.last_event:
                self.last_event = event["id"]
                self._count(event["kind"], dict(event["details"]))

    def _count(self, kind: str, details: dict[str, Any]) -> None:
        self.events[kind] += 1
        subject, _, change = kind.partition("-")
        if subject == "alert":
            self.alerts[details["rule"]][change] += 1
        elif subject == "verdict":
            self.verdicts[details["verdict"]][change] += 1
        elif subject == "flush":
            self.outcomes[details["outcome"]] += 1
            self.released_bytes += details["released_bytes"]

    def summary(self, session: PageSession) -> dict[str, Any]:
        seconds = time.monotonic() - self.began
        found: dict[str, Any] = {
            "seconds": round(seconds),
            "comparisons": self.comparisons,
            "disagreements": len(self.disagreements),
            "first_disagreements": self.disagreements[:KEPT],
            "alerts": {rule: dict(changes) for rule, changes in sorted(self.alerts.items())},
            "verdicts": {kind: dict(changes) for kind, changes in sorted(self.verdicts.items())},
            "events": dict(sorted(self.events.items())),
            "flushes": {"outcomes": dict(self.outcomes), "released_bytes": self.released_bytes},
            "page": {
                "complaints": session.complaints[:KEPT],
                "heap_bytes": self.heaps[:: max(1, len(self.heaps) // 6)],
            },
            "values": {name: len(values) for name, values in sorted(self.values.items())},
        }
        return found | {"wrong": wrong(found)}


def wrong(summary: dict[str, Any]) -> list[str]:
    """Return contradictions, and values that do not change."""
    found = [*summary["first_disagreements"], *summary["page"]["complaints"]]
    for rule, seconds in CYCLE_SECONDS.items():
        changes, due = summary["alerts"].get(rule, {}), summary["seconds"] // seconds - 1
        for change in ("fired", "resolved"):
            if changes.get(change, 0) < due - (change == "resolved"):
                found.append(f"{rule} {change} {changes.get(change, 0)} times, not at least {due}")
    if summary["flushes"]["outcomes"].get("freed", 0) < summary["seconds"] // ROUND_SECONDS - 2:
        found.append(f"flushes of the closed loop were too few: {summary['flushes']['outcomes']}")
    for name, number in summary["values"].items():
        if number < 2 and not any(f"memory_{part}_bytes" in name for part in STILL) and "gpumond_device" in name:
            found.append(f"{name} never moved")
    return found


def observe(directory: Path, minutes: float) -> dict[str, Any]:
    with RunningDaemon(directory / "demo", command="demo") as daemon:
        ready(daemon, PROGRAMS)
        with chromium() as browser, open_page(browser, daemon) as session, serving_frame(daemon) as fake:
            session.shows_content()
            observations, end = Observations(), time.monotonic() + 60 * minutes
            while time.monotonic() < end:
                now = consistent_frame(daemon)
                observations.add_frame(daemon, now)
                observations.disagreements += disagreements(now, session, fake)
                observations.comparisons += 1
                observations.heaps.append(session.page.evaluate("performance.memory.usedJSHeapSize"))
                session.page.wait_for_timeout(1000 * PAUSE_SECONDS)
            summary = observations.summary(session)
            session.complaints.clear()  # the summary contains them
            return summary


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.integration.demo_hour", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the summary goes, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpumond-hour-") as directory:
        summary = observe(Path(directory), options.minutes)
    text = json.dumps(summary, indent=2)
    print(text)  # noqa: T201
    if options.out:
        options.out.write_text(text + "\n")
    return 1 if summary["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
