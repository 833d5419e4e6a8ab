"""A daemon under adverse conditions for a long time.

python -m bench.survival [--save]

python -m bench.survival --attacks [--minutes 60] [--save]

Without ``--attacks``: two simulated days of kill -9, with agents on real sockets and hostile messages; the receiver has
to be sent every alert and no other, and nothing may stay open.

With ``--attacks``: valid users during all attacks of ``tests/isolation`` at once. It requires root, because each party
has its own uid. The agents of valid users report once a second, their users flush, a rule's action flushes, and a
scraper scrapes once a second. The attackers run at the lowest priority and the daemon at that of its systemd unit: the
figures concern the daemon's fairness, and not the scheduler's. Damaged stores and `gpumond run` are not among the
attacks, because they concern a start.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.result import publish, spread
from bench.scrape import children, rss
from tests.fakenvml import build
from tests.helpers.users import ATTACKER, VICTIM, start
from tests.isolation.machine import DEVICE, GIB, MIB, Agents, Machine
from tests.soak import kills

USERS, AGENTS = 4, 3
FLUSH_SECONDS, ACTION_SECONDS = 10.0, 10.0
LATE_REPORTS = 3
"""A page is late if it shows a report that is older than this number of the agent's reports."""
LIVE = re.compile(r'^gpumond_pool_live_bytes\{.*pid="(\d+)".* (\S+)$', re.MULTILINE)
PID = re.compile(r'^(\w+)\{.*pid="(\d+)"', re.MULTILINE)
RULES = f"""
rules:
  - name: cached
    scope: device
    value: reclaimable_bytes
    above: 0
    action:
      flush: {{min_reclaimable: 1}}
      cooldown: {ACTION_SECONDS:g}
      max_per_hour: 3600
      workloads: ["acted*"]
"""
BOUNDS = {
    "reports_lost": 0,
    "flushes_failed": 0,
    "series_missing": 0,
    "pss_mib_at_most": 150,
    "p99_ms": 50,
    "restarts": 0,
}


