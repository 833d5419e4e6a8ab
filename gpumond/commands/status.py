"""``gpumond status``: show devices, processes and the memory of each."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import DONE, NOTHING_TO_DO, add_option, explain_columns, print_csv, print_error
from gpumond.facts.errors import LIST_PROGRAMS_HINT, ConfigError, did_you_mean
from gpumond.facts.shares import SHARE_MEANINGS, SHARES
from gpumond.view.frame import frame_view, view_of_device, view_of_programs
from gpumond.view.rows import ProcessRow
from gpumond.view.tables import (
    device_table,
    engine_table,
    note_paragraphs,
    overhead_text,
    process_table,
    suspended_programs,
)
from gpumond.view.text import output_width, wrap_text

VERDICT_MEANING = (
    "The process's most urgent alert or problem or, without one, a healthy verdict such as steady; +N: N more."
)
LIMIT_MEANING = (
    "What each of the program's allocators may hold: live, cached and stranded memory. Overhead doesn't count."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="show only these programs (workload names or pids)")
    add_option(parser, "--healthy", "only check that the daemon responds (for health checks)")
    add_option(
        parser,
        "-v, --verbose",
        "also show GPU UUIDs and PCI addresses, and what the programs' overhead consists of",
    )
    add_option(parser, "-w, --wide", "show complete tables, even if they are wider than the terminal")
    add_option(parser, "--device GPU", "show one GPU: index, UUID or its prefix, or PCI address")
    order = "order of the processes (default: used); waste is cached and stranded memory"
    add_option(parser, "--sort used|waste", order, choices=("used", "waste"))
    client.add_arguments(parser, entries="processes")
    shares = {share: SHARE_MEANINGS[share] for share in (*SHARES, "unmapped", "reserved")}
    explain_columns(parser, shares | {"limit": LIMIT_MEANING, "verdict": VERDICT_MEANING})


def run(arguments: argparse.Namespace) -> int:
    if arguments.healthy:
        client.get(arguments.url, "/-/healthy")
        return DONE
    if arguments.json and (arguments.names or arguments.device is not None or arguments.sort):
        options = "NAME, --device and --sort can't be combined with --json, which always has all processes and GPUs"
        raise ConfigError(f"{options}; filter it by pid or uuid, or use --csv")
    device = None if arguments.device is None else client.resolve_device_uuid(arguments.url, arguments.device)
    frame = client.frame(arguments.url)
    if arguments.json:
        answers = {name: client.get(arguments.url, f"/api/v1/{name}") for name in ("status", "quotas")}
        print(json.dumps(_combined_document(frame, answers), indent=2))
        return DONE
    shown, width = view_of_device(frame_view(frame), device), output_width()
    selectable_names = {each for row in shown.processes for each in (row.program, str(row.pid))}
    if missing := [name for name in arguments.names if name not in selectable_names]:
        hint = did_you_mean(missing[0], selectable_names) or LIST_PROGRAMS_HINT
        names = " or ".join(f"with pid {each}" if each.isdecimal() else f"named {each}" for each in missing)
        print_error(f"gpumond: no process {names} uses a GPU{hint}")
        if len(missing) == len(arguments.names):
            return NOTHING_TO_DO
    if arguments.names:
        shown = view_of_programs(shown, arguments.names)
    if arguments.sort == "waste":
        shown = replace(shown, processes=tuple(sorted(shown.processes, key=_waste, reverse=True)))
    if arguments.csv:
        print_csv([row.sources.process for row in shown.processes])
        return DONE
    limit = None if arguments.wide else width
    tables = (
        device_table(shown, arguments.verbose, limit, bars=width is not None),
        process_table(shown, limit, waste=arguments.sort == "waste"),
        "" if arguments.names else engine_table(frame["snapshot"], limit, device),
        "" if arguments.names else wrap_text(suspended_programs(frame, device), limit),
    )
    paragraphs = (wrap_text(client.with_commands(note, arguments.url), limit) for note in note_paragraphs(shown))
    sections = (*tables, overhead_text(shown) if arguments.verbose else "", *paragraphs)
    print("\n\n".join(section for section in sections if section))
    return DONE


def _waste(row: ProcessRow) -> int:
    """Return the waste of a process; -1 if it is unknown."""
    return -1 if row.waste_bytes is None else row.waste_bytes


def _combined_document(frame: dict[str, Any], answers: dict[str, Any]) -> dict[str, Any]:
    """Return one frame, keyed by the names of the routes. Only ``answers`` may be from a later frame."""
    snapshot = frame["snapshot"]
    document = {"seq": snapshot["seq"], **answers, "devices": snapshot["devices"], "agents": snapshot["reports"]}
    document["engines"] = snapshot.get("engines", [])
    return document | {name: frame[name] for name in ("processes", "ledger", "verdicts", "alerts", "queue", "grants")}
