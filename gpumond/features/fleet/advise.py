"""``gpumond fleet advise``: print sizes for programs (limit, reserve, number on a GPU, MIG profile) from what they
needed in a period, and the queries from which each number comes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from gpumond.cli.arguments import DONE, NOTHING_TO_DO, duration, print_error, value
from gpumond.facts.errors import ConfigError
from gpumond.facts.units import GIB, duration as readable
from gpumond.features.fleet.accounting import LABELS, group_of
from gpumond.features.fleet.discovery import add_prometheus, all_answers, make_prometheus
from gpumond.features.fleet.sizing import HEADROOM, Size, by_model, expressions, sizes
from gpumond.view.text import moment, safe, size, table

COLUMNS = tuple(name for name in LABELS if name not in ("model", "machine"))
WEEK_SECONDS = 7 * 86_400.0


def headroom(text: str) -> float:
    """Return the ratio of a percentage. Raises ValueError."""
    try:
        ratio = float(text.removesuffix("%")) / 100
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 10:
        raise ValueError("expected a percentage such as 10%")
    return ratio


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prometheus(parser)
    parser.add_argument(
        "--by",
        type=value(group_of(COLUMNS)),
        default="workload",
        metavar="COLUMN[,COLUMN]",
        help=f"programs with the same values get one size: {', '.join(COLUMNS)} (default: workload)",
    )
    parser.add_argument(
        "--for",
        dest="duration",
        type=duration,
        default=WEEK_SECONDS,
        metavar="DURATION",
        help="length of the period, which ends now (default: 7d)",
    )
    parser.add_argument(
        "--headroom",
        type=value(headroom),
        default=HEADROOM,
        metavar="PERCENT",
        help=f"part of the need that a limit adds (default: {HEADROOM:.0%}%)",
    )
    parser.add_argument(
        "--limit", type=int, default=20, metavar="N", help="maximum number of rows; 0 for all (default: 20)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


async def run(arguments: argparse.Namespace) -> int:
    if arguments.limit < 0:
        raise ConfigError("--limit must not be negative")
    if arguments.duration < 60:
        raise ConfigError("--for must be at least one minute")
    prometheus = make_prometheus(arguments)
    if prometheus is None:
        raise ConfigError("--prometheus is required: advice is based only on its series")
    end = float(int(time.time()))
    labels = [LABELS[name] for name in arguments.by]
    queries = expressions(arguments.job, labels, int(arguments.duration))
    answers = await all_answers(prometheus.query(query, end) for query in queries.values())
    values = dict(zip(queries, answers, strict=True))
    rows = sizes(values, labels, arguments.headroom)
    if not rows:
        print_error(
            f"gpumond: Prometheus has no series gpumond_owner_needed_bytes from {moment(end - arguments.duration)} to "
            f"{moment(end)}; check --for, --job, the daemons' version, and the groups of the scrape (collect[])"
        )
        return NOTHING_TO_DO
    shown = rows[: arguments.limit or None]
    allocated = sum(by_model(values["allocated"]).values()) / GIB
    if arguments.json:
        document = {
            "at": end,
            "headroom_ratio": arguments.headroom,
            "queries": queries,
            "allocated_gibibyte_hours": allocated,
            "advised_gibibyte_hours": _advised(rows),
            "rows": [_object(arguments.by, row) for row in shown],
        }
        print(json.dumps(document, indent=2))
    else:
        notes = [
            _total(rows, allocated),
            *([f"{len(rows) - len(shown)} more rows: --limit 0"] * (len(shown) < len(rows))),
        ]
        print("\n\n".join((_table(arguments.by, shown), "\n".join(notes), _sources(queries, end, arguments))))
    return DONE


def _advised(rows: Sequence[Size]) -> float:
    """Return the GiB-hours with these limits; programs without a limit count with what they needed."""
    return sum((row.needed_bytes if row.limit_bytes is None else row.limit_bytes) * row.hours for row in rows) / GIB


def _object(by: Sequence[str], row: Size) -> dict[str, object]:
    return {**dict(zip(by, row.group, strict=True)), **{k: own for k, own in asdict(row).items() if k != "group"}}


def _table(by: Sequence[str], rows: Sequence[Size]) -> str:
    header = (
        *map(str.upper, by),
        "MODEL",
        ">HOURS",
        ">NEEDED",
        ">USUAL",
        ">LIMIT",
        ">RESERVE",
        ">PER GPU",
        "MIG",
        "NO LIMIT",
    )
    return table(
        header,
        [
            (
                *(name or "(none)" for name in row.group),
                row.model,
                f"{row.hours:.1f}",
                size(int(row.needed_bytes)),
                size(int(row.usual_bytes)),
                size(row.limit_bytes),
                size(row.reserve_bytes),
                "-" if row.per_device is None else str(row.per_device),
                row.profile or "-",
                row.reason,
            )
            for row in rows
        ],
    )


def _total(rows: Sequence[Size], allocated: float) -> str:
    advised = _advised(rows)
    saved = f", {1 - advised / allocated:.0%} less" if 0 < advised < allocated else ""
    return (
        f"GPUs with programs: {allocated:.1f} GiB-hours; the limits of these programs: {advised:.1f} GiB-hours{saved}"
    )


def _sources(queries: Mapping[str, str], end: float, arguments: argparse.Namespace) -> str:
    formulas = (
        f"LIMIT = NEEDED + {arguments.headroom:.0%} and RESERVE = USUAL, in steps of 256 MiB. PER GPU = size / LIMIT. "
        "No limit if one from the first half of the period would have been exceeded in the second."
    )
    period = f"Period: {readable(arguments.duration)} until {moment(end)}. The queries, evaluated at {end:.0f}:"
    names = {
        "needed": "NEEDED",
        "earlier": "NEEDED in the first half",
        "usual": "USUAL",
        "hours": "HOURS",
        "size": "size",
        "allocated": "GPUs with programs",
    }
    lines = (f"{names[name]}: {safe(query)}" for name, query in queries.items())
    return "\n".join((formulas, period, *lines))
