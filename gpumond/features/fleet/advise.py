"""``gpumond fleet advise``: print sizes for programs (limit, reserve, number on a GPU, MIG profile) from what they
needed in a period, and the queries from which each number comes.

What a program needs on a device is its memory without the cached part, which a flush would release.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from gpumond.cli.arguments import (
    DONE,
    NOTHING_TO_DO,
    add_option,
    option_type,
    parse_duration,
    print_error,
    print_result,
)
from gpumond.facts.errors import ConfigError
from gpumond.facts.units import DAY_SECONDS, GIB, duration_text
from gpumond.features.fleet.accounting import (
    LABEL_BY_COLUMN,
    OWNER_LABELS,
    TARGET_LABELS,
    columns_parser,
    device_expression,
    selector,
)
from gpumond.features.fleet.discovery import SeriesSample, add_prometheus_arguments, make_prometheus, query_all
from gpumond.view.text import printable, size_or_dash, table, time_text

DEFAULT_HEADROOM_RATIO = 0.1
"""Part of the need that a limit adds, by default."""
ROUNDING_BYTES = 2**28
"""Limits and reserves are multiples of 256 MiB."""
MIN_HOURS = 1.0
"""Programs that ran for a shorter time, all together, get no advice."""
MAX_STEPS = 336
"""Steps of the sums over a period: half an hour each in a week."""
MIG_MODELS = re.compile(r"A100|A30\b|H100|H200|GH200|B200|GB200|B300|GB300|RTX PRO 6000 Blackwell", re.IGNORECASE)
QUARTER_MODELS = re.compile(r"A30\b|RTX PRO 6000 Blackwell", re.IGNORECASE)
"""Models whose memory MIG divides into quarters instead of eighths."""
MIG_PROFILES: Mapping[bool, Sequence[tuple[int, float]]] = {
    False: ((1, 1 / 8), (2, 2 / 8), (3, 4 / 8), (7, 1.0)),
    True: ((1, 1 / 4), (2, 2 / 4), (4, 1.0)),
}
"""Compute slices and part of the memory of each profile, by whether a model has quarters, from NVIDIA's MIG user guide.
Of profiles with the same memory, the one of which most instances fit on a device with the most slices."""
USABLE_RATIO = 0.9
"""Part of a profile's share of the memory that its instances have at least: 16 GiB of 17.6 on an H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeAdvice:
    """Sizes for the programs of one group on devices of one model.

    ``group``: its labels in the order of the columns. ``needed_bytes``: the highest need of one of its programs on one
    device in the period, ``earlier_bytes`` that of the first half, None without one; ``usual_bytes``: the highest
    median of a machine. ``hours``: program-hours on a device. The other fields are None with a ``reason``; ``profile``
    also for models without MIG and for a need that only a whole device meets, ``per_device`` for an unknown size.
    """

    group: tuple[str, ...]
    model: str
    needed_bytes: float
    earlier_bytes: float | None
    usual_bytes: float
    hours: float
    reason: str = ""
    limit_bytes: int | None = None
    reserve_bytes: int | None = None
    per_device: int | None = None
    profile: str | None = None