class ValidUsers:
    """Users with agents, flushes and a scraper. ``lost`` counts what was missing."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        options: dict[str, Any] = {"listed": True, "seconds": 1.0, "numbered": True, "release_bytes": MIB}
        self.agents: list[Agents] = []
        self.acted: list[Agents] = []
        self._flushers: list[subprocess.Popen[str]] = []
        for user in range(USERS):
            own = [
                machine.agents(VICTIM + user, workload=f"train-{number}", cached_bytes=8 * GIB, **options)
                for number in range(AGENTS - 1)
            ]
            acted = machine.agents(VICTIM + user, workload=f"acted-{user}", cached_bytes=8 * GIB, **options)
            self.agents += [*own, acted]
            self.acted.append(acted)
            arguments = (str(machine.api), str(own[0].pid), str(FLUSH_SECONDS))
            self._flushers.append(start(VICTIM + user, "tests.isolation.flusher", *arguments))
        self.answers: list[dict[str, Any]] = []
        for flusher in self._flushers:
            threading.Thread(target=self._read, args=(flusher,), daemon=True).start()
        self.counts = Counter[str]()
        self.seconds: list[float] = []
        self.series: dict[str, Counter[str]] = {}

    def _read(self, flusher: subprocess.Popen[str]) -> None:
        assert flusher.stdout
        for line in flusher.stdout:
            self.answers.append(json.loads(line))

    def record_series(self) -> None:
        """Record the series that each agent has before the attack."""
        self.series = values_by_pid(self._machine.daemon.request("/metrics")[1].decode())

    def scrape(self) -> None:
        sent = {agents.pid: self.sent(agents) for agents in self.agents}
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self._machine.port, timeout=10)
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            page = answer.read().decode()
            self.counts["scrapes_failed"] += answer.status != 200
        except (OSError, http.client.HTTPException):
            self.counts["scrapes_failed"] += 1
            return
        finally:
            connection.close()
        self.seconds.append(time.perf_counter() - began)
        found, live = values_by_pid(page), dict(LIVE.findall(page))
        for pid, number in sent.items():
            self.counts["series_missing"] += (self.series[str(pid)] - found.get(str(pid), Counter())).total()
            shown = int(float(live.get(str(pid), 0))) - GIB
            self.counts["reports_shown_late"] += number - shown > LATE_REPORTS

    @staticmethod
    def sent(agents: Agents) -> int:
        return next((event["number"] for event in reversed(agents.events) if event["event"] == "sent"), 0)

    def figures(self) -> dict[str, object]:
        failed = [each for each in self.answers if each["status"] != 200 or not each["released_bytes"]]
        left = sum(event["event"] == "left" for agents in self.agents for event in agents.events)
        return {
            "reports_sent": sum(map(self.sent, self.agents)),
            "reports_lost": left,
            "reports_shown_late": self.counts["reports_shown_late"],
            "flushes": len(self.answers),
            "flushes_failed": len(failed),
            "flush_statuses": Counter(each["status"] for each in self.answers),
            "flushes_s_at_most": max((each["seconds"] for each in self.answers), default=None),
            "flushes_by_the_rule": sum(agents.flushes() for agents in self.acted),
            "series_missing": self.counts["series_missing"],
            "scrapes": spread(self.seconds) if self.seconds else None,
            "slowest_scrapes": [
                {"number": number, "ms": round(1000 * seconds, 1)}
                for seconds, number in sorted(((each, at) for at, each in enumerate(self.seconds)), reverse=True)[:10]
            ],
            "scrapes_failed": self.counts["scrapes_failed"],
        }

    def close(self) -> None:
        for flusher in self._flushers:
            assert flusher.stdin
            flusher.stdin.close()
            flusher.wait(60)


def values_by_pid(page: str) -> dict[str, Counter[str]]:
    """Return the names of the series of each process."""
    found: dict[str, Counter[str]] = {}
    for name, pid in PID.findall(page):
        found.setdefault(pid, Counter())[name] += 1
    return found


def attack(machine: Machine) -> list[Agents]:
    """Start every attack, each kind by its own user. Returns the agents whose out-of-memory errors are to grow."""
    silent, own = {"answer": "silence", "cached_bytes": GIB}, {"target": {"all": True}, "timeout_seconds": 600}
    machine.agents(ATTACKER + 100, processes=120, full=True, seconds=1.0)
    reading = {"port": machine.port, "paths": ["/api/v1/frame", "/metrics"], "connections": 250}
    machine.attack("slow_readers", ATTACKER + 100, sources=32, requests=1, **reading)
    machine.attack("silent_agents", ATTACKER + 101, path=str(machine.daemon.socket), connections=4096)
    machine.agents(ATTACKER + 102, processes=3, listed=True, workload="acted", **silent)
    machine.attack("flushes", ATTACKER + 102, path=str(machine.api), body={**own, "dry_run": True}, pause=0.2)
    machine.attack("flushes", ATTACKER + 102, path=str(machine.api), body=own, pause=2.0)
    machine.agents(ATTACKER + 103, processes=2, workload="acted", answer="gain", cached_bytes=GIB)
    for number in range(4):
        device = {"device_uuid": f"GPU-{number}", "workload": f"w{number}"}
        machine.agents(ATTACKER + 104, answer="many", allocators=24, **device)
    machine.attack("flushes", ATTACKER + 104, path=str(machine.api), body={"target": {"all": True}}, pause=2.0)
    machine.attack("previews", ATTACKER + 105, port=machine.port, clients=60)
    machine.attack("event_streams", ATTACKER + 106, port=machine.port, sources=4, each=8)
    machine.attack("bad_text", ATTACKER + 107, port=machine.port, path=str(machine.api))
    claims = {"workload": "train-0", "allocators": 8, "live_bytes": 140 * GIB, "device_uuid": DEVICE}
    return [machine.agents(ATTACKER + 108, ooms=0, **claims)]


def survive(minutes: float) -> dict[str, object]:
    if os.geteuid() != 0:
        raise SystemExit("bench.survival --attacks needs root: each party has a uid of its own")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        place = Path(name)
        place.chmod(0o755)
        (place / "machine").mkdir()
        machine = Machine(
            place / "machine", build(place), RULES, ("nice", "-n", str(min(0, -5 - os.nice(0)))), GPUMOND_INTERVAL="1"
        )
        try:
            return measure(machine, minutes)
        finally:
            machine.close()


def measure(machine: Machine, minutes: float) -> dict[str, object]:
    users = ValidUsers(machine)
    machine.frames(5)
    users.record_series()
    quiet = machine.memory()
    growing, restarts, most, most_rss = attack(machine), 0, 0.0, 0.0
    due = began = time.monotonic()
    ran, waited = processor_seconds(machine.daemon.process.pid)
    while (passed := time.monotonic() - began) < 60 * minutes:
        due = max(due + 1, time.monotonic())
        users.scrape()
        if machine.daemon.process.poll() is not None:
            restarts += 1
            machine.serve()
            ran, waited = 0.0, 0.0
        for agents in growing:
            agents.change(ooms=int(passed / 10))
        most = max(most, machine.memory())
        family = (machine.daemon.process.pid, *children(machine.daemon.process.pid))
        most_rss = max(most_rss, sum(map(rss, family)) / MIB)
        time.sleep(max(0.0, due - time.monotonic()))
    ran_at_end, waited_at_end = processor_seconds(machine.daemon.process.pid)
    passed = time.monotonic() - began
    users.close()
    return {
        "minutes": round((time.monotonic() - began) / 60, 2),
        "bounds": BOUNDS,
        "honest_users": USERS,
        "honest_agents": len(users.agents),
        **users.figures(),
        "pss_mib_before": round(quiet, 1),
        "pss_mib_at_most": round(most, 1),
        "rss_mib_at_most": round(most_rss, 1),
        "restarts": restarts,
        "daemon_runs_percent": round(100 * (ran_at_end - ran) / passed),
        "daemon_waits_for_a_processor_percent": round(100 * (waited_at_end - waited) / passed),
        "load_average": round(os.getloadavg()[0], 1),
        "log_tracebacks": machine.daemon.log.read_text().count("Traceback"),
    }


def processor_seconds(pid: int) -> tuple[float, float]:
    """Return the seconds that the main thread of a process has run, and has waited for a processor."""
    ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(ran) / 1e9, int(waited) / 1e9


def minutes() -> float:
    return float(sys.argv[sys.argv.index("--minutes") + 1]) if "--minutes" in sys.argv else 60.0


DAYS = 2.0


def main() -> None:
    if "--attacks" in sys.argv:
        publish("survival_attacks", survive(minutes()))
        return
    with tempfile.TemporaryDirectory() as directory:
        publish("survival", kills.survive(Path(directory), DAYS))


if __name__ == "__main__":
    main()
