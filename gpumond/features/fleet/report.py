"""``gpumond fleet report``: print the memory that owners or machines used and wasted in a period, and its cost, from
the metrics of owners that Prometheus has stored.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpumond.cli.arguments import (
    DONE,
    NOTHING_TO_DO,
    add_option,
    option_type,
    parse_duration,
    parse_time_argument,
    print_error,
)
from gpumond.facts.errors import ConfigError
from gpumond.facts.units import DAY_SECONDS, GIB, duration_text
from gpumond.features.fleet.accounting import (
    COLUMNS,
    JOB_COLUMN,
    LABEL_BY_COLUMN,
    MEASURES,
    TEAM_COLUMN,
    Accounts,
    Period,
    Price,
    TeamRule,
    Usage,
    columns_parser,
    machines_with_gaps,
    models_without_price,
    read_accounts,
    total_usage,
    usage_by_group,
)
from gpumond.features.fleet.discovery import add_prometheus_arguments, make_prometheus
from gpumond.view import html_report
from gpumond.view.text import printable, table, time_text

NO_NAME, UNATTRIBUTED = "(none)", "(unattributed)"
WASTED_NOTE = "WASTED: memory of idle programs, cached and stranded memory of the others, and unattributed memory"
COVERAGE_NOTE = "COVERED: percentage of the time with known values; the rest isn't counted"
EXTRAPOLATION_NOTE = "COVERED: percentage of the time with known values; the rest is extrapolated from it"
MAX_LISTED_GAPS = 5
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of a formula in a spreadsheet."""


def parse_price(text: str) -> Price:
    """Return the price of ``MODEL=AMOUNT`` or ``AMOUNT``. Raises ValueError."""
    pattern, _, amount = text.rpartition("=")
    try:
        per_hour = float(amount)
    except ValueError:
        per_hour = -1.0
    if not 0 <= per_hour < float("inf"):
        raise ValueError("expected AMOUNT or MODEL=AMOUNT, such as H100=2.50")
    return Price(pattern, per_hour)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prometheus_arguments(parser)
    add_option(
        parser,
        "--by COLUMN[,COLUMN]",
        f"group by these columns: {', '.join(COLUMNS)} (default: user)",
        type=option_type(columns_parser(COLUMNS)),
        default="user",
    )
    add_option(parser, "--teams FILE", "your teams and their members (YAML), for --by team", type=Path)
    begin = "start of the period: HH:MM or ISO 8601 (UTC unless it has an offset), or how long ago, such as 30d"
    add_option(parser, "--from TIME", begin, dest="begin", type=option_type(parse_time_argument))
    end = "end of the period, written as for --from (default: now)"
    add_option(parser, "--to TIME", end, dest="end", type=option_type(parse_time_argument))
    add_option(
        parser,
        "--for DURATION",
        "the period's length, instead of --from (default: 7d)",
        dest="duration",
        type=parse_duration,
    )
    add_option(parser, "--compare", "also show the change since the preceding period")
    add_option(parser, "--extrapolate", "fill gaps with the mean of the rest of the period (default: leave gaps out)")
    add_option(parser, "--limit N", "maximum number of rows; 0 for all (default: 20)", type=int, default=20)
    add_option(
        parser,
        "--price [MODEL=]AMOUNT",
        "your price for a GPU-hour, for models whose name contains MODEL (default: all models); repeatable",
        type=option_type(parse_price),
        action="append",
        default=[],
    )
    add_option(parser, "--format", "output format (default: table)", choices=("table", "csv", "json"), default="table")
    add_option(parser, "--html FILE", "also write the report with charts as one HTML file", type=Path)


