"""A real Prometheus that scrapes generated metrics of many machines: series, memory, and the cost of each panel.

python -m bench.fleet_series [--machines 2000] [--programs 1 4] [--minutes 4] [--sums] [--owners 1 8] [--save]

Each machine has 8 devices. The pages are those of the daemon's own exposition with the names of the machine, so
series and labels are real; values change with each scrape.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import re
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from bench.result import publish, spread
from gpumond.facts.snapshot import Sensors
from gpumond.features.rules.built_in import BUILT_IN
from gpumond.metrics.exposition import Exposition, ScrapeFormat
from gpumond.metrics.telemetry import Telemetry
from tests.grafana.boards import ROOT, Target, targets
from tests.helpers.agents import GIB
from tests.helpers.prometheus import Prometheus, fill
from tests.helpers.running import series_of, until
from tests.helpers.values import TickState, advance, make_device, make_pool, make_process, make_report, make_snapshot

DEVICES = 8
REPEATS = 5
RULES = ROOT / "deploy/prometheus/gpumond.rules.yaml"
SUMS = ("gpumond-sums", "gpumond-owners")
RECORDED_COUNT = "count(instance:gpumond_wasted_gibibyte_hours:sum1h)"
MACHINE_MARK = "machine-of-this-page"
"""Text in the template that stands for the name of a machine."""

SENSORS = Sensors(
    gpu_utilization_ratio=0.5,
    memory_controller_utilization_ratio=0.4,
    sm_clock_hertz=1.9e9,
    memory_clock_hertz=2.6e9,
    gpu_temperature_celsius=60.0,
    power_watts=500.0,
    energy_joules=1e9,
)


def metrics_page(programs: int, owners: int = 40) -> str:
    """Return the metrics of one machine with 8 devices, this number of programs on each, and at most these owners."""
    devices, reports = [], []
    for index in range(DEVICES):
        uuid = f"GPU-{MACHINE_MARK}-{index}"
        pids = range(1000 + index * programs, 1000 + (index + 1) * programs)
        size = 80 * GIB // programs
        processes = tuple(
            replace(make_process(pid, used_bytes=size * 3 // 4), user=f"user{pid % owners}", comm="python")
            for pid in pids
        )
        devices.append(
            make_device(
                uuid,
                index=index,
                name="H200",
                vendor="nvidia",
                used_bytes=60 * GIB,
                free_bytes=20 * GIB,
                processes=processes,
                sensors=SENSORS,
            )
        )
        reports += [
            make_report(
                pid,
                pools=(make_pool(uuid, live=size // 2, cached=size // 8, stranded=size // 64),),
                workload=f"train-{pid % min(20, owners)}",
            )
            for pid in pids
        ]
    snapshot = make_snapshot(*devices, reports=tuple(reports))
    frame = advance(TickState(), BUILT_IN, snapshot).frame
    return Exposition(Telemetry()).scrape(frame, ScrapeFormat(False)).body.decode()


class Pages(http.server.BaseHTTPRequestHandler):
    """GET /NAME answers with the page of the machine NAME; the values of used memory depend on the time."""

    protocol_version = "HTTP/1.1"
    template = ""

    def do_GET(self) -> None:
        name = self.path.strip("/")
        changing = int(time.time()) % 1000
        text = self.template.replace(MACHINE_MARK, name).replace(str(60 * GIB), str(60 * GIB + changing))
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


class PageServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore connections that Prometheus closes at its end."""


@contextmanager
def serve_pages(template: str) -> Iterator[str]:
    """Serve the pages and yield HOST:PORT."""
    handler = type("PagesOfRun", (Pages,), {"template": template})
    server = PageServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def sums_of(rules: Path, directory: Path) -> tuple[Path, dict[str, Any]]:
    """Return a file with the groups of the sums alone, and the part of a scrape job that keeps what they read."""
    groups = [each for each in yaml_groups(rules) if each["name"] in SUMS]
    file = directory / "sums.yaml"
    file.write_text(yaml.safe_dump({"groups": groups}))
    expressions = [rule["expr"] for group in groups for rule in group["rules"]]
    read = sorted({name for each in expressions for name in re.findall(r"(?<![:\w])gpumond_\w+", each)})
    keep = {"source_labels": ["__name__"], "regex": "|".join(read), "action": "keep"}
    return file, {"metric_relabel_configs": [keep], "scrape_interval": "1m", "scrape_timeout": "1m"}


def yaml_groups(rules: Path) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load(rules.read_text())["groups"]
    return groups


def measure_sums(directory: Path, machines: int, owners: int, minutes: float) -> dict[str, object]:
    """Measure the evaluations of the sums: each minute, without the alerts and the dashboards."""
    template = metrics_page(1, owners)
    rules, job = sums_of(RULES, directory)
    with serve_pages(template) as address:
        jobs = {"gpumond": scrape_job(address, machines) | job}
        with Prometheus(directory / "prometheus", jobs, rules, evaluation="1m") as prometheus:
            until(lambda: count(prometheus, RECORDED_COUNT) == machines, 300, every=1)
            before = own_metrics(prometheus)["process_cpu_seconds_total"]
            evaluations: dict[str, dict[str, float]] = {name: {} for name in SUMS}
            costs: dict[str, float] = {}
            end = time.monotonic() + 60 * minutes
            while time.monotonic() < end:
                for group in read(f"{prometheus.url}/api/v1/rules")["data"]["groups"]:
                    evaluations[group["name"]][group["lastEvaluation"]] = group["evaluationTime"]
                    costs |= {rule["name"]: rule["evaluationTime"] for rule in group["rules"]}
                time.sleep(5)
            cpu_seconds = own_metrics(prometheus)["process_cpu_seconds_total"] - before
            series = own_metrics(prometheus)["prometheus_tsdb_head_series"]
            found = count(prometheus, 'count({__name__=~".+:gpumond_.+"})')
    return {
        "machines": machines,
        "owners_of_a_machine": owners,
        "series": round(series),
        "recorded_series": round(found),
        "evaluation": {
            name: spread(list(each.values())) | {"min_ms": round(min(each.values()) * 1e3, 1)}
            for name, each in evaluations.items()
        },
        "prometheus_cpu_seconds_per_minute": round(cpu_seconds / minutes, 2),
        "load_average": round(os.getloadavg()[0], 1),
        "rules_ms": {name: round(each * 1e3, 1) for name, each in sorted(costs.items(), key=lambda pair: -pair[1])},
    }


