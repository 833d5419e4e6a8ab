"""``gpumond why``: what the live memory of programs consists of; ``gpumond snapshot`` and ``gpumond limit``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import add_option, add_target, confirm, positive_type
from gpumond.facts import units
from gpumond.facts.alerts import AGAIN_SINCE, ALERT_WAS
from gpumond.facts.errors import ConfigError, DaemonError, GpumondError
from gpumond.facts.units import parse_seconds_argument, parse_size_argument, size_text
from gpumond.facts.verdicts import PATTERN_NAMES, VERDICT_NAMES, VERDICT_REMEDIES
from gpumond.host.files import unwritable_text
from gpumond.view.frame import checked_as
from gpumond.view.live_memory import why_lines
from gpumond.view.notices import steps_of
from gpumond.view.text import output_width, printable, size_or_dash, table, time_text, wrap_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser, "show the memory of")
    add_recording_option(parser)
    add_option(parser, "--folded FILE", "with --record: download one process's stacks to this file")
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.folded is not None and not arguments.record:
        raise ConfigError("--folded requires --record")
    answers, status = _ask_with_recording(arguments, "why", None if arguments.folded is None else "--folded")
    if arguments.folded is not None:
        for program, answer in answers:
            if answer["folded"] is not None:
                download_dump(arguments.url, program.pid, answer["folded"], arguments.folded)
    if not answers:
        return status
    if arguments.json:
        print(client.answers_json(arguments, answers))
        return status
    gpus, pids_with_case = client.gpu_names(arguments.url), _pids_with_case(arguments.url)
    frame, rules = _frame_and_rules(arguments.url)
    for program, answer in answers:
        lines = [] if arguments.pid is not None else [f"{program}:"]
        lines += [*findings(frame, program.pid, rules), *why_lines(answer, gpus)]
        if program.pid in pids_with_case:
            lines.append(f"to see its newest out-of-memory error: gpumond oom show --pid {program.pid}")
        if not answer["sites"]:
            lines.append(f"to see the lines that allocate: gpumond why --pid {program.pid} --record 30s")
        print(client.paragraph("\n".join(lines), arguments.url))
    return status


def _frame_and_rules(url: str) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]:
    """Return the daemon's frame, and its rules by name if an alert is active. Both are empty if they are unknown."""
    with suppress(DaemonError):
        frame = client.frame(url)
        if not frame["alerts"]:
            return frame, {}
        with suppress(DaemonError):
            return frame, {each["name"]: each["rule"] for each in client.get(url, "/api/v1/rules")}
        return frame, {}
    return {}, {}


@dataclass(frozen=True, slots=True)
class _CasePid:
    """What is needed of a case."""

    pid: int


def _pids_with_case(url: str) -> frozenset[int]:
    """Return the pids of the programs with a case of an out-of-memory error; none if they are unknown."""
    with suppress(DaemonError):
        cases = checked_as(tuple[_CasePid, ...], client.get(url, "/api/v1/oom"), "cases")
        return frozenset(each["pid"] for each in cases)
    return frozenset()