async def run(arguments: argparse.Namespace) -> int:
    if arguments.limit < 0:
        raise ConfigError("--limit must not be negative")
    period = _period(arguments, time.time())
    if (TEAM_COLUMN in arguments.by) != (arguments.teams is not None):
        raise ConfigError("--by team and --teams FILE require each other")
    teams = [] if arguments.teams is None else read_teams(arguments.teams)
    prometheus = make_prometheus(arguments)
    if prometheus is None:
        raise ConfigError("--prometheus is required: the report is built entirely from Prometheus data")
    html_report.check_report_path(arguments.html)
    of_programs = JOB_COLUMN in arguments.by
    accounts = await read_accounts(prometheus, arguments.job, period, of_programs)
    report = UsageReport(accounts, arguments.by, arguments.price, teams, arguments.extrapolate, arguments.limit)
    if arguments.compare:
        report.preceding_total = total_usage(
            await read_accounts(prometheus, arguments.job, period.preceding(), of_programs)
        )
    if not report.rows:
        subjects = "programs" if of_programs else "owners"
        print_error(
            f"gpumond: Prometheus has no series of {subjects} from {time_text(period.begin)} to "
            f"{time_text(period.end)}; check the period, --job, and the groups of the scrape (collect[])"
        )
        return NOTHING_TO_DO
    {"table": _print_table, "csv": _print_csv, "json": _print_json}[arguments.format](report)
    if arguments.html is not None:
        html_report.write_report(arguments.html, _html(report))
    if arguments.price and (models := models_without_price(accounts, arguments.price)):
        print_error(f"gpumond: no --price for {', '.join(models)}; rows with these models have no cost")
    return DONE


def _period(arguments: argparse.Namespace, now: float) -> Period:
    """Return the period of the options. Raises ConfigError."""
    if arguments.begin is not None and arguments.duration is not None:
        raise ConfigError("--from and --for can't be combined")
    end = now if arguments.end is None else min(now, arguments.end)
    length = 7 * DAY_SECONDS if arguments.duration is None else arguments.duration
    begin = end - length if arguments.begin is None else arguments.begin
    if end - begin < 60:
        raise ConfigError("the period must be at least one minute, and not in the future")
    return Period.of(begin, end)


def read_teams(path: Path) -> list[TeamRule]:
    """Return the rules of a file with a list of ``COLUMN=PATTERN`` for each team. Raises ConfigError."""
    from gpumond.config.loading import read_yaml  # it takes half a second

    expected = "a list for each team, such as vision: [namespace=vision-*, user=dev]"
    content = read_yaml(path, expected=expected)
    if not all(isinstance(each, list) for each in content.values()):
        raise ConfigError(f"--teams {path}: expected {expected}")
    rules = []
    for team, patterns in content.items():
        for text in patterns:
            column, equals, pattern = str(text).partition("=")
            if not equals or column not in LABEL_BY_COLUMN:
                columns = ", ".join(LABEL_BY_COLUMN)
                raise ConfigError(f"--teams {path}: {text!r:.80}: expected COLUMN=PATTERN; the columns are {columns}")
            rules.append(TeamRule(str(team), column, pattern))
    return rules


