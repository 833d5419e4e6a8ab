"""``gpumond baseline``: record the memory use of workloads, and compare it after a change."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import (
    DONE,
    FAILED,
    NOTHING_TO_DO,
    add_option,
    option_type,
    parse_duration,
    print_error,
    print_result,
)
from gpumond.cli.progress import Progress
from gpumond.facts.errors import DaemonError, ProtocolError
from gpumond.facts.messages import from_json, to_json
from gpumond.facts.units import size_text
from gpumond.features.baselines.statistics import (
    NAME_PATTERN,
    Comparison,
    Difference,
    Threshold,
    parse_measure_threshold,
)
from gpumond.view import html_report
from gpumond.view.text import table, time_text

ROUTE = "/api/v1/baselines"
POLL_SECONDS = 1.0
MAX_SAVING_SECONDS = 30.0
DIFFERENCE_HEADER = ("WORKLOAD", "MEASURE", ">BEFORE", ">AFTER", ">CHANGE", ">", ">95% LOW", ">95% HIGH")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="what", metavar="record|compare|list|delete", required=True)
    record = actions.add_parser("record", help="measure memory use and store it")
    compare = actions.add_parser("compare", help="measure again and show what changed")
    entries = actions.add_parser("list", help="list the stored baselines")
    delete = actions.add_parser("delete", help="delete a baseline")
    for parser in (record, compare, delete):
        parser.add_argument("name", type=option_type(_parse_name), metavar="NAME", help="the baseline's name")
    duration_options: dict[str, Any] = {"dest": "duration", "type": parse_duration}
    add_option(record, "--for DURATION", "how long to measure, such as 10m", required=True, **duration_options)
    add_option(record, "--workload NAME", "measure only this workload")
    add_option(
        compare, "--for DURATION", "how long to measure; without it, show the last comparison", **duration_options
    )
    threshold_options: dict[str, Any] = {"dest": "thresholds", "action": "append", "default": []}
    add_option(
        compare,
        "--fail-above PERCENT",
        "exit with 1 if peak live memory grew by more than this, such as 5%%",
        type=option_type(_parse_growth),
        **threshold_options,
    )
    add_option(
        compare,
        "--fail-if COMPARISON",
        "exit with 1 if a measure changed by more than this; repeatable: 'held_typical>1GiB' (grew by more than "
        "1 GiB), 'retries_rate>0', 'utilization_typical<-10%%' (fell by more than 10%%)",
        type=option_type(parse_measure_threshold),
        **threshold_options,
    )
    add_option(compare, "--html FILE", "write a report with charts to this HTML file", type=Path)
    for each in (record, compare, entries, delete):
        client.add_arguments(each)


def _parse_name(text: str) -> str:
    if not re.fullmatch(NAME_PATTERN, text):
        raise ValueError(
            "not a valid baseline name: expected a letter or digit, then up to 63 letters, digits, '.', '_' or '-'"
        )
    return text


def _parse_growth(text: str) -> Threshold:
    try:
        return parse_measure_threshold(f"live_peak>{text}")
    except ValueError:
        raise ValueError("expected a percentage such as 5%") from None


def run(arguments: argparse.Namespace) -> int:
    return {"record": _record, "compare": _compare, "list": _list, "delete": _delete}[arguments.what](arguments)


def _record(arguments: argparse.Namespace) -> int:
    body = {"for_seconds": arguments.duration, "workload": arguments.workload}
    client.put(arguments.url, f"{ROUTE}/{arguments.name}", body)
    baseline = _wait(arguments.url, f"{ROUTE}/{arguments.name}", body["for_seconds"])
    header = ("WORKLOAD", "MEASURE", ">TYPICAL", ">LOW", ">HIGH", ">PEAK")
    if baseline["workloads"] or arguments.json:
        print_result(arguments, baseline, lambda: table(header, _measure_rows(baseline)))
    if baseline["workloads"]:
        return DONE
    subject = "no process" if arguments.workload is None else f"no process of the workload {arguments.workload}"
    print_error(f"gpumond: {subject} used GPU memory during the measurement; check that it is running")
    return NOTHING_TO_DO


def _compare(arguments: argparse.Namespace) -> int:
    html_report.check_report_path(arguments.html)
    route = f"{ROUTE}/{arguments.name}/compare"
    if arguments.duration is not None:
        client.post(arguments.url, route, {"for_seconds": arguments.duration}, timeout_seconds=30)
        answer = _wait(arguments.url, route, arguments.duration)
    else:
        answer = client.get(arguments.url, route)
    try:
        comparison = from_json(Comparison, to_json(answer))
    except ProtocolError as error:
        raise DaemonError(
            f"can't decode the daemon's response ({error}); check that the daemon has the same version as this command"
        ) from None
    print_result(arguments, answer, lambda: _comparison_text(comparison))
    if arguments.html is not None:
        html_report.write_report(arguments.html, _html_page(comparison))
    failures = list(_failures(comparison.differences, arguments.thresholds))
    for failure in failures:
        print_error(f"gpumond: {failure}")
    return FAILED if failures else DONE


def _list(arguments: argparse.Namespace) -> int:
    entries = client.get(arguments.url, ROUTE)
    header = ("NAME", "STARTED", ">SECONDS", "STATE", "WORKLOADS")
    nothing = "no baseline is recorded; to record one: gpumond baseline record NAME --for 10m"
    print_result(
        arguments,
        entries,
        lambda: table(header, map(_baseline_row, entries)) if entries else client.paragraph(nothing, arguments.url),
    )
    return DONE


def _delete(arguments: argparse.Namespace) -> int:
    client.delete(arguments.url, f"{ROUTE}/{arguments.name}")
    print_result(arguments, {"deleted": arguments.name}, lambda: f"baseline {arguments.name} is deleted")
    return DONE


def _wait(url: str, route: str, for_seconds: float) -> Any:
    """Return the measurement when it is complete."""
    print(f"gpumond: measuring for {for_seconds:g} s", file=sys.stderr)
    start, progress = time.monotonic(), Progress()
    try:
        while not (answer := client.get(url, route))["complete"]:
            elapsed = time.monotonic() - start
            if elapsed > for_seconds + MAX_SAVING_SECONDS:
                raise DaemonError(
                    "the measurement is complete, but the daemon can't store it: check its store with `gpumond status`"
                )
            progress.show(f"measured {min(elapsed, for_seconds):.0f} s of {for_seconds:g} s")
            time.sleep(POLL_SECONDS)
    finally:
        progress.end()
    return answer


def _failures(differences: Sequence[Difference], thresholds: Sequence[Threshold]) -> Iterator[str]:
    """Return a message for each threshold that was exceeded or could not be evaluated."""
    for limit in thresholds:
        matching = [each for each in differences if each.name == limit.name]
        if not matching:
            yield f"{limit.text}: no comparable measurement"
        for each in matching:
            if each.difference is None:
                side = "after" if each.after is None else "before"
                yield f"{limit.text}: {each.workload} wasn't measured {side}"
            elif limit.is_exceeded_by(each):
                before, after = _value_text(each, each.before), _value_text(each, each.after)
                yield f"{limit.text}: {each.workload} changed from {before} to {after} {_change_text(each)}".rstrip()


def _comparison_text(comparison: Comparison) -> str:
    differences = table(DIFFERENCE_HEADER, _rows(comparison.differences))
    return "\n\n".join(filter(None, (differences, _length_warning(comparison))))


def _length_warning(comparison: Comparison) -> str:
    longer, shorter = sorted((comparison.before_seconds, comparison.after_seconds), reverse=True)
    if longer <= 1.5 * shorter:
        return ""
    return (
        f"peaks of measurements of {comparison.before_seconds:.0f} s and {comparison.after_seconds:.0f} s "
        "aren't comparable"
    )


def _html_page(comparison: Comparison) -> str:
    """Return the comparison as an HTML document: the table, and a chart of each workload."""
    started = [time_text(at) for at in (comparison.before_started_at, comparison.after_started_at)]
    parts = [
        html_report.paragraph(
            f"Before: {comparison.before_seconds:.0f} s from {started[0]}. "
            f"After: {comparison.after_seconds:.0f} s from {started[1]}."
        ),
        html_report.table(DIFFERENCE_HEADER, _rows(comparison.differences)),
    ]
    if warning := _length_warning(comparison):
        parts.append(html_report.paragraph(warning))
    for workload, measures in _charts(comparison):
        rows = [
            (
                name,
                (
                    html_report.Bar("before", typical.before, None, peak.before),
                    html_report.Bar("after", typical.after, None, peak.after),
                ),
            )
            for name, typical, peak in measures
        ]
        parts += [html_report.heading(workload), html_report.bars("typical values and peaks before and after", rows)]
    return html_report.html_page(f"{comparison.name}: before and after", parts)


def _charts(comparison: Comparison) -> Iterator[tuple[str, list[tuple[str, Difference, Difference]]]]:
    """Yield each workload with its measures in bytes, and the typical values and the peaks of each."""
    for workload in sorted({each.workload for each in comparison.differences}):
        by_stat = {(each.measure, each.stat): each for each in comparison.differences if each.workload == workload}
        yield (
            workload,
            [
                (measure, typical, by_stat.get((measure, "peak"), Difference(workload, measure, "peak", None, None)))
                for (measure, stat), typical in by_stat.items()
                if stat == "typical" and measure != "utilization" and (typical.before or typical.after)
            ],
        )


def _rows(differences: Sequence[Difference]) -> Iterator[list[str]]:
    for each in differences:
        if each.before or each.after:
            values = (each.before, each.after, each.difference, each.low, each.high)
            before, after, difference, low, high = (_value_text(each, value) for value in values)
            yield [each.workload, each.name, before, after, difference, _change_text(each), low, high]


def _value_text(difference: Difference, value: float | None) -> str:
    if value is None:
        return "-"
    if difference.measure == "utilization":
        return f"{100 * value:.1f}%"
    return f"{value:.1f}/h" if difference.measure == "retries" else size_text(value)


def _change_text(difference: Difference) -> str:
    return "" if difference.ratio is None else f"{100 * difference.ratio:+.1f}%"


def _measure_rows(baseline: Any) -> Iterator[list[str]]:
    for workload in baseline["workloads"]:
        for each in workload["measures"]:
            distribution = each["distribution"]
            difference = Difference(workload["workload"], each["measure"], "", None, None)
            values = (_value_text(difference, distribution[name]) for name in ("typical", "low", "high", "peak"))
            yield [workload["workload"], each["measure"], *values]


def _baseline_row(entry: Any) -> list[str]:
    started = time_text(entry["started_at"] or None)
    state = "complete" if entry["complete"] else "measuring"
    return [entry["name"], started, f"{entry['seconds']:.0f}", state, ", ".join(entry["workloads"])]