def need_queries(job: str | None, labels: Sequence[str], period_seconds: int) -> Mapping[str, str]:
    """Return the PromQL expression of each value, evaluated at the end of a period.

    ``labels``: those by which programs are grouped, in addition to ``model``. Bytes, hours, and bytes times hours.
    """
    group_labels, step_seconds = ", ".join((*labels, "model")), max(60, -(-period_seconds // MAX_STEPS // 60) * 60)
    target = ", ".join(TARGET_LABELS)
    metric, half_seconds = selector("gpumond_owner_needed_bytes", job), period_seconds // 2
    needed = f"{metric}[{period_seconds}s]"
    processes = f"max by ({target}, {', '.join(OWNER_LABELS[:5])}) ({selector('gpumond_owner_device_processes', job)})"
    shares = selector("gpumond_device_memory_share_bytes", job, 'share!="unattributed"')
    device_size = device_expression(job, "gpumond_device_memory_size_bytes")
    allocated = f"({device_size}) and on ({target}, uuid) (max by ({target}, uuid) ({shares}) > 0)"

    def hours(expression: str, by: str) -> str:
        total = f"sum_over_time(({expression})[{period_seconds}s:{step_seconds}s])"
        return f"sum by ({by}) ({total}) * {step_seconds} / 3600"

    return {
        "needed": f"max by ({group_labels}) (max_over_time({needed}))",
        "earlier": f"max by ({group_labels}) (max_over_time({metric}[{half_seconds}s] offset {half_seconds}s))",
        "usual": f"max by ({group_labels}) (quantile_over_time(0.5, {needed}))",
        "hours": hours(processes, group_labels),
        "size": f"min by (model) (last_over_time(({device_size})[{period_seconds}s:{step_seconds}s]))",
        "allocated": hours(allocated, "model"),
    }


def advise_programs(
    values: Mapping[str, Iterable[SeriesSample]], labels: Sequence[str], headroom_ratio: float
) -> list[SizeAdvice]:
    """Return the sizes of each group on each model from the results of the expressions, the longest running first."""
    values_by_group: dict[tuple[str, ...], dict[str, float]] = {}
    for name in ("needed", "earlier", "usual", "hours"):
        for sample in values[name]:
            key = tuple(sample.labels.get(label, "") for label in (*labels, "model"))
            values_by_group.setdefault(key, {})[name] = sample.value
    device_bytes = value_by_model(values["size"])
    rows = [
        advise_program(
            key[:-1],
            key[-1],
            needed_bytes=group_values["needed"],
            earlier_bytes=group_values.get("earlier"),
            usual_bytes=group_values["usual"],
            hours=group_values["hours"],
            device_bytes=device_bytes.get(key[-1]),
            headroom_ratio=headroom_ratio,
        )
        for key, group_values in values_by_group.items()
        if {"needed", "usual", "hours"} <= group_values.keys()
    ]
    return sorted(rows, key=lambda row: (-row.hours, row.group, row.model))


def value_by_model(samples: Iterable[SeriesSample]) -> dict[str, float]:
    return {sample.labels.get("model", ""): sample.value for sample in samples}


def advise_program(
    group: tuple[str, ...],
    model: str,
    *,
    needed_bytes: float,
    earlier_bytes: float | None,
    usual_bytes: float,
    hours: float,
    device_bytes: float | None,
    headroom_ratio: float = DEFAULT_HEADROOM_RATIO,
) -> SizeAdvice:
    """Return the sizes for programs with these needs, on devices of this size. Bytes and hours.

    Without a limit: programs whose need is not settled, since a limit from the first half of the period would have been
    exceeded in the second.
    """
    advice = SizeAdvice(
        group=group,
        model=model,
        needed_bytes=needed_bytes,
        earlier_bytes=earlier_bytes,
        usual_bytes=usual_bytes,
        hours=hours,
    )
    limit_bytes = _round_up(needed_bytes * (1 + headroom_ratio))
    if device_bytes is not None:
        limit_bytes = min(limit_bytes, math.floor(device_bytes))
    if hours < MIN_HOURS:
        return replace(advice, reason=f"ran for less than {MIN_HOURS:g} h")
    if earlier_bytes is None or needed_bytes > earlier_bytes * (1 + headroom_ratio):
        return replace(advice, reason="needed more in the second half of the period")
    if not limit_bytes or (device_bytes is not None and needed_bytes > device_bytes):
        return replace(advice, reason="needed no memory" if not limit_bytes else "needed more than the device has")
    return replace(
        advice,
        limit_bytes=limit_bytes,
        reserve_bytes=min(limit_bytes, _round_up(usual_bytes)),
        per_device=None if device_bytes is None else int(device_bytes // limit_bytes),
        profile=None if device_bytes is None else mig_profile(model, device_bytes, limit_bytes),
    )


def _round_up(size_bytes: float) -> int:
    return math.ceil(size_bytes / ROUNDING_BYTES) * ROUNDING_BYTES


def mig_profile(model: str, device_bytes: float, limit_bytes: float) -> str | None:
    """Return the name of the smallest MIG profile whose instances have at least this memory, None for a whole device.

    ``device_bytes``: size of the whole device. Names follow NVIDIA's, which round its nominal size.
    """
    if not MIG_MODELS.search(model):
        return None
    for slices, memory_ratio in MIG_PROFILES[bool(QUARTER_MODELS.search(model))]:
        if memory_ratio < 1 and limit_bytes <= device_bytes * memory_ratio * USABLE_RATIO:
            return f"{slices}g.{math.floor(math.ceil(device_bytes / GIB) * memory_ratio + 0.5)}gb"
    return None


COLUMNS = tuple(name for name in LABEL_BY_COLUMN if name not in ("model", "machine"))


def parse_headroom(text: str) -> float:
    """Return the ratio of a percentage. Raises ValueError."""
    try:
        ratio = float(text.removesuffix("%")) / 100
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 10:
        raise ValueError("expected a percentage such as 10%")
    return ratio


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prometheus_arguments(parser)
    add_option(
        parser,
        "--by COLUMN[,COLUMN]",
        f"one proposal for all programs with the same values of these columns: {', '.join(COLUMNS)} (default: "
        "workload)",
        type=option_type(columns_parser(COLUMNS)),
        default="workload",
    )
    add_option(
        parser,
        "--for DURATION",
        "length of the period, which ends now (default: 7d)",
        dest="duration",
        type=parse_duration,
        default=7 * DAY_SECONDS,
    )
    add_option(
        parser,
        "--headroom PERCENT",
        "margin of the proposed limit above the memory that the programs needed (default: 10%%)",
        type=option_type(parse_headroom),
        default=DEFAULT_HEADROOM_RATIO,
    )
    add_option(parser, "--limit N", "maximum number of rows; 0 for all (default: 20)", type=int, default=20)
    add_option(parser, "--json", "print JSON")


async def run(arguments: argparse.Namespace) -> int:
    if arguments.limit < 0:
        raise ConfigError("--limit must not be negative")
    if arguments.duration < 60:
        raise ConfigError("--for must be at least one minute")
    prometheus = make_prometheus(arguments)
    if prometheus is None:
        raise ConfigError("--prometheus is required: advice is based only on its series")
    end = float(int(time.time()))
    labels = [LABEL_BY_COLUMN[name] for name in arguments.by]
    queries = need_queries(arguments.job, labels, int(arguments.duration))
    answers = await query_all(prometheus.query(query, end) for query in queries.values())
    values = dict(zip(queries, answers, strict=True))
    rows = advise_programs(values, labels, arguments.headroom)
    if not rows:
        print_error(
            "gpumond: Prometheus has no series gpumond_owner_needed_bytes from "
            f"{time_text(end - arguments.duration)} to {time_text(end)}; "
            "check --for, --job, the daemons' version, and the groups of the scrape (collect[])"
        )
        return NOTHING_TO_DO
    shown = rows[: arguments.limit or None]
    allocated = sum(value_by_model(values["allocated"]).values()) / GIB
    advised = _advised_gibibyte_hours(rows)
    notes = _total_text(advised, allocated)
    if len(shown) < len(rows):
        notes += f"\nrows left out: {len(rows) - len(shown)}; to show all: --limit 0"
    document = {
        "at": end,
        "headroom_ratio": arguments.headroom,
        "queries": queries,
        "allocated_gibibyte_hours": allocated,
        "advised_gibibyte_hours": advised,
        "rows": [_row_object(arguments.by, row) for row in shown],
    }
    texts = (_advice_table(arguments.by, shown), notes, _queries_text(queries, end, arguments))
    print_result(arguments, document, lambda: "\n\n".join(texts))
    return DONE


def _advised_gibibyte_hours(rows: Sequence[SizeAdvice]) -> float:
    """Return the GiB-hours with these limits; programs without a limit count with what they needed."""
    return sum((row.needed_bytes if row.limit_bytes is None else row.limit_bytes) * row.hours for row in rows) / GIB


def _row_object(columns: Sequence[str], row: SizeAdvice) -> dict[str, object]:
    return {
        **dict(zip(columns, row.group, strict=True)),
        **{name: value for name, value in asdict(row).items() if name != "group"},
    }


def _advice_table(columns: Sequence[str], rows: Sequence[SizeAdvice]) -> str:
    header = (
        *map(str.upper, columns),
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
                size_or_dash(int(row.needed_bytes)),
                size_or_dash(int(row.usual_bytes)),
                size_or_dash(row.limit_bytes),
                size_or_dash(row.reserve_bytes),
                "-" if row.per_device is None else str(row.per_device),
                row.profile or "-",
                row.reason,
            )
            for row in rows
        ],
    )


def _total_text(advised: float, allocated: float) -> str:
    """Compare the GiB-hours of the limits with those of the GPUs."""
    saved = f", {1 - advised / allocated:.0%} less" if 0 < advised < allocated else ""
    return (
        f"GPUs with programs: {allocated:,.1f} GiB-hours; the limits of these programs: {advised:,.1f} GiB-hours{saved}"
    )


def _queries_text(queries: Mapping[str, str], end: float, arguments: argparse.Namespace) -> str:
    formulas = (
        f"LIMIT = NEEDED + {arguments.headroom:.0%} and RESERVE = USUAL, in steps of 256 MiB. PER GPU = size / LIMIT. "
        "No limit is proposed if one computed from the first half of the period would have been exceeded in the "
        "second half."
    )
    period = f"Period: {duration_text(arguments.duration)} until {time_text(end)}. The queries, evaluated at {end:.0f}:"
    names = {
        "needed": "NEEDED",
        "earlier": "NEEDED in the first half",
        "usual": "USUAL",
        "hours": "HOURS",
        "size": "size",
        "allocated": "GPUs with programs",
    }
    lines = (f"{names[name]}: {printable(query)}" for name, query in queries.items())
    return "\n".join((formulas, period, *lines))
