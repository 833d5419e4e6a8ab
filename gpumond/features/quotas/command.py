"""``gpumond quota``: quotas, and the processes that they match; ``gpumond queue``: programs that wait for memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import DONE, print_result
from gpumond.facts.units import duration_text, size_text
from gpumond.view.rows import (
    claimed_bytes,
    grant_sentences,
    limit_sentences,
    process_of,
    queue_position_sentence,
    quota_sentence,
    request_advice,
    reserve_sentences,
    taken_memory_sentences,
    waiting_sentences,
)
from gpumond.view.text import fitting_table, output_width, printable_excerpt, size_or_dash, table, wrap_text

LIMIT_KEYS = ("soft_limit", "limit", "reserve", "cgroup_limit")

PROCESS_KEYS = (
    "pid",
    "start_ticks",
    "workload",
    "comm",
    "device_uuid",
    "used_bytes",
    "limit_bytes",
    "reserve_shortage_bytes",
    "quota",
)
"""What the JSON states of a process that a quota or a limit applies to."""
LIMIT_BASES = """\
a soft limit counts all memory that a process uses; a limit applies to each of its allocators, without overhead"""
HOW_TO_ADD = """\
to add a quota, list it under quotas: in the configuration file, or send it with PUT /api/v1/quotas/NAME
to limit a program that is running: gpumond limit NAME SIZE"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    quotas, frame = client.get(arguments.url, "/api/v1/quotas"), client.frame(arguments.url)
    limited = [each for each in frame["processes"] if each["quota"] or each["limit_bytes"] is not None]
    answer = {"quotas": quotas, "processes": [{name: each[name] for name in PROCESS_KEYS} for each in limited]}
    print_result(arguments, answer, lambda: quota_text(quotas, frame, arguments.url))
    return DONE


def quota_text(quotas: Sequence[Mapping[str, Any]], frame: Mapping[str, Any], url: str = client.DEFAULT_URL) -> str:
    """Return the quotas, and the processes that a quota or a limit without one applies to.

    ``url``: the daemon's, for the commands.
    """
    header = ("QUOTA", "MATCHES", ">SOFT LIMIT", ">LIMIT", ">RESERVE", ">CGROUP LIMIT", "ORIGIN")
    reports = {process_of(report): report for report in frame["snapshot"]["reports"]}
    rows = [_process_row(each, reports.get(process_of(each))) for each in frame["processes"]]
    limited = [row for row in rows if row[-1]]
    how_to_add = client.with_commands(HOW_TO_ADD, url)
    bases = [LIMIT_BASES] if limited else []
    limits = "\n".join((*bases, *limit_sentences(frame["processes"])))
    sentences = (limits, "\n".join(reserve_sentences(frame)), how_to_add)
    sections = (
        table(header, [[*_quota_cells(entry)] for entry in quotas]) if quotas else "no quota is defined",
        table((">PID", "PROGRAM", ">USED", ">RESERVE SHORTAGE", "LIMITS"), limited) if limited else "",
        cgroup_table(frame),
        *(wrap_text(each, output_width()) for each in sentences),
    )
    return "\n\n".join(filter(None, sections))


def _quota_cells(entry: Mapping[str, Any]) -> Iterator[str]:
    quota = entry["quota"]
    matched = quota.get("match") or {}
    yield entry["name"]
    yield ", ".join(f"{name}={pattern}" for name, pattern in matched.items() if pattern is not None) or "all"
    yield from (size_or_dash(quota.get(kind)) for kind in LIMIT_KEYS)
    yield entry["origin"]


def _process_row(process: Mapping[str, Any], report: Mapping[str, Any] | None) -> list[str]:
    """Return a row of the table of processes; its last cell is empty if nothing limits the process."""
    quota, limit = process["quota"] or {}, process["limit_bytes"]
    other = f"limit {size_text(limit)} (no quota)" if limit is not None and not quota.get("limit_quota") else ""
    return [
        str(process["pid"]),
        process["workload"] or process["comm"] or "?",
        size_or_dash(process["used_bytes"]),
        size_or_dash(process["reserve_shortage_bytes"]),
        ", ".join(filter(None, (quota_sentence(process, report), other))),
    ]


