"""``gpumond alerts``: pending and firing alerts, or those that have been resolved."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import DONE, add_option, print_result
from gpumond.facts.alerts import ENDED_PREFIX
from gpumond.facts.frame import Alert
from gpumond.page.runbooks import RUNBOOKS
from gpumond.view.frame import checked_as
from gpumond.view.notices import steps_of
from gpumond.view.rows import sort_by_urgency
from gpumond.view.text import output_width, printable, table, time_text, wrap_text

PAIR_FIELDS = ("labels", "annotations")
"""Fields that are objects in the output, so jq can name a label."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--past", "show resolved alerts, most recent last")
    client.add_arguments(parser, entries="alerts")


def run(arguments: argparse.Namespace) -> int:
    answer = client.get(arguments.url, "/api/v1/alerts" + ("/history" if arguments.past else ""))
    alerts = checked_as(tuple[Alert, ...], answer, "alerts")
    if alerts and not arguments.past:
        alerts = [alert for alert, _ in sort_by_urgency(alerts, client.frame(arguments.url)["verdicts"])]
    ends = {}
    if any(alert.get("silenced_by") for alert in alerts) and not arguments.past:
        silences = [entry["silence"] for entry in client.get(arguments.url, "/api/v1/silences")]
        ends = {silence["id"]: silence["ends_at"] for silence in silences}
    nothing = "no past alerts" if arguments.past else "no active alerts"
    header = ("PHASE", "SEVERITY", "RULE", "SINCE", *(["RESOLVED"] if arguments.past else []), "SUMMARY")
    entries = [{**alert, **{name: dict(alert[name]) for name in PAIR_FIELDS}} for alert in alerts]
    steps = wrap_text("\n".join(_next_steps(entries, arguments.url)), output_width())
    text = f"{table(header, _rows(alerts, ends))}\n{steps}".rstrip() if alerts else nothing
    print_result(arguments, entries, lambda: text)
    return DONE


def _next_steps(alerts: Sequence[Mapping[str, Any]], url: str) -> Iterator[str]:
    """Yield the descriptions of each rule's alerts, and the rule's runbook."""
    rules = [*dict.fromkeys(alert["rule"] for alert in alerts)]
    web_ui = _web_ui(url) if RUNBOOKS & {*rules} else ""
    for rule in rules:
        subjects: dict[str, list[str]] = {}
        for alert in alerts:
            if alert["rule"] == rule:
                subjects.setdefault(alert["annotations"].get("description") or "", []).append(_subject(alert["labels"]))
        steps = []
        for text, subjects_of_text in subjects.items():
            about = f"{rule} of {printable(', '.join(subjects_of_text))}" if len(subjects) > 1 else rule
            steps += [f"{about}: {client.with_commands(printable(step), url)}" for step in steps_of(text)]
        runbook = [_runbook(web_ui, rule)] if rule in RUNBOOKS else []
        if steps or runbook:
            yield from ("", *steps, *runbook)


def _subject(labels: Mapping[str, str]) -> str:
    """Return what an alert is about: its program, engine, device or machine."""
    pid, gpu = labels.get("pid"), labels.get("gpu")
    name = labels.get("workload") or labels.get("engine") or (f"pid {pid}" if pid else "")
    return name or (f"GPU {gpu}" if gpu else labels.get("instance", "the daemon"))


def _web_ui(url: str) -> str:
    """Return the address of the web UI; empty while the daemon has only its Unix socket."""
    if not client.is_over_socket(url):
        return url.rstrip("/")
    return client.get(url, "/api/v1/status").get("url") or ""


def _runbook(web_ui: str, rule: str) -> str:
    """Return a line with the address of a runbook; its path in the web UI if that has no address."""
    return f"runbook for {rule}: {web_ui}/docs/runbooks/{rule}" + ("" if web_ui else " in the web UI")


def _rows(alerts: Iterable[dict[str, Any]], ends: Mapping[str, float]) -> Iterator[list[str]]:
    """Yield a row for each alert. ``ends``: the Unix times at which silences end, by id."""
    for alert in alerts:
        labels, texts = dict(alert["labels"]), dict(alert["annotations"])
        phase = (
            "ended"
            if texts.get("summary", "").startswith(ENDED_PREFIX) and alert["phase"] == "firing"
            else alert["phase"]
        )
        silenced = ""
        if alert.get("silenced_by") and phase != "resolved":
            until = max((ends[id] for id in alert["silenced_by"] if id in ends), default=None)
            silenced = "silenced" + (f" until {time_text(until)}" if until is not None else "")
        times = [time_text(alert["fired_at"] or alert["active_at"])]
        times += [time_text(alert["resolved_at"])] if phase == "resolved" else []
        yield [
            phase,
            labels.get("severity") or "-",
            alert["rule"],
            *times,
            ": ".join(filter(None, (silenced, texts.get("summary")))),
        ]
