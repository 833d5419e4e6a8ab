"""Compare one frame in every view of it: the API's routes, /metrics, the page, `top --once` and `status`.

A frame of the demo lasts a fifth of a second. Routes and /metrics are requested between two requests of the same frame.
The page and the commands receive this frame from a fake daemon.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gpumond.facts.units import size_text
from gpumond.facts.verdicts import PATTERN_NAMES, VERDICT_NAMES, VERDICT_REMEDIES
from gpumond.view.text import size_or_dash
from tests.helpers.browser import LIVE, PageSession, show_frame
from tests.helpers.frames import FakeDaemon, fake_daemon
from tests.helpers.running import RunningDaemon, Series, series_of
from tests.helpers.stated_amounts import contradictions, contradictions_of_cards

SHARES = ("live", "cached", "stranded", "overhead", "opaque", "unattributed")
OF_PROCESSES = SHARES[:5]
ROUTES = ("snapshot", "devices", "processes", "agents", "ledger", "verdicts", "alerts")
TRIES = 100


@dataclass(frozen=True)
class FrameAndAnswers:
    """``answers`` of the routes and ``series`` of /metrics, all of the same tick as ``frame``."""

    frame: Any
    answers: dict[str, Any]
    series: Series


def consistent_frame(daemon: RunningDaemon) -> FrameAndAnswers:
    for _ in range(TRIES):
        frame = daemon.get("frame")
        answers = {route: daemon.get(route) for route in ROUTES}
        text = daemon.request("/metrics")[1]
        if daemon.get("frame")["snapshot"]["seq"] == frame["snapshot"]["seq"]:
            return FrameAndAnswers(frame, answers, series_of(text))
    raise AssertionError("no frame lasted for as long as asking takes")


@contextmanager
def serving_frame(daemon: RunningDaemon) -> Iterator[FakeDaemon]:
    """Start a fake daemon that returns one frame until it receives another."""
    with fake_daemon(daemon.get("frame")) as fake:
        fake.answers |= {f"/api/v1/{name}": (200, daemon.get(name)) for name in ("status", "quotas")}
        yield fake


def disagreements(now: FrameAndAnswers, session: PageSession, fake: FakeDaemon) -> list[str]:
    """Return the differences of each view from the frame; empty if they agree."""
    fake.show(now.frame)
    found = [
        *_of_routes(now),
        *_of_metrics(now),
        *contradictions(now.frame),
        *_of_page(now.frame, session),
        *of_command(now.frame, "status", command(fake, "status")),
        *of_command(now.frame, "top", command(fake, "top", "--once")),
        *_of_json(now.frame, json.loads(command(fake, "status", "--json"))),
    ]
    return [f"frame {now.frame['snapshot']['seq']}: {each}" for each in found]


def _of_routes(now: FrameAndAnswers) -> Iterator[str]:
    snapshot = now.frame["snapshot"]
    expected = {name: now.frame[name] for name in ("processes", "ledger", "verdicts", "alerts")}
    expected |= {"snapshot": snapshot, "devices": snapshot["devices"], "agents": snapshot["reports"]}
    for route, answer in now.answers.items():
        if answer != expected[route]:
            yield f"/api/v1/{route} is not the frame's"


def metrics_of(frame: Any) -> Series:
    """Derive the series of a frame, independently of gpumond."""
    index = {device["uuid"]: str(device["index"]) for device in frame["snapshot"]["devices"]}
    expected: Series = {}

    def add(name: str, value: float | None, **labels: str) -> None:
        if value is not None:
            key = (f"gpumond_{name}", frozenset(labels.items()))
            expected[key] = expected.get(key, 0) + value

    add("snapshot_timestamp_seconds", frame["snapshot"]["taken_at"])
    for device in frame["snapshot"]["devices"]:
        where = {"uuid": device["uuid"], "gpu": str(device["index"])}
        for part in ("size", "used", "free", "reserved"):
            add(f"device_memory_{part}_bytes", device[f"{part}_bytes"], **where)
        add("device_power_watts", device["sensors"]["power_watts"], **where)
        add("device_gpu_utilization_ratio", device["sensors"]["gpu_utilization_ratio"], **where)
        for process in device["processes"]:
            add("process_memory_used_bytes", process["used_bytes"], pid=str(process["pid"]), **where)
    for line in frame["ledger"]["lines"]:
        where = {"uuid": line["device_uuid"], "gpu": index[line["device_uuid"]]}
        add("memory_bytes", line["used_bytes"], workload=line["workload"], share=line["share"], **where)
    for report in frame["snapshot"]["reports"]:
        for pool in report["pools"]:
            where = {"uuid": pool["device_uuid"], "gpu": index[pool["device_uuid"]], "allocator": pool["allocator"]}
            whose = {"pid": str(report["pid"]), "workload": report["workload"]}
            for part in ("live", "held", "stranded"):
                add(f"pool_{part}_bytes", pool[f"{part}_bytes"], **where, **whose)
            add("pool_reclaimable_bytes", pool["reclaimable"]["likely"], **where, **whose)
    for verdict in frame["verdicts"]:
        if verdict["kind"] in PATTERN_NAMES:
            continue
        where = {"uuid": verdict["device_uuid"], "gpu": index[verdict["device_uuid"]], "pid": str(verdict["pid"] or "")}
        add("verdict", 1, kind=verdict["kind"], **where)
    for alert in frame["alerts"]:
        add("alerts", 1, rule=alert["rule"], phase=alert["phase"], severity=dict(alert["labels"])["severity"])
    return expected


def _of_metrics(now: FrameAndAnswers) -> Iterator[str]:
    expected = metrics_of(now.frame)
    names = {name for name, _ in expected} | {"gpumond_verdict", "gpumond_alerts"}
    shown = {key: value for key, value in now.series.items() if key[0] in names}
    for name, labels in sorted(expected.keys() | shown.keys(), key=str):
        shown_value, held = shown.get((name, labels)), expected.get((name, labels))
        if shown_value != held:
            yield f"/metrics: {name} {dict(labels)} is {shown_value}, not {held}"


def _of_page(frame: Any, session: PageSession) -> Iterator[str]:
    show_frame(session, frame)
    totals, parts, legend, programs, sizes, problems, cards = session.texts(
        ".total",
        ".legend dt",
        ".legend dd",
        "tbody .of-program bdi",
        "tbody td.number:not(.of-gpu, .of-change)",
        "#alerts li b",
        "#alerts li",
    )
    session.page.unroute(LIVE)
    yield from (f"page: {found}" for found in contradictions_of_cards(frame, cards))
    processes = sorted(frame["processes"], key=lambda process: (-process["used_bytes"], process["pid"]))
    columns = ("used", "waste", *OF_PROCESSES)
    yield from _differ(
        "page",
        {
            "used": (
                totals,
                [f"{_used(device)} used · {_percent(device)}%" for device in frame["snapshot"]["devices"]],
            ),
            "legend": (
                [(part, held) for part, held in zip(parts, legend, strict=True) if not part.startswith("of which ")],
                [part for device in frame["snapshot"]["devices"] for part in _legend_of_page(frame, device)],
            ),
            "programs": (programs, [process["workload"] or process["comm"] for process in processes]),
            "sizes": (
                sizes,
                [
                    text
                    for process in processes
                    for text in (str(process["pid"]), *(size_or_dash(_bytes(process, column)) for column in columns))
                ],
            ),
            "problems": (sorted(problems), _problems(frame)),
        },
    )


def _bytes(process: Any, column: str) -> int | None:
    if column != "waste":
        return process[f"{column}_bytes"]
    cached = process["cached_bytes"]
    return None if cached is None else cached + (process["stranded_bytes"] or 0)


def _problems(frame: Any) -> list[str]:
    """Return the kinds of the cards: an alert and the verdict of its name on the same subject are one."""
    return sorted(
        [alert["rule"] for alert in frame["alerts"]] + [kind for kind in _notable(frame) if kind in VERDICT_REMEDIES]
    )


def of_command(frame: Any, face: str, text: str) -> Iterator[str]:
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for device in frame["snapshot"]["devices"]:
        if face == "top":
            parts = [f"{_used(device)} {device['used_bytes'] / device['size_bytes']:.0%}"]
            parts += [f"{share} {held}" for share, held in _legend(frame, device)]
        else:
            held = [_held(frame, device, share) for share in ("cached", "stranded", "unattributed")]
            reserved = [device["reserved_bytes"]] if device["reserved_bytes"] else []
            sizes = (device["size_bytes"], device["used_bytes"], *reserved, *held)
            parts = [" ".join((str(device["index"]), device["name"], *map(size_or_dash, sizes), "up"))]
        yield from (f"{face}: {part!r} is not on it" for part in parts if not any(part in line for line in lines))
    known = {(_gpu(frame, process), str(process["pid"])) for process in frame["processes"]}
    shown = [line for line in lines if tuple(line.split(" ")[:2]) in known]
    processes = sorted(frame["processes"], key=lambda process: -process["used_bytes"])
    yield from _differ(face, {"processes": (shown, [_row(frame, process) for process in processes])})
    alerts = [line.split(" ")[1].rstrip(":") for line in lines if line.startswith("alert ")]
    verdicts = [line.split(" ")[1].rstrip(":") for line in lines if line.startswith("verdict ")]
    yield from _differ(face, {"alerts": (sorted(alerts), sorted(alert["rule"] for alert in frame["alerts"]))})
    yield from _differ(face, {"verdicts": (sorted(verdicts), _notable(frame))})


def _of_json(frame: Any, document: Any) -> Iterator[str]:
    for name in ("processes", "ledger", "verdicts", "alerts"):
        if document[name] != frame[name]:
            yield f"status --json: {name} are not the frame's"
    if document["devices"] != frame["snapshot"]["devices"]:
        yield "status --json: devices are not the frame's"


def _differ(face: str, compared: dict[str, tuple[Any, Any]]) -> Iterator[str]:
    for what, (shown_value, held) in compared.items():
        if shown_value != held:
            yield f"{face}: {what} are {shown_value}, not {held}"


def _row(frame: Any, process: Any) -> str:
    opaque = any(each["opaque_bytes"] for each in frame["processes"])
    columns = ["used", *(name for name in OF_PROCESSES if name != "opaque" or opaque)]
    if any(each["limit_bytes"] is not None for each in frame["processes"]):
        columns.append("limit")
    sizes = (size_or_dash(process[f"{name}_bytes"]) for name in columns)
    words = (_gpu(frame, process), str(process["pid"]), process["workload"] or process["comm"], process["user"] or "")
    return " ".join(" ".join((*words, *sizes, *_status(frame, process))).split())


def _status(frame: Any, process: Any) -> list[str]:
    """Return a critical alert, else a problem, else another alert, else the pattern, which an alert refutes; of several
    alerts, the first one. An alert that outlives its verdict is over.
    """
    judged = [verdict["kind"] for verdict in frame["verdicts"] if verdict["pid"] == process["pid"]]
    own = [each for each in frame["alerts"] if each["pid"] == process["pid"]]
    current = [each for each in own if each["rule"] not in VERDICT_NAMES or each["rule"] in judged]
    alerts = [(dict(each["labels"])["severity"], each) for each in current]
    firing = [(severity, each["rule"]) for severity, each in alerts if each["phase"] == "firing"]
    found = [rule for severity, rule in firing if severity == "critical"]
    found += [kind for kind in judged if kind not in PATTERN_NAMES]
    found += [rule for severity, rule in firing if severity == "warning"]
    if all(severity == "info" for severity, _ in alerts):
        found += judged
    return found[:1]


def _gpu(frame: Any, process: Any) -> str:
    devices = {device["uuid"]: str(device["index"]) for device in frame["snapshot"]["devices"]}
    return devices[process["device_uuid"]]


def _notable(frame: Any) -> list[str]:
    """Return the kinds of verdicts of which no alert informs."""
    alerts = [(alert["rule"], dict(alert["labels"]).get("uuid"), alert["pid"]) for alert in frame["alerts"]]
    verdicts = [(each["kind"], each["device_uuid"], each["pid"]) for each in frame["verdicts"]]
    return sorted(kind for kind, *subject in verdicts if kind not in PATTERN_NAMES and (kind, *subject) not in alerts)


def _used(device: Any) -> str:
    return f"{size_text(device['used_bytes'])} of {size_text(device['size_bytes'])}"


def _percent(device: Any) -> int:
    return int(100 * device["used_bytes"] / device["size_bytes"] + 0.5)


def _held(frame: Any, device: Any, share: str) -> int | None:
    lines = [
        line["used_bytes"]
        for line in frame["ledger"]["lines"]
        if (line["device_uuid"], line["share"]) == (device["uuid"], share)
    ]
    return sum(lines) if lines else None


def _legend(frame: Any, device: Any) -> list[tuple[str, str]]:
    """Return the shares of a device, in the page's order."""
    overcounts = {each["device_uuid"]: each["overcount_bytes"] for each in frame["ledger"]["overcounts"]}
    parts = [(share, _held(frame, device, share)) for share in SHARES]
    parts += [("free", device["free_bytes"]), ("reserved", device["reserved_bytes"])]
    parts += [("overcount", overcounts.get(device["uuid"], 0))]
    return [(name, size_text(held)) for name, held in parts if held]


def _legend_of_page(frame: Any, device: Any) -> list[tuple[str, str]]:
    """Return what the web UI lists beside the bar, from its upper end."""
    shares = [(share, size_text(_held(frame, device, share) or 0)) for share in reversed(SHARES)]
    overcounts = {each["device_uuid"]: each["overcount_bytes"] for each in frame["ledger"]["overcounts"]}
    rest = {
        "reserved": device["reserved_bytes"],
        "overcount": overcounts.get(device["uuid"], 0),
        "free": device["free_bytes"],
    }
    return [*((name, size_text(held)) for name, held in rest.items()), *shares]


def command(fake: FakeDaemon, *arguments: str) -> str:
    """Return the output of a command."""
    whole: Sequence[str] = (sys.executable, "-m", "gpumond", *arguments, "--url", fake.url)
    return subprocess.run(whole, capture_output=True, text=True, timeout=60, check=True).stdout