def cgroup_table(frame: Mapping[str, Any]) -> str:
    """Return a table of the limits that the driver keeps for cgroups; empty without one."""
    quotas = {process["pid"]: process["quota"] or {} for process in frame["processes"]}
    rows = [
        [
            str(device["index"]),
            size_or_dash(each["used_bytes"]),
            size_or_dash(each["guaranteed_bytes"]),
            size_or_dash(each["limit_bytes"]),
            next(
                (
                    quotas[pid]["cgroup_limit_quota"]
                    for pid in each["pids"]
                    if quotas.get(pid) and quotas[pid]["cgroup_limit_bytes"] == each["limit_bytes"]
                ),
                "-",
            ),
            printable_excerpt(each["cgroup"]),
        ]
        for device in frame["snapshot"]["devices"]
        for each in device["cgroup_limits"]
        if each["limit_bytes"] is not None or each["guaranteed_bytes"] is not None
    ]
    return table(("GPU", ">USED", ">GUARANTEED", ">LIMIT", "QUOTA", "CGROUP"), rows) if rows else ""


def no_request_text(frame: Mapping[str, Any]) -> str:
    """Return that no program waits, and the command of one that would."""
    device = " --need-device GPU" if len(frame["snapshot"]["devices"]) > 1 else ""
    command = f"gpumond run --need SIZE{device} --wait 10m -- COMMAND"
    return f"no program is waiting for memory. To start yours as soon as there is room: {command}"


class QueueCommand:
    """``gpumond queue``."""

    add_arguments = staticmethod(client.add_arguments)

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        frame = client.frame(arguments.url)
        queue = [{**each, "by_flushes_bytes": _by_flushes_bytes(each)} for each in frame["queue"]]
        answer = {"queue": queue, "grants": frame["grants"]}
        print_result(arguments, answer, lambda: queue_text(frame, arguments.url))
        return DONE


def queue_text(frame: Mapping[str, Any], url: str = client.DEFAULT_URL) -> str:
    """Return the requests that wait, who holds the memory, and the grants whose memory isn't all held yet.

    ``url``: the daemon's, for the commands.
    """
    positions = "\n".join(filter(None, (queue_position_sentence(frame, each) for each in frame["queue"])))
    held_memory = "\n".join(waiting_sentences(frame))
    taken_memory = "\n".join((*taken_memory_sentences(frame), *reserve_sentences(frame)))
    advice = "\n".join(filter(None, (request_advice(frame, each) for each in frame["queue"])))
    requests = queue_table(frame)
    sentences = [
        "" if requests else client.with_commands(no_request_text(frame), url),
        positions,
        held_memory,
        taken_memory,
        advice,
        "\n".join(grant_sentences(frame)),
    ]
    return "\n\n".join(filter(None, (requests, *(wrap_text(each, output_width()) for each in sentences))))


def _by_flushes_bytes(request: Mapping[str, Any]) -> int | None:
    """Return the bytes that the daemon's flushes would return for a request; None if they are unknown."""
    need, available, missing = (request[f"{name}_bytes"] for name in ("need", "available", "missing"))
    return None if available is None else max(0, need - available - missing)


def queue_table(frame: Mapping[str, Any]) -> str:
    """Return a table of the requests; empty without one."""
    indexes = {device["uuid"]: str(device["index"]) for device in frame["snapshot"]["devices"]}
    header = (
        "GPU",
        ">NEED",
        ">AVAILABLE",
        ">FROM FLUSHES",
        ">MISSING",
        ">POSITION",
        ">PID",
        "PROGRAM",
        "USER",
        ">WAITING",
    )
    now = frame["snapshot"]["taken_at"]
    rows = []
    for request in frame["queue"]:
        need, available, missing = (request[f"{name}_bytes"] for name in ("need", "available", "missing"))
        by_flushes, is_claimed = _by_flushes_bytes(request), claimed_bytes(request) is not None
        rows.append(
            [
                indexes.get(request["device_uuid"], "?"),
                size_text(need),
                size_or_dash(available and max(0, available)),
                size_or_dash(by_flushes),
                "-" if is_claimed else size_text(missing),
                str(request["ahead"] + 1),
                "-" if request["pid"] is None else str(request["pid"]),
                request["workload"] or "-",
                request["user"] or "-",
                duration_text(max(0.0, now - request["since"])),
            ]
        )
    hideable = ("USER", ">FROM FLUSHES", ">AVAILABLE", ">PID", ">POSITION", ">MISSING")
    return fitting_table(header, rows, output_width(), hideable, "gpumond queue --json") if rows else ""