class UsageReport:
    """Rows and totals of the accounts as the options require them."""

    def __init__(
        self,
        accounts: Accounts,
        columns: Sequence[str],
        prices: Sequence[Price] = (),
        teams: Sequence[TeamRule] = (),
        extrapolate: bool = False,
        limit: int = 0,
    ) -> None:
        self.accounts, self.columns, self.extrapolate = accounts, columns, extrapolate
        self.priced = bool(prices)
        rows = usage_by_group(accounts, columns, prices, teams, extrapolate)
        self.rows = rows[: limit or None]
        self.omitted_rows = len(rows) - len(self.rows)
        self.total = total_usage(accounts, prices, extrapolate)
        self.preceding_total: Usage | None = None
        factor = 1 / (3600 * GIB)
        self.size_gibibyte_hours = sum(accounts.device_byte_seconds.values()) * factor
        self.gpu_hours = sum(accounts.device_seconds.values()) / 3600

    @property
    def period_text(self) -> str:
        begin, end, _ = self.accounts.period
        return f"{time_text(begin)} to {time_text(end)} ({duration_text(end - begin)})"

    @property
    def coverage_text(self) -> str:
        """Sentences about the known part of the period, and the machines with gaps."""
        machine_gaps = machines_with_gaps(self.accounts)
        machine_count = len(self.accounts.coverage)
        machines = "one machine" if machine_count == 1 else f"{machine_count} machines"
        text = f"Values are known for {_percent(self.total.coverage)} of the time on {machines}."
        if machine_gaps:
            listed_gaps = ", ".join(
                f"{name or NO_NAME} ({_percent(ratio)} known)" for name, ratio in machine_gaps[:MAX_LISTED_GAPS]
            )
            more = f", and {len(machine_gaps) - MAX_LISTED_GAPS} more" if len(machine_gaps) > MAX_LISTED_GAPS else ""
            text += f" Machines with gaps: {listed_gaps}{more}."
        return text

    @property
    def notes(self) -> list[str]:
        optional_notes = [f"rows left out: {self.omitted_rows}; to show all: --limit 0"] if self.omitted_rows else []
        optional_notes += [f"Before: {self.change_text}."] if self.preceding_total else []
        return [
            self.period_text,
            self.coverage_text,
            f"GiB-hours. {WASTED_NOTE}.",
            f"{EXTRAPOLATION_NOTE if self.extrapolate else COVERAGE_NOTE}.",
            *optional_notes,
        ]

    @property
    def change_text(self) -> str:
        """Mean and waste of the period before, and the change of the mean."""
        before = self.preceding_total
        if before is None or not before.used_gibibyte_hours:
            return "no data"
        change = self.total.mean_gibibytes / before.mean_gibibytes - 1
        wasted = (
            ""
            if before.wasted_gibibyte_hours is None
            else f", {before.wasted_gibibyte_hours / before.used_gibibyte_hours:.0%} of used wasted"
        )
        coverage = f"known for {_percent(before.coverage)} of the time"
        return f"mean {before.mean_gibibytes:,.1f} GiB{wasted}, {coverage}; the mean has changed by {change:+.0%}"

    def lines(self) -> Iterator[list[str]]:
        """Yield the header, a line for each row, and the total."""
        costs = ["COST", "WASTED COST"] if self.priced else []
        yield [
            *map(str.upper, self.columns),
            *("USED", "MEAN GIB", "IDLE", "IDLE+RECLAIMABLE", "WASTED", "OF USED", "COVERED"),
            *costs,
        ]
        for row in self.rows:
            yield [*map(_group_text, row.group), *self._cells(row)]
        yield ["TOTAL", *[""] * (len(self.columns) - 1), *self._cells(self.total)]

    def _cells(self, row: Usage) -> list[str]:
        hours = (
            row.used_gibibyte_hours,
            row.mean_gibibytes,
            row.idle_held_gibibyte_hours,
            row.idle_and_reclaimable_gibibyte_hours,
            row.wasted_gibibyte_hours,
        )
        share = (
            "-"
            if row.wasted_gibibyte_hours is None or not row.used_gibibyte_hours
            else f"{row.wasted_gibibyte_hours / row.used_gibibyte_hours:.0%}"
        )
        costs = ["-" if each is None else f"{each:,.2f}" for each in (row.cost, row.wasted_cost)]
        return [
            *("-" if number is None else f"{number:,.1f}" for number in hours),
            *(share, _percent(row.coverage)),
            *(costs if self.priced else []),
        ]


def _group_text(text: str | None) -> str:
    return UNATTRIBUTED if text is None else text or NO_NAME


def _percent(ratio: float) -> str:
    """Return a percentage that is 100 only without a gap."""
    return f"{int(ratio * 1000) / 10:g}%"


def _table_header(report: UsageReport, header: Sequence[str]) -> list[str]:
    column_count = len(report.columns)
    return [*header[:column_count], *(f">{name}" for name in header[column_count:])]


def _print_table(report: UsageReport) -> None:
    header, *cells = report.lines()
    print(table(_table_header(report, header), cells))
    print("\n" + "\n".join(report.notes))


def _print_csv(report: UsageReport) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    costs = ("cost", "wasted_cost") if report.priced else ()
    fields = (*(f"{name}_gibibyte_hours" for name in MEASURES), "mean_gibibytes", "coverage", *costs)
    period = [_iso_time(report.accounts.period.begin), _iso_time(report.accounts.period.end)]
    writer.writerow(["from", "to", *report.columns, *(name.replace("coverage", "coverage_ratio") for name in fields)])
    for row in report.rows:
        numbers = [getattr(row, name) for name in fields]
        group = [_csv_cell(_group_text(None) if each is None else each) for each in row.group]
        writer.writerow([*period, *group, *("" if number is None else f"{number:.6g}" for number in numbers)])