def scrape_job(address: str, machines: int) -> dict[str, Any]:
    """Return the scrape configuration: one address, one path and instance for each machine."""
    groups = [
        {"targets": [address], "labels": {"__metrics_path__": f"/node{number}", "instance": f"node{number}:9917"}}
        for number in range(machines)
    ]
    return {"static_configs": groups, "scrape_interval": "15s", "scrape_timeout": "15s"}


def own_metrics(prometheus: Prometheus) -> dict[str, float]:
    """Return the sums of Prometheus' metrics about itself, by name."""
    with urllib.request.urlopen(f"{prometheus.url}/metrics", timeout=60) as answer:
        found: dict[str, float] = {}
        for (name, _), value in series_of(answer.read()).items():
            found[name] = found.get(name, 0.0) + value
    return found


def cost(prometheus: Prometheus, target: Target) -> dict[str, object]:
    """Measure a query of a panel as Grafana sends it: over the time since the start, or now."""
    expression = fill(target.expression, {name: [".*"] for name in ("cluster", "job", "namespace", "machine")})
    parameters: dict[str, str | float] = {"query": expression}
    route = "query"
    if not target.instant:
        route = "query_range"
        parameters |= {"start": prometheus.since, "end": time.time(), "step": 15}
    seconds, size = [], 0
    for _ in range(REPEATS):
        data = urllib.parse.urlencode(parameters).encode()
        began = time.perf_counter()
        with urllib.request.urlopen(f"{prometheus.url}/api/v1/{route}", data, timeout=120) as answer:
            body = answer.read()
        seconds.append(time.perf_counter() - began)
        size = len(body)
    found = json.loads(body)["data"]["result"]
    return {"bytes": size, "series": len(found), **spread(seconds)}


def measure(directory: Path, machines: int, programs: int, minutes: float) -> dict[str, object]:
    template = metrics_page(programs)
    with serve_pages(template) as address:
        jobs = {"gpumond": scrape_job(address, machines)}
        prometheus = Prometheus(directory / "prometheus", jobs, RULES, evaluation="1m")
        try:
            expected = 'count(up{job="gpumond"} == 1)'
            until(lambda: count(prometheus, expected) == machines, 300, every=1)
            until(lambda: count(prometheus, RECORDED_COUNT) == machines, 300, every=1)
            before = own_metrics(prometheus)
            time.sleep(minutes * 60)
            own = own_metrics(prometheus)
            cpu_seconds = own["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]
            panels = {
                f"{target.panel} / {target.legend or 'value'}": cost(prometheus, target)
                for target in targets()
                if target.board == "fleet"
            }
            recorded = 'count({__name__=~".+:gpumond_.+|gpumond:.+"})'
            return {
                "machines": machines,
                "devices": machines * DEVICES,
                "programs_of_a_device": programs,
                "series_of_a_page": len(series_of(template.encode())),
                "series": round(own["prometheus_tsdb_head_series"]),
                "recorded_series": round(count(prometheus, recorded)),
                "prometheus_mib": round(own["process_resident_memory_bytes"] / 2**20),
                "prometheus_cpu_seconds_per_minute": round(cpu_seconds / minutes, 2),
                "rules_seconds": rule_seconds(prometheus),
                "samples_per_second": round(
                    count(prometheus, 'sum(scrape_samples_post_metric_relabeling{job="gpumond"})') / 15
                ),
                "panels": panels,
            }
        finally:
            prometheus.stop()


def read(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def rule_seconds(prometheus: Prometheus) -> dict[str, float]:
    """Return the duration of the last evaluation of each group of rules."""
    groups = read(f"{prometheus.url}/api/v1/rules")["data"]["groups"]
    return {group["name"]: round(group["evaluationTime"], 3) for group in groups}


def count(prometheus: Prometheus, expression: str) -> float:
    found = prometheus.instant(expression)
    return float(found[0]["value"][1]) if found else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=2000)
    parser.add_argument("--programs", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--minutes", type=float, default=4.0, help="time between the first sums and the queries")
    parser.add_argument("--sums", action="store_true", help="measure only the recorded sums, as fleet_sums")
    parser.add_argument("--owners", type=int, nargs="+", default=[1, 8], help="with --sums: owners on each machine")
    parser.add_argument("--save", action="store_true", help="store the figures in bench/results")
    chosen = parser.parse_args()
    figures: dict[str, object] = {}
    measured, unit = (measure_sums, "owners a machine") if chosen.sums else (measure, "programs a device")
    for number in chosen.owners if chosen.sums else chosen.programs:
        with tempfile.TemporaryDirectory() as directory:
            figures[f"{number} {unit}"] = measured(Path(directory), chosen.machines, number, chosen.minutes)
    publish("fleet_sums" if chosen.sums else "fleet_series", figures)


if __name__ == "__main__":
    main()