def findings(frame: Mapping[str, Any], pid: int, rules: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a program's active verdicts, each with its remedy, and its alerts with their thresholds."""
    for verdict in frame.get("verdicts", ()):
        if verdict["pid"] == pid and verdict["kind"] not in PATTERN_NAMES:
            yield printable(f"verdict {verdict['kind']} since {time_text(verdict['since'])}: {verdict['summary']}")
            steps = steps_of(VERDICT_REMEDIES.get(verdict["kind"], "").replace("PID", str(pid)))
            yield from (f"  -> {step}" for step in steps if "gpumond why" not in step)
    for alert in frame.get("alerts", ()):
        if alert.get("pid") == pid:
            summary, _, is_past = dict(alert.get("annotations", ())).get("summary", "").partition(ALERT_WAS)
            summary, _, again = summary.partition(AGAIN_SINCE)
            since = f"again since {again}" if again else f"since {time_text(alert['fired_at'] or alert['active_at'])}"
            state = f"{alert['phase']} {since}"
            reason = _threshold_text(alert, rules) or (f": {summary}" if alert["rule"] not in VERDICT_NAMES else "")
            yield printable(f"alert {alert['rule']} {summary if is_past else state + reason}")


def _threshold_text(alert: Mapping[str, Any], rules: Mapping[str, Mapping[str, Any]]) -> str:
    """Return an alert's value and its rule's threshold; empty for a rule of a condition, whose threshold is 0."""
    rule = rules.get(alert["rule"], {})
    name = rule.get("value") or ""
    limits = [f"{word} {_value_text(name, rule[word])}" for word in ("above", "below") if rule.get(word)]
    if not name or not limits:
        return ""
    return f"; {name} is {_value_text(name, alert['value'])} (threshold: {' or '.join(limits)})"


def _value_text(name: str, value: float) -> str:
    if name.endswith("_seconds"):
        return units.duration_text(value)
    return size_text(value) if "_bytes" in name else f"{value:.4g}"


RESPONSE_TIMEOUT_SECONDS = 60.0
"""Longest wait for the answer of a program, besides the recording."""


def add_recording_option(parser: argparse.ArgumentParser) -> None:
    add_option(
        parser,
        "--record DURATION",
        "record allocation stacks for this long first, such as 60s, and save them for flame graphs",
        type=positive_type(parse_seconds_argument),
        default=0.0,
    )


def _ask_with_recording(
    arguments: argparse.Namespace, request: str, single_program_option: str | None
) -> tuple[list[tuple[client.TargetProgram, Any]], int]:
    """Send a request, with the recording that ``--record`` demands; see `client.ask_programs`."""
    body = {"record_seconds": arguments.record} if arguments.record else {}
    timeout_seconds = arguments.record + RESPONSE_TIMEOUT_SECONDS
    programs = client.select_programs(arguments)
    return client.ask_programs(arguments, programs, request, body, timeout_seconds, single_program_option)


def download_dump(url: str, pid: int, dump: dict[str, Any], out: str) -> None:
    """Write a snapshot's file to ``out``, which is complete or absent. Raises GpumondError."""
    if dump.get("id") is None:
        raise DaemonError("the program's agent is too old to send the file")
    partial = f"{out}.{os.getpid()}.partial"
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            client.download(url, f"/api/v1/agents/{pid}/snapshots/{dump['id']}", file)
        os.replace(partial, out)
    except OSError as error:
        raise GpumondError(unwritable_text(out, error)) from None
    finally:
        with suppress(OSError):
            os.unlink(partial)


class SnapshotCommand:
    """``gpumond snapshot``: programs write memory snapshots, and the file of one is downloaded."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add_target(parser, "request a snapshot from")
        add_recording_option(parser)
        add_option(parser, "--out FILE", "download one process's snapshot to this file")
        client.add_arguments(parser)

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        answers, status = _ask_with_recording(arguments, "snapshot", None if arguments.out is None else "--out")
        for program, dump in answers:
            if arguments.out is not None:
                download_dump(arguments.url, program.pid, dump, arguments.out)
            if not arguments.json:
                where = arguments.out or f"{dump['path']} on the program's machine; to download it, add --out FILE"
                subject = "" if arguments.pid is not None else f"{program}: "
                print(f"{subject}wrote {size_text(dump['size_bytes'])} ({dump['allocator']}) to {where}")
        if arguments.json and answers:
            print(client.answers_json(arguments, answers))
        return status


LIMIT_TIMEOUT_SECONDS = 40.0


class LimitCommand:
    """``gpumond limit``: limit the memory that the allocators of programs may hold."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add_target(parser, "limit", device=False)
        add_option(
            parser,
            "--device GPU",
            "limit on one GPU only (index, UUID or its prefix, or PCI address); if you select no program, for every "
            "process with an agent on that GPU",
        )
        parser.add_argument(
            "limit",
            metavar="SIZE|none",
            help="the most that each allocator may hold, such as 40GiB; none removes the limit",
        )
        add_option(
            parser,
            "--yes",
            "don't ask for confirmation, and don't warn if a program would still hold more than SIZE after a flush",
        )
        client.add_arguments(parser)

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        has_target = (arguments.pid, arguments.workload, arguments.device) != (None, None, None)
        try:
            limit_bytes = None if arguments.limit == "none" else parse_size_argument(arguments.limit)
            if limit_bytes == 0:
                raise ValueError("the size must be above 0")
        except ValueError as error:
            problem = f"SIZE {arguments.limit!r:.80}: {error}"
            example = printable(f"gpumond limit {arguments.limit:.80} 40GiB")
            raise ConfigError(problem if has_target else f"SIZE is required, for example: {example}") from None
        if not has_target:
            raise ConfigError("one of NAME, --pid, --workload and --device is required; see `gpumond limit --help`")
        programs = client.select_programs(arguments)
        if (
            limit_bytes is not None
            and not arguments.yes
            and (warnings := _excess_warnings(arguments, programs, limit_bytes))
        ):
            print(wrap_text("\n".join(warnings), output_width()), file=sys.stderr)
            if sys.stdin.isatty() and not arguments.json:
                confirm(f"Limit to {size_text(limit_bytes)}?", "nothing was limited")
        body = {"limit_bytes": limit_bytes, "device": arguments.device}
        answers, status = client.ask_programs(arguments, programs, "limit", body, LIMIT_TIMEOUT_SECONDS)
        if not answers:
            return status
        if arguments.json:
            print(client.answers_json(arguments, answers, "limits"))
            return status
        gpus, frame = client.gpu_names(arguments.url), client.frame(arguments.url)
        names = {each["pid"]: each["workload"] or each["comm"] for each in frame["processes"]}
        header = (">PID", "PROGRAM", "ALLOCATOR", "GPU", ">LIMIT", "APPLIED", "REASON")
        rows = [
            [
                str(program.pid),
                program.workload or names.get(program.pid) or "-",
                each["allocator"] or "-",
                gpus.get(each["device_uuid"], each["device_uuid"] or "-").removeprefix("GPU "),
                "none" if each["limit_bytes"] is None else size_or_dash(each["limit_bytes"]),
                "yes" if each["applied"] else "no",
                each["reason"],
            ]
            for program, limits in answers
            for each in limits
        ]
        print(table(header, rows))
        limited_devices = {each["device_uuid"] for _, limits in answers for each in limits if each["applied"]}
        lines = notes_on_quotas(frame, limit_bytes, {program.pid for program, _ in answers})
        for line in (*lines, *notes_on_small_devices(frame, limit_bytes, limited_devices)):
            print(wrap_text(line, output_width()))
        if limit_bytes is not None and limited_devices:
            print(
                client.paragraph(
                    f"to remove this limit: gpumond limit {_target_options(arguments)} none", arguments.url
                )
            )
        return status


def _target_options(arguments: argparse.Namespace) -> str:
    """Return the words that select the programs again."""
    name = arguments.workload
    words = [] if name is None else ["--workload", name] if name.isdecimal() else [name]
    words += [] if arguments.pid is None else ["--pid", str(arguments.pid)]
    words += [] if arguments.device is None else ["--device", arguments.device]
    return shlex.join(words)


def notes_on_small_devices(frame: Mapping[str, Any], limit_bytes: int | None, uuids: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each device that is smaller than the limit."""
    for device in frame["snapshot"]["devices"]:
        size_bytes = device["size_bytes"]
        if device["uuid"] in uuids and limit_bytes is not None and size_bytes is not None and limit_bytes > size_bytes:
            yield f"this limit has no effect on GPU {device['index']}, which has only {size_text(size_bytes)}"


def notes_on_quotas(frame: Mapping[str, Any], limit_bytes: int | None, pids: Collection[int]) -> Iterator[str]:
    """Yield the processes for which a quota sets a lower limit than the one that was requested."""
    for process in frame["processes"]:
        quota = process["quota"] or {}
        quota_bytes = quota.get("limit_bytes")
        if process["pid"] in pids and quota_bytes is not None and (limit_bytes is None or limit_bytes > quota_bytes):
            name = printable(f"{process['workload'] or process['comm'] or 'the program'} (pid {process['pid']})")
            reset = f"will soon reset the limit of {name} to {size_text(quota_bytes)}"
            yield f"the {printable(quota['limit_quota'])} quota {reset}"


def _excess_warnings(
    arguments: argparse.Namespace, programs: Iterable[client.TargetProgram], limit_bytes: int
) -> list[str]:
    """Return a sentence about each pool that a limit makes useless."""
    uuid = arguments.device and client.resolve_device_uuid(arguments.url, arguments.device)
    pids = {program.pid for program in programs}
    agents = [each for each in client.get(arguments.url, "/api/v1/agents") if each["pid"] in pids]
    return [line for agent in agents if agent["allows_limit"] for line in notes_on_excess(agent, limit_bytes, uuid)]


def notes_on_excess(agent: Mapping[str, Any], limit_bytes: int, device_uuid: str | None) -> Iterator[str]:
    """Yield what follows for each pool of a program that holds more than a limit, even without its cache."""
    for pool in agent["pools"]:
        held_bytes, cached_bytes = pool["held_bytes"], pool["reclaimable"]["likely"]
        if held_bytes - cached_bytes <= limit_bytes or device_uuid not in (None, pool["device_uuid"]):
            continue
        besides = f" besides its cache ({size_text(cached_bytes)})" if cached_bytes else ""
        name = printable(f"{agent['workload'] or 'the program'} (pid {agent['pid']})")
        excess = size_text(held_bytes - cached_bytes - limit_bytes)
        consequence = f"its next allocation from the driver fails unless it frees {excess}{besides}"
        yield f"{name} holds {size_text(held_bytes)}: with this limit, {consequence}"