def _iso_time(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _csv_cell(name: str) -> str:
    """Return text that a spreadsheet shows, and does not calculate."""
    return "'" * name.startswith(_FORMULA_STARTS) + printable(name)


def _print_json(report: UsageReport) -> None:
    print(
        json.dumps(
            {
                "from": report.accounts.period.begin,
                "to": report.accounts.period.end,
                "extrapolated": report.extrapolate,
                "size_gibibyte_hours": report.size_gibibyte_hours,
                "gpu_hours": report.gpu_hours,
                "total": _usage_object(report, report.total),
                "before": report.preceding_total and _usage_object(report, report.preceding_total),
                "rows": [_usage_object(report, row) for row in report.rows],
                "gaps": [
                    {"machine": name, "coverage_ratio": ratio} for name, ratio in machines_with_gaps(report.accounts)
                ],
            },
            indent=2,
        )
    )


def _usage_object(report: UsageReport, row: Usage) -> dict[str, Any]:
    return {
        **dict(zip(report.columns, row.group, strict=False)),
        **{f"{name}_gibibyte_hours": getattr(row, f"{name}_gibibyte_hours") for name in MEASURES},
        "mean_gibibytes": row.mean_gibibytes,
        "coverage_ratio": row.coverage,
        "cost": row.cost,
        "wasted_cost": row.wasted_cost,
    }


def _html(report: UsageReport) -> str:
    """Return the report as HTML."""
    header, *cells = report.lines()
    total = report.total
    bars = [
        (
            " / ".join(map(_group_text, row.group)),
            (
                html_report.Bar(
                    "before",
                    row.used_gibibyte_hours,
                    f"{row.wasted_gibibyte_hours or 0:,.1f} of {row.used_gibibyte_hours:,.1f}",
                ),
                html_report.Bar("after", row.wasted_gibibyte_hours or 0.0, ""),
            ),
        )
        for row in report.rows
    ]
    by = " and ".join(report.columns)
    parts = [
        html_report.paragraph(report.period_text),
        html_report.table(["", ">"], _summary(report)),
        html_report.paragraph(report.coverage_text),
        html_report.heading(f"Used and wasted GiB-hours by {by}"),
        html_report.legend((("before", "used"), ("after", "wasted"))),
        html_report.bars(f"wasted part of the used GiB-hours by {by}", bars, overlaid=True),
        html_report.table(
            _table_header(report, _without_waste(header, header)), [_without_waste(header, line) for line in cells]
        ),
        *map(html_report.paragraph, report.notes[2:]),
    ]
    part_seconds = next(report.accounts.period.parts()).seconds
    for name, points in report.accounts.curves.items():
        if points:
            parts.append(html_report.heading(f"{name.capitalize()} memory of all"))
            parts.append(html_report.curve(points, None, (), span=report.accounts.period[:2], gap=1.5 * part_seconds))
    if total.wasted_gibibyte_hours:
        parts.append(
            html_report.paragraph(
                "To return wasted memory: stop idle programs or suspend them, flush caches (gpumond fleet flush), and "
                "restart programs with stranded memory."
            )
        )
    return html_report.html_page(f"GPU memory use by {by}", parts)


def _without_waste(header: Sequence[str], line: Sequence[str]) -> list[str]:
    """Return a line without the parts of wasted memory, as wide as the page."""
    return [cell for name, cell in zip(header, line, strict=True) if not name.startswith("IDLE")]


def _summary(report: UsageReport) -> Iterator[tuple[str, str]]:
    """Yield names and values of the totals."""
    total = report.total
    yield "GPU-hours", f"{report.gpu_hours:,.1f}"
    yield "Memory size", f"{report.size_gibibyte_hours:,.1f} GiB-hours"
    yield (
        "Used",
        f"{total.used_gibibyte_hours:,.1f} GiB-hours"
        + (f" ({total.used_gibibyte_hours / report.size_gibibyte_hours:.0%})" if report.size_gibibyte_hours else ""),
    )
    if total.wasted_gibibyte_hours is not None:
        share = (
            f" ({total.wasted_gibibyte_hours / total.used_gibibyte_hours:.0%} of used)"
            if total.used_gibibyte_hours
            else ""
        )
        yield "Wasted", f"{total.wasted_gibibyte_hours:,.1f} GiB-hours{share}"
    for name, cost in (("Cost of use", total.cost), ("Cost of waste", total.wasted_cost)):
        if cost is not None:
            yield name, f"{cost:,.2f}"
