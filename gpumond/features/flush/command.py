"""``gpumond flush``: make programs release cached memory and print receipts; ``gpumond receipts``: past receipts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import (
    DONE,
    FAILED,
    NOTHING_TO_DO,
    add_option,
    add_target,
    parse_count,
    parse_duration,
    print_error,
    print_result,
    with_typed_option,
)
from gpumond.facts.errors import ConfigError, DaemonError
from gpumond.facts.pools import ALL_STEPS, DEFAULT_STEPS, ENGINE_STEP, Receipt, with_option_names
from gpumond.facts.suspension import SuspensionReceipt
from gpumond.facts.units import caller_text, parse_size_argument
from gpumond.view.frame import checked_as, receipts_of
from gpumond.view.rows import difference_sentences
from gpumond.view.text import size_or_dash, table, time_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target = add_target(parser, "flush")
    add_option(target, "--user NAME", "flush one user's processes that have an agent")
    add_option(target, "--all", "flush every process with an agent")
    add_option(
        parser,
        "--step STEP",
        f"flush step to run, repeatable: {', '.join(ALL_STEPS)} (default: {', '.join(DEFAULT_STEPS)})",
        action="append",
        choices=ALL_STEPS,
    )
    add_option(parser, "--wake", "with --step engine: undo a serving engine's last release")
    add_option(parser, "--min-reclaimable SIZE", "skip each allocator that would release less than SIZE", default="0")
    add_option(parser, "--dry-run", "show what a flush would release, and flush nothing")
    add_option(
        parser, "--force", "ignore the cooldown and, with --step engine, a previous release that got no response"
    )
    add_option(
        parser,
        "--plan ID",
        "compare the receipts with the plan that has this ID (`id` in the output of --dry-run --json)",
    )
    add_option(
        parser, "--timeout DURATION", "time limit for each process (default: 30s)", type=parse_duration, default=30.0
    )
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    target_options = ("pid", "device", "workload", "user", "all")
    if arguments.wake and arguments.step != [ENGINE_STEP]:
        raise ConfigError("--wake requires --step engine, and no other step")
    try:
        min_reclaimable_bytes = parse_size_argument(arguments.min_reclaimable)
    except ValueError as error:
        raise ConfigError(f"--min-reclaimable {arguments.min_reclaimable!r}: {error}") from None
    body: dict[str, Any] = {
        "target": {name: value for name in target_options if (value := getattr(arguments, name)) not in (None, False)},
        "dry_run": arguments.dry_run,
        "min_reclaimable_bytes": min_reclaimable_bytes,
        "timeout_seconds": arguments.timeout,
    }
    if arguments.step:
        body["steps"] = arguments.step
    if arguments.force:
        body["force"] = True
    if arguments.wake:
        body["wake"] = True
    if arguments.plan:
        body["plan"] = arguments.plan
    try:
        answer = client.post(arguments.url, "/api/v1/flushes", body, timeout_seconds=20 * arguments.timeout + 30)
    except DaemonError as error:
        print_error(f"gpumond: {with_option_names(with_typed_option(error, arguments))}")
        if "receipts" not in error.problem:
            return client.exit_code_of(arguments, error)
        answer = error.problem
    receipts = receipts_of(answer)
    if arguments.plan and not any(receipt.get("planned") for receipt in receipts):
        print_error(f"gpumond: plan {arguments.plan} is unknown or expired, or contains none of these programs")
    user_name = client.user_names(arguments.url)
    print_result(
        arguments, answer, lambda: plan_table(receipts) if arguments.dry_run else receipt_table(receipts, user_name)
    )
    return _exit_code(receipts)


def _exit_code(receipts: Iterable[dict[str, Any]]) -> int:
    """Return FAILED if any flush failed, NOTHING_TO_DO if none released, or would release, memory."""
    receipts = list(receipts)
    if any(receipt["outcome"] in ("failed", "timeout") for receipt in receipts):
        return FAILED
    effective = [
        receipt
        for receipt in receipts
        if receipt["outcome"] in ("freed", "partial", "gone", "woken")
        or (receipt["outcome"] == "planned" and receipt["expected"] and receipt["expected"]["high"] > 0)
    ]
    return DONE if effective else NOTHING_TO_DO


BOUND_HEADERS = {"likely": ">WOULD RELEASE", "low": ">AT LEAST", "high": ">AT MOST"}


def plan_table(receipts: Sequence[Mapping[str, Any]]) -> str:
    """Return the plan as a table: the bytes that each pool would release now, the largest first, and their total.

    AT LEAST and AT MOST are absent while every prediction is exact.
    """
    predictions = [receipt["expected"] for receipt in receipts if receipt["expected"]]
    exact = all(prediction["low"] == prediction["likely"] == prediction["high"] for prediction in predictions)
    bounds = ["likely"] if exact else [*BOUND_HEADERS]
    header = (">PID", "PROGRAM", "ALLOCATOR", "OUTCOME", *(BOUND_HEADERS[bound] for bound in bounds), "REASON")
    low, high = (sum(prediction[bound] for prediction in predictions) for bound in ("low", "high"))
    is_known = all(prediction["likely"] is not None for prediction in predictions)
    parts = [size_or_dash(sum(prediction["likely"] for prediction in predictions))] if is_known else []
    parts += [f"between {size_or_dash(low)} and {size_or_dash(high)}"] if low != high else []
    changes = "; the amount changes while the programs run" if high else ""
    largest_first = sorted(receipts, key=lambda each: -each["expected"]["high"] if each["expected"] else 0)
    rows = [
        [*_program_cells(each), *(_predicted_size(each["expected"], bound) for bound in bounds), _remarks(each)]
        for each in largest_first
    ]
    return f"{table(header, rows)}\n\na flush now would release {', '.join(parts)}{changes}"


def receipt_table(
    receipts: Sequence[Mapping[str, Any]], user_name: Callable[[int], str | None], past: bool = False
) -> str:
    """Return the receipts as a table: planned, expected and released bytes, and those that the driver measured.

    ``user_name``: as in `caller_text`. ``past``: with the time at which each was done, and who requested it. Others
    are of one request, whose time and caller follow.
    """
    size_columns = (">PLANNED", ">EXPECTED", ">RELEASED", ">DRIVER", ">TOOK")
    header = [">PID", "PROGRAM", "ALLOCATOR", "OUTCOME", *size_columns, "REASON"]
    rows: Iterable[list[str]] = _receipt_rows(receipts)
    if past:
        header = ["FINISHED", *header[:-1], "BY", "REASON"]
        pairs = zip(rows, receipts, strict=True)
        rows = (
            [time_text(_finished_at(each)), *row[:-1], _caller_text(each, user_name), row[-1]] for row, each in pairs
        )
    text = table(header, rows, None, HIDEABLE_COLUMNS, "gpumond receipts --json")
    released = [receipt["released_bytes"] for receipt in receipts if receipt["outcome"] != "woken"]
    known_sizes = [each for each in released if each is not None]  # unknown of a suspension
    if receipts and not known_sizes:
        return text
    total = f"{size_or_dash(sum(known_sizes))} released" + (" by flushes" if len(known_sizes) < len(released) else "")
    if receipts and not past:
        earliest = min(receipts, key=itemgetter("started_at"))
        total += f" at {time_text(earliest['started_at'])} by {_caller_text(earliest, user_name)}"
    return f"{text}\n\n{total}"


HIDEABLE_COLUMNS = (">PLANNED", ">TOOK", ">EXPECTED", "ALLOCATOR", "BY", ">DRIVER")
"""Columns of receipts that a narrow terminal does not show, in the order in which they are left out."""


def _finished_at(receipt: Mapping[str, Any]) -> float:
    return float(receipt["started_at"] + receipt["duration_seconds"])


def _caller_text(receipt: Mapping[str, Any], user_name: Callable[[int], str | None]) -> str:
    return caller_text(receipt["requested_by"], receipt.get("requested_for", ""), user_name)


def _receipt_rows(receipts: Iterable[Mapping[str, Any]]) -> Iterator[list[str]]:
    for receipt in receipts:
        yield [
            *_program_cells(receipt),
            _predicted_size(receipt.get("planned"), "likely"),
            _predicted_size(receipt["expected"], "likely"),
            size_or_dash(receipt["released_bytes"]),
            size_or_dash(receipt["driver_released_bytes"]),
            f"{receipt['duration_seconds']:.2f} s",
            "; ".join(filter(None, (_remarks(receipt), *difference_sentences(receipt)))),
        ]


def _remarks(receipt: Mapping[str, Any]) -> str:
    """Return the reason and, for an engine whose memory goes, how it returns to service."""
    parts = [with_option_names(receipt["reason"])]
    if receipt.get("wake") and receipt["outcome"] in ("planned", "freed", "partial", "gone", "timeout"):
        seconds = receipt.get("wake_seconds")
        parts.append(f"return to service: {receipt['wake']}" + (f" ({seconds:.0f} s the last time)" if seconds else ""))
    return "; ".join(filter(None, parts))


def _program_cells(receipt: Mapping[str, Any]) -> list[str]:
    return [str(receipt["pid"]), receipt["workload"], receipt["allocator"] or "-", receipt["outcome"]]


def _predicted_size(prediction: Mapping[str, Any] | None, bound: str) -> str:
    return size_or_dash(prediction[bound] if prediction else None)


def _as_flush_receipt(receipt: Mapping[str, Any], url: str) -> Mapping[str, Any]:
    """Return the receipt of a suspension or resumption with the keys of a flush's, which it extends.

    ``url``: the daemon's, for the commands.
    """
    expected, host = receipt["expected_bytes"], receipt["host_bytes"]
    returned = receipt["returned_bytes"]
    reasons = (
        receipt["reason"],
        client.with_commands(receipt["remedy"], url),
        host and f"{size_or_dash(host)} on the host",
        returned and f"{size_or_dash(returned)} back on the GPU",
    )
    return {
        **receipt,
        "allocator": None,
        "expected": None if expected is None else {"likely": expected},
        "released_bytes": None,
        "driver_released_bytes": receipt["released_bytes"],
        "reason": "; ".join(filter(None, reasons)),
        "raced": False,
    }


class ReceiptsCommand:
    """``gpumond receipts``: the receipts of past flushes, suspensions and resumptions."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add_option(
            parser, "--limit N", "number of receipts, most recent last (default: 100)", type=parse_count, default=100
        )
        client.add_arguments(parser, entries="receipts")

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        receipts = checked_as(tuple[Receipt, ...], client.get(arguments.url, "/api/v1/receipts"), "receipts")
        suspensions_json = client.get(arguments.url, "/api/v1/suspensions/receipts")
        suspensions = checked_as(tuple[SuspensionReceipt, ...], suspensions_json, "receipts")
        flushes = (each for each in receipts if each["outcome"] != "planned")
        entries = sorted((*flushes, *suspensions), key=_finished_at)[-arguments.limit :]
        rows = [_as_flush_receipt(each, arguments.url) if "action" in each else each for each in entries]
        nothing = "no receipts; to see what a flush would release: gpumond flush --all --dry-run"
        user_name = client.user_names(arguments.url)
        print_result(
            arguments,
            entries,
            lambda: receipt_table(rows, user_name, past=True) if rows else client.paragraph(nothing, arguments.url),
        )
        return DONE
