"""``gpumond verdicts``: the active verdicts on the memory curves of devices and programs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import DONE, add_option, print_result
from gpumond.facts.alerts import ENDED_PREFIX
from gpumond.facts.units import rough_duration_text
from gpumond.facts.verdicts import AT_PEAK_CONDITION, PATTERN_NAMES, VERDICT_NAMES
from gpumond.view.rows import process_of, sort_by_urgency
from gpumond.view.text import printable_excerpt, table, time_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--all", "also show healthy patterns, such as steady and periodic")
    client.add_arguments(parser, entries="verdicts")


def run(arguments: argparse.Namespace) -> int:
    frame = client.frame(arguments.url)
    verdicts = [each for each in frame["verdicts"] if arguments.all or each["kind"] not in PATTERN_NAMES]
    gpus = {device["uuid"]: str(device["index"]) for device in frame["snapshot"]["devices"]}
    header = ("GPU", ">PID", "VERDICT", "SINCE", ">TIME TO FULL", "SUMMARY")
    nothing_found = (
        "no problem found in the memory curves" if frame["verdicts"] else "no memory curve is long enough yet"
    )

    def text() -> str:
        verdict_text = table(header, _rows(verdicts, gpus)) if verdicts else nothing_found
        alerts = client.paragraph(_alerts_text(frame), arguments.url)
        return "\n\n".join(filter(None, (verdict_text, alerts)))

    print_result(arguments, verdicts, text)
    return DONE


def _alerts_text(frame: Mapping[str, Any]) -> str:
    """Return the programs' alerts that aren't verdicts, the most urgent first; empty without one."""
    programs = {process_of(each): each["workload"] or each["comm"] or "?" for each in frame["processes"]}
    shown = [
        f"{alert['rule']} ({printable_excerpt(programs[process_of(alert)], 64)}, pid {alert['pid']})"
        for alert, _ in sort_by_urgency(frame["alerts"], ())
        if alert["phase"] == "firing" and alert["rule"] not in VERDICT_NAMES and process_of(alert) in programs
        if not dict(alert["annotations"]).get("summary", "").startswith(ENDED_PREFIX)
    ]
    return f"alerts: {', '.join(shown)}; to see details: gpumond alerts" if shown else ""


def _rows(verdicts: Iterable[dict[str, Any]], gpus: Mapping[str, str]) -> Iterator[list[str]]:
    for verdict in verdicts:
        pid, seconds_to_full = verdict["pid"], verdict["time_to_full_seconds"]
        yield [
            gpus.get(verdict["device_uuid"], "-"),
            "-" if pid is None else str(pid),
            verdict["kind"],
            time_text(verdict["since"]),
            "-"
            if seconds_to_full is None
            else rough_duration_text(seconds_to_full)
            + (" at peak use" if AT_PEAK_CONDITION in verdict["summary"] else ""),
            verdict["summary"],
        ]
